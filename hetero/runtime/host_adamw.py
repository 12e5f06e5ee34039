"""Updates weights by AdamW on the host, in threads that are bound to cores, with an update to try first.

The state of a flat range of parameters, master weights and moments, lies in the host's memory, and new weights leave
for where the layers want them. An update may be **previewed** before the norm of the gradient is known: it makes a
second state of the first, whose weights leave. The **commit** then lets the second one be the state, if it was made
with the factor that the norm gives; otherwise it updates the first, and the weights leave again. After a step that is
skipped the old weights return. So a right preview costs memory, for both states, and no time.

All of that gives the bits of ``torch.optim.AdamW(fused=True)`` over the whole range, which :mod:`.optimizer` uses: its
kernel takes elements by the vector, and what is left over at an end by itself, which may round otherwise. Chunks of a
multiple of 64 elements have the ends of their vectors where the whole has them.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from hetero.errors import ConfigError

ALIGNMENT = 64
"""Elements: that many fp32 or fp64 ones are whole vectors on every processor."""

CHUNK_NUMEL = 2**18
"""Of a chunk by default. A heuristic: smaller ones fit into a nearer cache, and take Python more often
(tests/bench/bench_host_adamw.py compares sizes)."""

START_S = 60.0
"""In which all threads have to have started; one whose core was taken away meanwhile never does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostUpdate:
    """One update of a range of parameters, which all decay or all do not.

    number: of updates so far with this one, from 1.
    factor: by which the gradients are multiplied first: the clip factor over the loss scale.
    """

    number: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    factor: float = 1.0


class BoundThreads:
    """Threads of this process that are each bound to one core, and that share out the chunks of one task at a time.

    Args:
        cores: by the kernel's numbers, of which this process may use all; one thread for each.

    Raises:
        ConfigError: no cores, one twice, or one that this process may not use.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        usable = os.sched_getaffinity(0)
        if not cores or len(set(cores)) < len(cores) or not usable.issuperset(cores):
            raise ConfigError(
                f"threads for updates: bound to cores {list(cores)}; name each once, of those that this process may "
                f"use: {', '.join(map(str, sorted(usable)))}"
            )
        self.cores = tuple(cores)
        self._local = threading.local()
        self._free_cores: queue.SimpleQueue[int] = queue.SimpleQueue()
        for core in cores:
            self._free_cores.put(core)
        self._pool = ThreadPoolExecutor(len(cores), thread_name_prefix="host-update", initializer=self._bind)
        num_threads = torch.get_num_threads()
        # As many tasks as threads, each of which waits for all: so all threads start now.
        all_bound = threading.Barrier(len(cores), timeout=START_S)
        for bound in [self._pool.submit(all_bound.wait) for _ in cores]:
            bound.result()
        # Torch gives what was set last to every thread that is new to it.
        torch.set_num_threads(num_threads)

    def __enter__(self) -> "BoundThreads":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, task: Callable[[int], None], *, count: int) -> None:
        """Call ``task`` with 0 to ``count`` - 1, each in whichever thread is free, and return when all are done.

        Raises:
            BaseException: what a call raised; others may have been made or not.
        """
        numbers = iter(range(count))
        futures = [self._pool.submit(_take_each, task, numbers) for _ in self.cores]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the calling thread, so many elements, that its next call may overwrite."""
        num_bytes = numel * dtype.itemsize
        if getattr(self._local, "num_bytes", 0) < num_bytes:
            self._local.num_bytes = num_bytes
            self._local.memory = torch.empty(num_bytes, dtype=torch.uint8)
        memory: torch.Tensor = self._local.memory
        return memory[:num_bytes].view(dtype)

    def _bind(self) -> None:
        # Of a thread alone, although the first argument is that of a process.
        os.sched_setaffinity(0, {self._free_cores.get()})
        # The kernels of torch are to stay in the thread that calls them. Asking first makes it remember its own number.
        torch.get_num_threads()
        torch.set_num_threads(1)


