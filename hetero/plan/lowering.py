"""Lowers a plan to the programs of its device groups: everything that takes time in a step, in order.

Runtime, simulator, emulation, trace and ``hetero show`` read what is made here, and decide on no order themselves. The
passes are those of :mod:`hetero.schedule`: the replica's order of computes, split backwards, communication, early
receives. Collectives follow from the buckets of :mod:`.gradient_groups`: a bucket is summed as soon as the last
backwards of all stages that hold a part of it have passed its lowest layer, and gathered for the first forwards of the
next step.

Programs are made for transfers that match in order (``Transport.IN_ORDER``) and promise nothing for a first contact, in
which most would stand still: whoever executes one has connected its ranks before
(:func:`hetero.distributed.process_groups.connect`).
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, TypeVar

from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.offload import blocks_with_gradients_on_host, fetched_blocks, place_of
from hetero.schedule.actions import BACKWARD, COMPUTE, FETCHES, NO_STAGE, UPDATE, Action, ActionKind, Row, Schedule
from hetero.schedule.dry_run import check_no_deadlock
from hetero.schedule.orders import ORDERS, forward_only
from hetero.schedule.passes import add_communication, post_receives_early, split_backward
from hetero.schedule.program import NO_REPLICA, Point, Program, QueuedAction

RECEIVES_AHEAD = 2
"""By how many computes a receive is posted early. Heuristic: one hides the transfer, another the neighbour's jitter."""

