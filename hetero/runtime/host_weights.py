"""Keeps weights of blocks on the host, and fetches them for each compute one block ahead.

    main thread   forward   block 3 ─ block 4 ─ block 5        backward   block 5 ─ block 4 ─ block 3
    weights in     IN 3 ─ IN 4   └ IN 5      (4 and 5 stay)                    └ IN 3

The buckets of these weights lie in the host's memory, where the host updates them. A thread copies the weights of a
block to the device; when a compute has done with a block, its memory is given back, and the block after the next may
come. So there are two at a time, in the order of the computes of the program; a block that is needed again before
another one would need its room stays.

Given back is the memory below a weight: its storage is resized to nothing and back, in place, as in torch's FSDP2
(``torch.distributed.fsdp``). What autograd has saved of the weight in a forward shares the storage, and reads in the
backward what has been fetched again. Another tensor in the weight's place would leave autograd with the old one.

A backward has come to a layer when it has the gradient of the layer's output, and to the first block when it begins. A
layer that is computed again tells by its forward. Backwards of an embedding need no weights.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from hetero.cost.stage_memory import WEIGHT_SLOTS
from hetero.distributed.timing import Timing
from hetero.plan.ir import Stage
from hetero.plan.offload import fetched_blocks
from hetero.plan.stream_roles import StreamRole
from hetero.runtime.buckets import LocalBucket, LocalSegment
from hetero.runtime.host_activations import HeldBytes
from hetero.runtime.host_copies import Arrived, host_copies
from hetero.runtime.stage_blocks import blocks_of, layers_of, tell_beginnings
from hetero.schedule.actions import BACKWARD, FETCHES, Action, ActionKind
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import EMBEDDING

WholeOnHost = Callable[[int], Callable[[], float]]
"""Of a bucket by its number, what comes back once its last update is on the host, with the time of that."""


@dataclass(slots=True, eq=False)
class _Weight:
    """A parameter whose weights live on the host.

    device: the parameter's memory on the device, past autograd: writing to it is no change of the parameter.
    segments: where it lies on the host, with the numbers of the buckets.
    users: fetches that need it and are not over.
    """

    tensor: torch.nn.Parameter
    device: torch.Tensor
    segments: list[tuple[LocalSegment, int]] = field(default_factory=list)
    users: int = 0


@dataclass(slots=True, eq=False)
class _Fetch:
    """The weights of one block, for one compute.

    coming: returns when they are there.
    """

    stage: int
    kind: ActionKind
    position: float
    coming: "Future[tuple[Arrived, float]]" = field(default_factory=Future)
    is_reached: bool = False

    @property
    def block(self) -> tuple[int, float]:
        return self.stage, self.position


class HostWeights:
    """Brings weights of a rank's stages from its host, as the plan says: those of no block in most plans.

    A step or an evaluation is :meth:`begin`, and :meth:`using` around each compute in the order of the program.

    Args:
        stages: by index, those that the rank holds, and their modules.
        buckets: of this rank.
        whole: what fetches of a bucket's weights wait for.
        timing: how long copies take.

    Attributes:
        on_device: bytes of the blocks that are there, or come.
        on_host: bytes of the host's memory.
    """

    def __init__(
        self,
        stages: Mapping[int, tuple[Stage, torch.nn.Module]],
        buckets: Sequence[LocalBucket],
        *,
        model: ModelSpec,
        device: torch.device,
        whole: WholeOnHost,
        timing: Timing | None = None,
    ) -> None:
        kept = [local for local in buckets if local.weights_on_host]
        self.on_device = HeldBytes()
        self.on_host = sum(local.weights.nbytes for local in kept)
        self._timing = timing or Timing()
        self._whole = whole
        self._stages = {s: stage for s, (stage, _) in stages.items()}
        self._num_layers = model.num_layers
        self._weights: dict[torch.nn.Parameter, _Weight] = {}
        self._blocks: dict[tuple[int, float], list[_Weight]] = {}
        self._next: deque[_Fetch] = deque()
        self._there: deque[_Fetch] = deque()
        self._compute: Action | None = None
        if kept:
            self._place(kept, tied=model.tied_embeddings)
            self._copies = host_copies(device)
            self._in = ThreadPoolExecutor(1, thread_name_prefix="weights-in")
            for s, (stage, module) in stages.items():
                if stage.offload.weights_from is not None:
                    self._listen(s, stage, module)

    def __contains__(self, tensor: torch.nn.Parameter) -> bool:
        return tensor in self._weights

    def begin(self, fetches: Iterable[Action]) -> None:
        """A step or an evaluation begins, whose computes come in the order of these actions of the program."""
        assert not self._there, "what came for the last step is over"
        computes = {fetch: compute for compute, fetch in FETCHES.items()}
        for s, kind, _ in fetches:
            self._next.extend(_Fetch(s, kind, position) for position in self._needed(s, computes[kind]))
        self._bring(self._timing.block_end_s(None))

    @contextmanager
    def using(self, action: Action) -> Iterator[None]:
        """Surrounds a compute, inside of which its blocks tell that they begin."""
        needed = self._needed(action.stage, action.kind)
        if not needed:
            yield
            return
        self._compute = action
        if action.kind in BACKWARD or needed[0] < 0:
            self._reach(action.stage, needed[0])
        yield
        self._let_go()
        self._compute = None

    def read(self, tensor: torch.nn.Parameter) -> torch.Tensor:
        """A copy of the weights of ``tensor``, in the host's memory."""
        weight = self._weights[tensor]
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        for segment, _ in weight.segments:
            found[segment.index].copy_(segment.weight)
        return found

    def _needed(self, s: int, kind: ActionKind) -> Sequence[float]:
        return fetched_blocks(self._stages[s], kind, num_layers=self._num_layers)

    def _place(self, kept: Sequence[LocalBucket], *, tied: bool) -> None:
        """Find out what belongs to which block, and where it lies on the host."""
        for local in kept:
            for segment in local.segments:
                weight = self._weights.setdefault(segment.tensor, _Weight(segment.tensor, segment.tensor.data))
                weight.segments.append((segment, local.number))
        embeddings = {tensor for local in kept for tensor, name in local.names().items() if name == EMBEDDING}
        for tensor, (s, position) in dict(blocks_of(kept, self._stages, num_layers=self._num_layers)).items():
            self._blocks.setdefault((s, position), []).append(self._weights[tensor])
            # A stage with both ends uses its word embedding in the head as well.
            end = self._stages[s].end
            if tied and tensor in embeddings and position < 0 and end == self._num_layers:
                self._blocks.setdefault((s, end), []).append(self._weights[tensor])

    def _listen(self, s: int, stage: Stage, module: torch.nn.Module) -> None:
        tell_beginnings(stage, module, partial(self._reach, s), is_last=stage.end == self._num_layers)

        def hook(position: float, module: torch.nn.Module, args: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if self._compute is not None and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: self._reach(s, position))

        for position, layer in layers_of(stage, module):
            layer.register_forward_hook(partial(hook, position))

    def _reach(self, s: int, position: float) -> None:
        """The compute under way begins a block, whose weights may be on the device or not."""
        compute = self._compute
        if compute is None or (self._there and self._there[0].is_reached and self._there[0].position == position):
            return
        self._let_go()
        if position in self._needed(s, compute.kind):
            fetch = self._there[0]
            assert fetch.block == (s, position), "blocks come in the order of the program"
            arrived, at_s = fetch.coming.result()
            arrived.wait()
            self._timing.block_waited(position, at_s)
            fetch.is_reached = True

    def _let_go(self) -> None:
        """Of the block that was reached last, if there is one."""
        if not self._there or not self._there[0].is_reached:
            return
        fetch = self._there.popleft()
        for weight in self._blocks[fetch.block]:
            weight.users -= 1
            if not weight.users:
                weight.tensor.untyped_storage().resize_(0)
                self.on_device.add(-weight.tensor.nbytes)
        self._bring(self._timing.block_end_s(fetch.position))

    def _bring(self, room_s: float) -> None:
        """Let as many blocks come as there is room for, from ``room_s`` on."""
        while self._next and len({fetch.block for fetch in [*self._there, self._next[0]]}) <= WEIGHT_SLOTS:
            fetch = self._next.popleft()
            missing = []
            for weight in self._blocks[fetch.block]:
                if not weight.users:
                    weight.tensor.untyped_storage().resize_(weight.tensor.nbytes)
                    self.on_device.add(weight.tensor.nbytes)
                    missing.append(weight)
                weight.users += 1
            numbers = {number for weight in missing for _, number in weight.segments}
            whole = [self._whole(number) for number in sorted(numbers)]
            fetch.coming = self._in.submit(self._copy_in, fetch, missing, whole, self._copies.mark_computed(), room_s)
            self._there.append(fetch)

    @torch.no_grad()
    def _copy_in(
        self,
        fetch: _Fetch,
        missing: Sequence[_Weight],
        whole: Sequence[Callable[[], float]],
        computed: Callable[[], None],
        room_s: float,
    ) -> tuple[Arrived, float]:
        whole_s = max((wait() for wait in whole), default=0.0)
        with self._copies.within(StreamRole.FETCHES_IN):
            computed()
            for weight in missing:
                for segment, _ in weight.segments:
                    self._copies.copy(weight.device[segment.index], segment.weight)
            arrived = self._copies.arrived(StreamRole.FETCHES_IN)
        if not missing:
            return arrived, 0.0
        after_s = max(whole_s, room_s)
        return arrived, self._timing.copy_block(fetch.kind, fetch.stage, fetch.position, after_s=after_s)