class HostAdamW:
    """AdamW on one flat range of parameters, whose state lies in the host's memory.

    Args:
        main: the weights in full precision, which become the state's own.
        threads: that update, shared with other ranges: one range at a time.
        previews: hold a second state, so that updates can be previewed.
        chunk_numel: elements that a thread takes at once.

    Raises:
        ConfigError: chunks of another size than a multiple of :data:`ALIGNMENT`.
    """

    def __init__(
        self, main: torch.Tensor, threads: BoundThreads, *, previews: bool = False, chunk_numel: int = CHUNK_NUMEL
    ) -> None:
        if chunk_numel < ALIGNMENT or chunk_numel % ALIGNMENT:
            raise ConfigError(
                f"update on the host: chunk_numel is {chunk_numel}, must be a multiple of {ALIGNMENT}, so that chunks "
                "give the bits of the whole"
            )
        self._state = _State(main, torch.zeros_like(main), torch.zeros_like(main))
        self._other = _State(*(torch.empty_like(main) for _ in range(3))) if previews else None
        self._threads = threads
        self._chunk_numel = chunk_numel
        self._previewed: HostUpdate | None = None

    @property
    def main(self) -> torch.Tensor:
        """The weights in full precision. A commit may put another tensor in its place, and in those of the moments."""
        return self._state.main

    @property
    def exp_avg(self) -> torch.Tensor:
        """Adam's first moment: a running mean of gradients."""
        return self._state.exp_avg

    @property
    def exp_avg_sq(self) -> torch.Tensor:
        """Adam's second moment: a running mean of their squares."""
        return self._state.exp_avg_sq

    @property
    def nbytes(self) -> int:
        """Of the state, both of them where there are two."""
        return sum(tensor.nbytes for state in (self._state, self._other) if state is not None for tensor in state)

    def has_previewed(self, update: HostUpdate) -> bool:
        """Whether a commit of ``update`` has nothing to compute."""
        return self._previewed == update

    def preview(self, gradients: torch.Tensor, update: HostUpdate, *, weights: torch.Tensor) -> None:
        """Write into ``weights`` what ``update`` would make of them, and leave the state as it is.

        Args:
            gradients: in the precision of the state; :meth:`commit` is to get the same.
        """
        state, other = self._state, self._other
        assert other is not None, "made without previews"
        self._previewed = None

        def on_chunk(part: slice, number: torch.Tensor) -> None:
            for copy, original in zip(other, state, strict=True):
                copy[part].copy_(original[part])
            self._update_chunk(other.part(part), part, gradients, update, number)
            weights[part].copy_(other.main[part])

        self._on_each_chunk(on_chunk, update)
        self._previewed = update

    def commit(self, gradients: torch.Tensor, update: HostUpdate, *, weights: torch.Tensor) -> bool:
        """Update the state, and ``weights`` unless they were previewed with just this ``update``.

        Returns:
            Whether the preview was right; false without one.
        """
        was_right = self._previewed == update
        self._previewed = None
        if was_right:
            assert self._other is not None, "made without previews"
            self._state, self._other = self._other, self._state
            return True
        state = self._state

        def on_chunk(part: slice, number: torch.Tensor) -> None:
            self._update_chunk(state.part(part), part, gradients, update, number)
            weights[part].copy_(state.main[part])

        self._on_each_chunk(on_chunk, update)
        return False

    def skip(self, *, weights: torch.Tensor) -> bool:
        """There is no update in this step: if one was previewed, ``weights`` are again what they were before.

        Returns:
            Whether that changed them.
        """
        changed = self._previewed is not None
        if changed:
            self._previewed = None
            weights.copy_(self.main)
        return changed

    def _on_each_chunk(self, work: Callable[[slice, torch.Tensor], None], update: HostUpdate) -> None:
        number = torch.tensor(float(update.number))
        size, numel = self._chunk_numel, self.main.numel()

        def on_chunk(index: int) -> None:
            work(slice(index * size, min((index + 1) * size, numel)), number)

        self._threads.run(on_chunk, count=-(-numel // size))

    def _update_chunk(
        self, state: "_State", part: slice, gradients: torch.Tensor, update: HostUpdate, number: torch.Tensor
    ) -> None:
        own = gradients[part]
        if update.factor != 1.0:
            own = torch.mul(own, update.factor, out=self._threads.scratch(own.numel(), own.dtype))
        _adamw(state, own, update, number)


class _State(NamedTuple):
    """Master weights and moments."""

    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def part(self, part: slice) -> "_State":
        return _State(*(each[part] for each in self))


def _take_each(task: Callable[[int], None], numbers: Iterator[int]) -> None:
    # All threads take from one iterator of a range, whose steps Python makes one at a time.
    with torch.no_grad():
        for number in numbers:
            task(number)


def _adamw(
    state: _State,
    gradients: torch.Tensor,
    update: HostUpdate,
    number: torch.Tensor,
) -> None:
    torch._fused_adamw_(
        [state.main],
        [gradients],
        [state.exp_avg],
        [state.exp_avg_sq],
        [],
        [number],
        lr=update.lr,
        beta1=update.betas[0],
        beta2=update.betas[1],
        weight_decay=update.weight_decay,
        eps=update.eps,
        amsgrad=False,
        maximize=False,
    )