MOST_REMEMBERED = 4096
"""Rows of so many microbatches at most are remembered. A heuristic: longer ones take too much memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveOptions:
    """Whether the collectives of a step overlap with its computes, as Megatron-LM's flags of these names say.

    overlap_grad_reduce: gradients are summed beside the last backward instead of after it.
    overlap_param_gather: weights are gathered beside the first forwards instead of before them.
    """

    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True


def collective_options(plan: Plan, *, overlap_grad_reduce: bool, overlap_param_gather: bool) -> CollectiveOptions:
    """What ``plan`` makes of these settings: where hosts update, forwards wait for their own weights alone.

    Otherwise the first forward would wait for all that hosts do and nothing would be beside it, as a plan may ask for.
    """
    on_hosts = [stage for _, _, stage in plan.stages() if stage.offload.updates]
    return CollectiveOptions(
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=all(stage.offload.overlap for stage in on_hosts) if on_hosts else overlap_param_gather,
    )


BucketT = TypeVar("BucketT")


class LoweredBucket(Protocol):
    """What lowering needs to know of a bucket of several ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The gradient group."""
        ...

    @property
    def position(self) -> float:
        """The lowest position of its segments."""
        ...

    @property
    def on_host(self) -> frozenset[int]:
        """Those of the ranks whose hosts update their shards."""
        ...

    @property
    def gradients_on_host(self) -> frozenset[int]:
        """Those of the ranks whose hosts add up their gradients."""
        ...

    @property
    def weights_on_host(self) -> frozenset[int]:
        """Those of the ranks whose hosts have their weights."""
        ...


def lower(plan: Plan, buckets: Sequence[LoweredBucket], *, options: CollectiveOptions | None = None) -> list[Program]:
    """The program of every device group of ``plan``, replica after replica.

    Args:
        buckets: in the order of their numbers (:func:`~hetero.plan.gradient_groups.by_number`). Of one rank alone,
            those that its host updates have to be there.

    Raises:
        ScheduleError: the depths deadlock.
    """
    options = options or CollectiveOptions()
    numbers_of: dict[int, list[int]] = {}
    for number, bucket in enumerate(buckets):
        for rank in bucket.ranks:
            numbers_of.setdefault(rank, []).append(number)
    programs = []
    for r, replica in enumerate(plan.replicas):
        for stages, row in zip(replica.device_groups, _checked_rows(replica), strict=True):
            ranks = replica.stages[stages[0]].ranks
            held = sorted({number for rank in ranks for number in numbers_of.get(rank, ())})
            programs.append(_program(plan, r, stages, row, {n: buckets[n] for n in held}, options))
    return programs


def lower_rank(
    plan: Plan, rank: int, buckets: Mapping[int, LoweredBucket], *, options: CollectiveOptions | None = None
) -> Program:
    """The program of one rank: that of its device group, with the collectives of its own buckets only.

    An idle rank has nothing but the update, as all ranks decide together whether to skip it.

    Args:
        buckets: those of :func:`lower` that ``rank`` holds.

    Raises:
        ScheduleError: the depths deadlock.
    """
    place = plan.placement(rank)
    if place is None:
        return Program(replica=NO_REPLICA, stages=(), queues={"compute": (QueuedAction(UPDATE),)})
    replica = plan.replicas[place.replica]
    stages, row = _group_and_row(replica, place.stage, _checked_rows(replica))
    return _program(plan, place.replica, stages, row, buckets, options or CollectiveOptions())


def evaluation_program(plan: Plan, rank: int) -> Program:
    """The program of ``rank`` for an evaluation: forwards with their communication, no backward and no update."""
    place = plan.placement(rank)
    if place is None:
        return Program(replica=NO_REPLICA, stages=(), queues={"compute": ()})
    replica = plan.replicas[place.replica]
    stages, row = _group_and_row(replica, place.stage, evaluation_rows(replica))
    return Program.of_row(
        row,
        replica=place.replica,
        stages=stages,
        num_microbatches=replica.microbatch_counts,
        beside=_weight_copies(plan, replica, row),
        updates=False,
    )


def _group_and_row(replica: Replica, stage: int, rows: Schedule) -> tuple[tuple[int, ...], Row]:
    """The device group of ``stage`` and its row."""
    return next(pair for pair in zip(replica.device_groups, rows, strict=True) if stage in pair[0])


def launch_order(plan: Plan, shared: Sequence[BucketT]) -> tuple[Sequence[BucketT], Sequence[BucketT]]:
    """The buckets to sum and the buckets to gather, each in the order of launch.

    A backward finishes the head first, a forward needs the embedding first. Without a distributed optimizer every rank
    updates all weights that it holds, and nothing is gathered.

    Args:
        shared: the buckets that more than one rank holds, in the global order.
    """
    return shared, tuple(reversed(shared)) if plan.distributed_optimizer else ()


def _program(
    plan: Plan,
    r: int,
    stages: tuple[int, ...],
    row: Row,
    buckets: Mapping[int, LoweredBucket],
    options: CollectiveOptions,
) -> Program:
    replica = plan.replicas[r]
    points = CollectivePoints(replica, stages, row, options)
    summed, gathered = launch_order(plan, [(n, bucket) for n, bucket in buckets.items() if len(bucket.ranks) > 1])
    host = _HostActions([replica.stages[s] for s in stages], buckets, points)
    reduces = tuple(QueuedAction(_of(ActionKind.REDUCE, n), (host.whole(n, b),)) for n, b in summed)
    gathers = tuple(
        QueuedAction(_of(ActionKind.GATHER, n), (Point(UPDATE), *host.brings(n)), host.needed_behind_gather(n, b))
        for n, b in gathered
    )
    return Program.of_row(
        row,
        replica=r,
        stages=stages,
        num_microbatches=replica.microbatch_counts,
        beside={
            **_weight_copies(plan, replica, row),
            **_activation_copies(replica, row),
            **_gradient_copies(plan, replica, row),
            "reduce": reduces,
            **host.queues(),
            "gather": gathers,
            **host.around_gathers([n for n, _ in gathered]),
        },
    )


def _of(kind: ActionKind, bucket: int) -> Action:
    return Action(NO_STAGE, kind, bucket)


def _weight_copies(plan: Plan, replica: Replica, row: Row) -> dict[str, tuple[QueuedAction, ...]]:
    """Copies of weights that live on the host, in the order of the computes that need them, each block by block in
    front of its compute: upwards for a forward, downwards for a backward.

    How far they may be ahead, whoever executes them decides (:mod:`hetero.runtime.host_weights`).
    """
    coming = []
    for action in row:
        stage = replica.stages[action.stage]
        blocks = fetched_blocks(stage, action.kind, num_layers=plan.model.num_layers)
        if blocks:
            comes = Action(action.stage, FETCHES[action.kind], action.number)
            coming.append(QueuedAction(comes, (), (Point(action, blocks[0]),)))
    return {"weights_in": tuple(coming)}


def _activation_copies(replica: Replica, row: Row) -> dict[str, tuple[QueuedAction, ...]]:
    """Copies of activations to the host, in the order of the forwards that save them, and back, in that of backwards.

    Each passes its blocks one by one: out upwards, behind the forward; in downwards, in front of the backward. How far
    copies may be ahead or behind, whoever executes them decides (:mod:`hetero.runtime.host_activations`).
    """
    again = {(a.stage, a.number) for a in row if a.kind == ActionKind.R}
    out, back = [], []
    for action in row:
        s, kind, m = action
        stage = replica.stages[s]
        until = stage.offload.activations_until
        if until is None:
            continue
        leaves, comes = Action(s, ActionKind.OUT_A, m), Action(s, ActionKind.IN_A, m)
        if kind == ActionKind.R or (kind == ActionKind.F and (s, m) not in again):
            out.append(QueuedAction(leaves, (Point(action, stage.start if stage.start > 0 else -1.0),)))
        elif kind in BACKWARD:
            back.append(QueuedAction(comes, (Point(leaves),), (Point(action, until),)))
    return {"activations_out": tuple(out), "activations_in": tuple(back)}


def _gradient_copies(plan: Plan, replica: Replica, row: Row) -> dict[str, tuple[QueuedAction, ...]]:
    """Copies of gradients to where they add up, in the order of the backwards: behind each, block by block."""
    leaving = []
    for action in row:
        stage = replica.stages[action.stage]
        blocks = blocks_with_gradients_on_host(stage, num_layers=plan.model.num_layers)
        if blocks and action.kind in BACKWARD:
            leaves = Action(action.stage, ActionKind.ADD_G, action.number)
            leaving.append(QueuedAction(leaves, (Point(action, blocks[-1]),)))
    return {"gradients_out": tuple(leaving)}


class _HostActions:
    """What a device group leaves to its hosts: copies out, updates, copies in.

    Gradients come from the head down, and go to the host as soon as they are summed. Updates are in the order in which
    the next forward needs their weights, from the embedding up. Where they are tried before the world has agreed on the
    norm, they are in the order of the gradients; the program shows those that turn out right.

    Weights that live on the host do not come back behind their update, but for each compute. What others hold of them
    as well goes through the device while it is gathered.
    """

    def __init__(
        self, stages: Sequence[Stage], buckets: Mapping[int, LoweredBucket], points: "CollectivePoints"
    ) -> None:
        ranks = stages[0].ranks
        ours = [(n, bucket) for n, bucket in buckets.items() if not bucket.on_host.isdisjoint(ranks)]
        self._downwards = sorted(ours, key=lambda each: (-each[1].position, each[0]))
        self._speculates = any(stage.offload.speculate for stage in stages)
        self._points = points
        self._adding = {n for n, bucket in buckets.items() if not bucket.gradients_on_host.isdisjoint(ranks)}
        self._keeping = {n: b for n, b in buckets.items() if not b.weights_on_host.isdisjoint(ranks)}
        self._kind = ActionKind.PREVIEW if self._speculates else ActionKind.HOST_UPDATE

    def brings(self, bucket: int) -> tuple[Point, ...]:
        """Where the weights of a bucket are back, if they are to come from the host."""
        kind = ActionKind.GATHER_IN if bucket in self._keeping else ActionKind.IN_P
        return tuple(Point(_of(kind, n)) for n, _ in self._downwards if n == bucket)

    def needed_behind_gather(self, number: int, bucket: LoweredBucket) -> tuple[Point, ...]:
        """What waits for the gather of a bucket of several ranks on the devices."""
        return () if number in self._keeping else (self._points.weights_needed(bucket.position),)

    def around_gathers(self, gathered: Sequence[int]) -> dict[str, tuple[QueuedAction, ...]]:
        """What brings the weights of these buckets to the device and to the host again, where they live there."""
        kept = [n for n in gathered if n in self._keeping]
        inwards = [QueuedAction(_of(ActionKind.GATHER_IN, n), (Point(_of(self._kind, n)), Point(UPDATE))) for n in kept]
        outwards = [
            QueuedAction(
                _of(ActionKind.GATHER_OUT, n),
                (Point(_of(ActionKind.GATHER, n)),),
                (self._points.weights_fetched(self._keeping[n].position),),
            )
            for n in kept
        ]
        return {"gather_in": tuple(inwards), "gather_out": tuple(outwards)}

    def whole(self, number: int, bucket: LoweredBucket) -> Point:
        """Where the group has its own gradients of a bucket of several ranks on its devices."""
        if number in self._adding:
            return Point(_of(ActionKind.IN_G, number))
        return self._points.gradients_ready(bucket.position)

    def queues(self) -> dict[str, tuple[QueuedAction, ...]]:
        """All of them, empty where nothing is left to hosts."""
        added = [
            QueuedAction(_of(ActionKind.IN_G, n), (self._points.gradients_added(b.position),))
            for n, b in self._downwards
            if n in self._adding and len(b.ranks) > 1
        ]
        out = [
            QueuedAction(_of(ActionKind.OUT_G, n), (self._summed(n, b),))
            for n, b in self._downwards
            if not self._is_there(n, b)
        ]
        order = self._downwards if self._speculates else self._downwards[::-1]
        kind = self._kind
        agreed = () if self._speculates else (Point(UPDATE),)
        host = [
            QueuedAction(_of(kind, n), (self._there(n, b), *agreed), self._needed_without_copy(n, b)) for n, b in order
        ]
        back = [
            QueuedAction(_of(ActionKind.IN_P, n), (Point(_of(kind, n)),), self._needed_without_gather(b))
            for n, b in order
            if n not in self._keeping
        ]
        return {
            "gradients_in": tuple(added),
            "copy_out": tuple(out),
            "host": tuple(host),
            "copy_in": tuple(back),
        }

    def _is_there(self, number: int, bucket: LoweredBucket) -> bool:
        """Its gradients have added up on the host, and nobody else has a part of the sum."""
        return number in self._adding and len(bucket.ranks) == 1

    def _there(self, number: int, bucket: LoweredBucket) -> Point:
        """Where the sums of a bucket are on the host."""
        if self._is_there(number, bucket):
            return self._points.gradients_added(bucket.position)
        return Point(_of(ActionKind.OUT_G, number))

    def _summed(self, number: int, bucket: LoweredBucket) -> Point:
        if len(bucket.ranks) > 1:
            return Point(_of(ActionKind.REDUCE, number))
        return self._points.gradients_ready(bucket.position)

    def _needed_without_copy(self, number: int, bucket: LoweredBucket) -> tuple[Point, ...]:
        alone = number in self._keeping and len(bucket.ranks) == 1
        return (self._points.weights_fetched(bucket.position),) if alone else ()

    def _needed_without_gather(self, bucket: LoweredBucket) -> tuple[Point, ...]:
        return (self._points.weights_needed(bucket.position),) if len(bucket.ranks) == 1 else ()


def step_rows(replica: Replica, *, receives_ahead: int = RECEIVES_AHEAD) -> Schedule:
    """The computes and transfers of a step: one row per device group of ``replica``, in the order of issue.

    Raises:
        ScheduleError: a count or a delay makes no schedule. Whether depths deadlock is not checked here.
    """
    counts = replica.microbatch_counts
    if not replica.is_interleaved:
        row_of = _row_of_stage if max(counts) <= MOST_REMEMBERED else _row_of_stage.__wrapped__
        return [
            row_of(replica.schedule, _as_seen_from(s, counts), s, stage.in_flight, stage.wgrad_delay, receives_ahead)
            for s, stage in enumerate(replica.stages)
        ]
    rows = ORDERS[replica.schedule](
        num_microbatches=counts,
        in_flight=[stage.in_flight for stage in replica.stages],
        groups=replica.device_groups,
    )
    return _issued(rows, counts, [stage.wgrad_delay for stage in replica.stages], receives_ahead)


def _as_seen_from(s: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The counts of a pipeline for which stage ``s`` does the same, whatever lies beyond its neighbours."""
    return counts[s - 1 : s] * s + counts[s : s + 2]


