"""Brings updated weights from who updates them to all ranks that hold them, beside the next forward."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from hetero.distributed.timing import Timing, Waitable, wait_for_all
from hetero.plan.stream_roles import StreamRole
from hetero.runtime.buckets import LocalBucket
from hetero.runtime.host_copies import host_copies
from hetero.runtime.host_optimizer import HostArrival, HostOptimizer
from hetero.schedule.actions import ActionKind
from hetero.schedule.program import Program, QueuedAction


class WeightGather:
    """Launches the GATHERs of one rank's program, of which there are none where every holder updates everything.

    A gather that has to be there before a position inside a forward is waited for by the modules that have a part of
    it, right before they run, and by :meth:`finish`; one that has to be there before a whole compute, at once. So are
    the weights of a bucket that nobody else holds and that the host updates.

    A rank whose host updates launches its gathers in a thread, each when its own part is back from the host: in the
    order of the queue, as all do, but beside the forward. The forward itself must not launch them. It waits for its
    neighbours, and these for gathers of buckets that it needs last (a tied embedding's).

    Weights that live on the host (:mod:`.host_weights`) are not waited for here: who fetches them asks for
    :meth:`whole`. What others hold of them as well goes to the device when it is gathered, one bucket at a time, and to
    the host again.

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
        host: HostOptimizer | None = None,
        timing: Timing | None = None,
    ) -> None:
        by_number = {local.number: local for local in buckets}
        gathers = program.queues.get("gather", ())
        copies = [queued for queued in program.queues.get("copy_in", ()) if queued.before]
        on_host = [q for name in ("host", "gather_out") for q in program.queues.get(name, ()) if q.before]
        self._buckets = buckets
        self._alone_on_host = [local for local in buckets if local.weights_on_host and not local.is_shared]
        self._host = host
        self._timing = timing or Timing()
        self._queue = [(queued, by_number[queued.action.number]) for queued in gathers]
        self._copied = [(queued, by_number[queued.action.number]) for queued in copies]
        awaited = {queued.action.number: queued for queued in (*gathers, *copies, *on_host)}
        self._waited_for_at_once = [
            number for number, queued in awaited.items() if any(point.position is None for point in queued.before)
        ]
        self._at_hand = [local for local in buckets if local.number not in awaited]
        self._on_host = {queued.action.number: queued for queued in on_host}
        self._pending: dict[int, tuple[LocalBucket, Sequence[Waitable]]] = {}
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="weight-gather") if host is not None else None
        self._whole: dict[int, Callable[[], float]] = {}
        if host is not None:
            self._copies = host_copies(buckets[0].device)
        if any(local.weights_on_host and local.is_shared for local in buckets):
            self._outwards = ThreadPoolExecutor(1, thread_name_prefix="gathered-weights-out")
            self._slot_is_free: Callable[[], float] = _now
        self._listen(modules, set(awaited).difference(self._waited_for_at_once, self._on_host), by_number)

    def start(self) -> None:
        """Launch all gathers in the order of the queue: per bucket what its
        :class:`.BucketCollectives` do, over its holders.
        """
        for local in self._at_hand:
            local.return_weights()
        for queued, local in self._copied:
            arrival = self._own_part(local)
            works = [_FromHost(self._timing, queued, arrival)] if arrival is not None else []
            self._pending[local.number] = local, works
        for local in self._alone_on_host:
            arrival = self._own_part(local)
            if arrival is not None:
                self._whole[local.number] = arrival.wait
                self._pending[local.number] = local, [_FromHost(self._timing, self._on_host[local.number], arrival)]
        updated = _Update(self._copies.mark_computed(), self._timing.now_s()) if self._host is not None else None
        for queued, local in self._queue:
            if self._launcher is None or updated is None:
                gathering = self._gather(queued, local)
            else:
                launched = _Launched(self._launcher.submit(self._gather_behind, updated, queued, local))
                gathering = [launched]
                if local.weights_on_host:
                    self._whole[local.number] = launched.last
            self._pending[local.number] = local, gathering
        for number in self._waited_for_at_once:
            self._wait(number)

    def behind(self, start: Callable[[], Waitable]) -> Waitable:
        """Start a collective of the next step behind all gathers, whose communicator it may share."""
        return start() if self._launcher is None else _Launched(self._launcher.submit(lambda: [start()]))

    def warm_up(self) -> None:
        """Do once what is done with weights after a gather, when all are there."""
        for local in self._buckets:
            local.return_weights()

    def finish(self) -> None:
        """Wait until every weight is there."""
        for number in list(self._pending):
            self._wait(number)

    def whole(self, number: int) -> Callable[[], float]:
        """What comes back once all weights of a bucket are on the host as the last update left them, and says when
        that was."""
        return self._whole.get(number, _now)

    def _own_part(self, local: LocalBucket) -> HostArrival | None:
        return self._host.arrival(local.number) if self._host is not None else None

    def _gather(
        self,
        queued: QueuedAction,
        local: LocalBucket,
        *,
        ready_s: float | None = None,
        weights: torch.Tensor | None = None,
    ) -> Sequence[Waitable]:
        start = partial(local.collectives.gather, local.weights if weights is None else weights)
        return self._timing.collective(queued, "all_gather", local.bucket, start, ready_s=ready_s)

    def _gather_behind(self, updated: "_Update", queued: QueuedAction, local: LocalBucket) -> Sequence[Waitable]:
        """In the thread: once the own part is there, of the device's update or of the host's."""
        with self._copies.within(StreamRole.GATHERS):
            updated.issued()
            arrival = self._own_part(local)
            came_s = arrival.wait() if arrival is not None else 0.0
            ready_s = max(updated.at_s, came_s)
            if local.weights_on_host:
                return self._gather_to_host(queued, local, ready_s)
            return self._gather(queued, local, ready_s=ready_s)

    @torch.no_grad()
    def _gather_to_host(self, queued: QueuedAction, local: LocalBucket, ready_s: float) -> Sequence[Waitable]:
        """A bucket whose weights live on the host, which goes to the device in between."""
        # One at a time is on the device.
        self._slot_is_free()
        on_device = torch.empty_like(local.weights, device=local.device)
        with self._timing.host(ActionKind.GATHER_IN, local.bucket, after_s=ready_s) as span:
            self._copies.copy(on_device[local.summed], local.weights[local.summed])
        works = self._gather(queued, local, ready_s=max(span.end_s, ready_s), weights=on_device)
        out = self._outwards.submit(self._copy_out, local, on_device, works, self._copies.mark_computed())
        self._slot_is_free = out.result
        return [*works, _OnHost(self._timing, self._on_host[local.number], out)]

    @torch.no_grad()
    def _copy_out(
        self, local: LocalBucket, on_device: torch.Tensor, works: Sequence[Waitable], computed: Callable[[], None]
    ) -> float:
        """What others have updated; when it was on the host."""
        with self._copies.outwards(StreamRole.GATHERS):
            computed()
            gathered_s = self._timing.wait_beside(works)
            with self._timing.host(ActionKind.GATHER_OUT, local.bucket, after_s=gathered_s) as span:
                for theirs in (slice(0, local.summed.start), slice(local.summed.stop, local.whole.stop)):
                    self._copies.copy(local.weights[theirs], on_device[theirs])
        return max(span.end_s, gathered_s)

    def _wait(self, number: int) -> None:
        if number in self._pending:
            local, works = self._pending.pop(number)
            wait_for_all(works)
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


