"""Brings updated weights from the ranks that own them to all that hold them, beside the next forward."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from hetero.distributed.timing import Timing, Waitable
from hetero.runtime.buckets import LocalBucket
from hetero.schedule.program import Program


class WeightGather:
    """Launches the GATHERs of one rank's program, of which there are none where every holder updates everything.

    A gather that has to be there before a position inside a forward is waited for by the modules that have a part of
    it, right before they run, and by :meth:`finish`; one that has to be there before a whole compute, at once.

    Args:
        buckets: this rank's.
        modules: of all stages, whose submodules hold the parameters.
        timing: when gathers happen.
    """

    def __init__(
        self,
        buckets: Sequence[LocalBucket],
        program: Program,
        modules: Iterable[torch.nn.Module] = (),
        *,
        timing: Timing | None = None,
    ) -> None:
        by_number = {local.number: local for local in buckets if local.number is not None}
        gathers = program.queues.get("gather", ())
        self._buckets = buckets
        self._timing = timing or Timing()
        self._queue = [(queued, by_number[queued.action.number]) for queued in gathers]
        self._waited_for_at_once = [
            queued.action.number for queued in gathers if any(point.position is None for point in queued.before)
        ]
        gathered = {queued.action.number for queued in gathers}
        self._at_hand = [local for local in buckets if local.number not in gathered]
        self._pending: dict[int, tuple[LocalBucket, Sequence[Waitable]]] = {}
        self._listen(modules, gathered.difference(self._waited_for_at_once), by_number)

    def start(self) -> None:
        """Launch all gathers in the order of the queue: per bucket what its
        :class:`.BucketCollectives` do, over its holders.
        """
        for local in self._at_hand:
            local.return_weights()
        for queued, local in self._queue:
            start = partial(local.collectives.gather, local.weights)
            works = self._timing.collective(queued, "all_gather", local.bucket, start)
            self._pending[queued.action.number] = local, works
        for number in self._waited_for_at_once:
            self._wait(number)

    def warm_up(self) -> None:
        """Do once what is done with weights after a gather, when all are there."""
        for local in self._buckets:
            local.return_weights()

    def finish(self) -> None:
        """Wait until every weight is there."""
        for number in list(self._pending):
            self._wait(number)

    def _wait(self, number: int) -> None:
        if number in self._pending:
            local, works = self._pending.pop(number)
            for work in works:
                work.wait()
            local.return_weights()

    def _listen(
        self, modules: Iterable[torch.nn.Module], numbers: Iterable[int], buckets: dict[int, LocalBucket]
    ) -> None:
        """Let every module that is about to need weights of these buckets say so."""
        numbers_of: dict[torch.nn.Parameter, list[int]] = {}
        for number in sorted(numbers):
            for tensor in buckets[number].tensors():
                numbers_of.setdefault(tensor, []).append(number)
        for module in modules:
            for submodule in module.modules():
                own = {n for tensor in submodule.parameters(recurse=False) for n in numbers_of.get(tensor, ())}
                if own:
                    submodule.register_forward_pre_hook(self._needs(sorted(own)))

    def _needs(self, numbers: Sequence[int]) -> Callable[[torch.nn.Module, object], None]:
        def hook(module: torch.nn.Module, args: object) -> None:
            for number in numbers:
                self._wait(number)

        return hook
