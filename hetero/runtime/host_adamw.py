"""Updates weights by AdamW on the host, in threads that are bound to cores, with an update to try first.

The state of a flat range of parameters, master weights and moments, lies in the host's memory, and new weights leave
for where the layers want them. An update may be **previewed** before the norm of the gradient is known: it runs on a
scratch copy of each chunk, of which only the weights leave, so that no state has changed. The **commit** then updates
the state, with the factor that the norm gives; if it is not what was previewed, the weights leave again, and after a
step that is skipped the old ones return.

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

    def scratch(self, rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the calling thread, [rows, numel], that its next call may overwrite."""
        num_bytes = rows * numel * dtype.itemsize
        if getattr(self._local, "num_bytes", 0) < num_bytes:
            self._local.num_bytes = num_bytes
            self._local.memory = torch.empty(num_bytes, dtype=torch.uint8)
        memory: torch.Tensor = self._local.memory
        return memory[:num_bytes].view(dtype).view(rows, numel)

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
        chunk_numel: elements that a thread takes at once.

    Raises:
        ConfigError: chunks of another size than a multiple of :data:`ALIGNMENT`.
    """

    def __init__(self, main: torch.Tensor, threads: BoundThreads, *, chunk_numel: int = CHUNK_NUMEL) -> None:
        if chunk_numel < ALIGNMENT or chunk_numel % ALIGNMENT:
            raise ConfigError(
                f"update on the host: chunk_numel is {chunk_numel}, must be a multiple of {ALIGNMENT}, so that chunks "
                "give the bits of the whole"
            )
        self.main = main
        self.exp_avg = torch.zeros_like(main)
        self.exp_avg_sq = torch.zeros_like(main)
        self._threads = threads
        self._chunk_numel = chunk_numel
        self._previewed: HostUpdate | None = None

    def preview(self, gradients: torch.Tensor, update: HostUpdate, *, weights: torch.Tensor) -> None:
        """Write into ``weights`` what ``update`` would make of them, and leave the state as it is.

        Args:
            gradients: in the precision of the state; :meth:`commit` is to get the same.
        """
        self._previewed = update
        self._on_each_chunk(lambda part, number: self._preview_chunk(part, gradients, update, weights, number), update)

    def commit(self, gradients: torch.Tensor, update: HostUpdate, *, weights: torch.Tensor) -> bool:
        """Update the state, and ``weights`` unless they were previewed with just this ``update``.

        Returns:
            Whether the preview was right; false without one.
        """
        was_right = self._previewed == update
        self._previewed = None
        leaving = None if was_right else weights
        self._on_each_chunk(lambda part, number: self._commit_chunk(part, gradients, update, leaving, number), update)
        return was_right

    def skip(self, *, weights: torch.Tensor) -> None:
        """There is no update in this step: if one was previewed, ``weights`` are again what they were before."""
        if self._previewed is not None:
            self._previewed = None
            weights.copy_(self.main)

    def _on_each_chunk(self, work: Callable[[slice, torch.Tensor], None], update: HostUpdate) -> None:
        number = torch.tensor(float(update.number))
        size, numel = self._chunk_numel, self.main.numel()

        def on_chunk(index: int) -> None:
            work(slice(index * size, min((index + 1) * size, numel)), number)

        self._threads.run(on_chunk, count=-(-numel // size))

    def _preview_chunk(
        self, part: slice, gradients: torch.Tensor, update: HostUpdate, weights: torch.Tensor, number: torch.Tensor
    ) -> None:
        copies = self._scratch(4, part)
        state = (self.main[part], self.exp_avg[part], self.exp_avg_sq[part])
        for copy, original in zip(copies[:3], state, strict=True):
            copy.copy_(original)
        _adamw((copies[0], copies[1], copies[2]), _scaled(gradients[part], copies[3], update), update, number)
        weights[part].copy_(copies[0])

    def _commit_chunk(
        self,
        part: slice,
        gradients: torch.Tensor,
        update: HostUpdate,
        weights: torch.Tensor | None,
        number: torch.Tensor,
    ) -> None:
        state = (self.main[part], self.exp_avg[part], self.exp_avg_sq[part])
        _adamw(state, _scaled(gradients[part], self._scratch(1, part)[0], update), update, number)
        if weights is not None:
            weights[part].copy_(state[0])

    def _scratch(self, rows: int, part: slice) -> torch.Tensor:
        return self._threads.scratch(rows, part.stop - part.start, self.main.dtype)


def _scaled(gradients: torch.Tensor, scratch: torch.Tensor, update: HostUpdate) -> torch.Tensor:
    return gradients if update.factor == 1.0 else torch.mul(gradients, update.factor, out=scratch)


def _take_each(task: Callable[[int], None], numbers: Iterator[int]) -> None:
    # All threads take from one iterator of a range, whose steps Python makes one at a time.
    with torch.no_grad():
        for number in numbers:
            task(number)


def _adamw(
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gradients: torch.Tensor,
    update: HostUpdate,
    number: torch.Tensor,
) -> None:
    main, exp_avg, exp_avg_sq = state
    torch._fused_adamw_(
        [main],
        [gradients],
        [exp_avg],
        [exp_avg_sq],
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