@lru_cache(maxsize=512)
def _row_of_stage(
    schedule: str, counts: tuple[int, ...], s: int, in_flight: int, wgrad_delay: int | None, receives_ahead: int
) -> Row:
    """The row of a stage that has its ranks to itself, which its own depth, delay and count and its neighbours' counts
    decide.

    Remembered, as a planner that changes one stage asks for the rows of all; nobody changes a row.
    """
    depths = [in_flight] * len(counts)
    rows = ORDERS[schedule](num_microbatches=counts, in_flight=depths, groups=((s,),))
    (row,) = _issued(rows, counts, [wgrad_delay] * (s + 1), receives_ahead)
    return row


def _issued(rows: Schedule, counts: Sequence[int], wgrad_delay: Sequence[int | None], receives_ahead: int) -> Schedule:
    rows = split_backward(rows, wgrad_delay=wgrad_delay)
    return post_receives_early(add_communication(rows, num_microbatches=counts), computes_ahead=receives_ahead)


def _checked_rows(replica: Replica) -> Schedule:
    rows = step_rows(replica)
    check_no_deadlock(rows, num_microbatches=replica.microbatch_counts)
    return rows


def evaluation_rows(replica: Replica) -> Schedule:
    """The rows of an evaluation: forwards alone, with their communication, per device group of ``replica``."""
    counts = replica.microbatch_counts
    rows = forward_only(num_microbatches=counts, groups=replica.device_groups)
    return post_receives_early(add_communication(rows, num_microbatches=counts), computes_ahead=RECEIVES_AHEAD)