@dataclass(frozen=True, slots=True)
class _Launched:
    """Collectives that a thread launches; waiting raises what it raised."""

    launched: "Future[Sequence[Waitable]]"

    def wait(self) -> object:
        wait_for_all(self.launched.result())
        return None

    def is_completed(self) -> bool:
        return self.launched.done() and all(work.is_completed() for work in self.launched.result())

    def last(self) -> float:
        """Wait in a thread beside the rank for the last of them alone, with which the weights are on the host; when
        that was."""
        last = self.launched.result()[-1]
        assert isinstance(last, _OnHost)
        return last.out.result()


@dataclass(frozen=True, slots=True)
class _OnHost:
    """Gathered weights on their way to the host."""

    timing: Timing
    queued: QueuedAction
    out: "Future[float]"

    def wait(self) -> object:
        self.timing.host_came(self.queued, self.out.result())
        return None

    def is_completed(self) -> bool:
        return self.out.done()


@dataclass(frozen=True, slots=True)
class _FromHost:
    """Weights that nobody else holds, on their way from the host."""

    timing: Timing
    queued: QueuedAction
    arrival: HostArrival

    def wait(self) -> object:
        self.timing.host_came(self.queued, self.arrival.wait())
        return None

    def is_completed(self) -> bool:
        return self.arrival.is_completed()


@dataclass(frozen=True, slots=True)
class _Update:
    """The update of the device, as far as it was issued: what waits for it in a stream, and when it is over."""

    issued: Callable[[], None]
    at_s: float


def _now() -> float:
    return 0.0