def _first_of_each(stages: Iterable[int], kinds: Set[ActionKind], row: Iterable[Action]) -> dict[int, Action]:
    """The first action of these kinds of each stage; ``row`` is not looked at any further."""
    missing, found = set(stages), {}
    for action in row if missing else ():
        if action.kind in kinds and action.stage in missing:
            found[action.stage] = action
            missing.remove(action.stage)
            if not missing:
                break
    return found


class CollectivePoints:
    """Finds the points of a device group's row from which a bucket can be summed and by which it must be gathered.

    A backward finishes gradients from the head down, a forward needs weights from the embedding up; a group goes
    through its stages in those orders as well. So of a bucket, the lowest layer is the last to have its gradient and
    the first whose weights are needed.
    """

    def __init__(self, replica: Replica, stages: Sequence[int], row: Row, options: CollectiveOptions) -> None:
        self._stages = [(s, replica.stages[s]) for s in stages]
        self._options = options
        self._first_compute = next(action for action in row if action.kind in COMPUTE)
        splitting = [s for s, stage in self._stages if stage.wgrad_delay is not None]
        self._first_forward = _first_of_each(stages, {ActionKind.F}, row)
        self._last_backward = _first_of_each(stages, BACKWARD, reversed(row))
        self._last_weights = _first_of_each(splitting, {ActionKind.W}, reversed(row))
        self._row = row

    @cached_property
    def _place(self) -> dict[Action, int]:
        return {action: i for i, action in enumerate(self._row)}

    def gradients_ready(self, position: float) -> Point:
        """The point at which the group has all gradients from ``position`` on, of the layers that it holds."""
        if not self._options.overlap_grad_reduce:
            last = [*self._last_backward.values(), *self._last_weights.values()]
            return Point(max(last, key=self._place.__getitem__))
        held_by, position = self._holder(position)
        points = [
            self._ready_on(s, stage, position if s == held_by else None) for s, stage in self._stages if s >= held_by
        ]
        return points[0] if len(points) == 1 else max(points, key=lambda point: self._place[point.action])

    def gradients_added(self, position: float) -> Point:
        """As :meth:`gradients_ready`, of gradients that add up on the host."""
        point = self.gradients_ready(position)
        s, kind, number = point.action
        has_left = kind in BACKWARD and dict(self._stages)[s].offload.gradients_from is not None
        return Point(Action(s, ActionKind.ADD_G, number), point.position) if has_left else point

    def weights_needed(self, position: float) -> Point:
        """The point before which the group needs the weights from ``position`` on, of the layers that it holds."""
        if not self._options.overlap_param_gather:
            return Point(self._first_compute)
        held_by, position = self._holder(position)
        return Point(self._first_forward[held_by], position)

    def weights_fetched(self, position: float) -> Point:
        """As :meth:`weights_needed`, of weights on the host: the point before which they have to be whole there."""
        if not self._options.overlap_param_gather:
            return Point(self._first_compute)
        held_by, position = self._holder(position)
        return Point(Action(held_by, ActionKind.IN_W_F, self._first_forward[held_by].number), position)

    def _holder(self, position: float) -> tuple[int, float]:
        """The stage of the group that holds ``position``, and where in it."""
        index, here = place_of(position, [stage for _, stage in self._stages])
        return self._stages[index][0], here

    def _ready_on(self, s: int, stage: Stage, position: float | None) -> Point:
        last = self._last_backward[s]
        if position is None or position < stage.end:
            # Where a stage has W, its blocks have their gradients from there, in the order of the backward.
            last = self._last_weights.get(s, last)
        return Point(last, position)
