"""Changes of what replicas are made of: stages and devices that go to another replica, replicas that become one or two.

None of them is any good as long as layers and samples stay divided as before, so each comes with the replicas that it
changes divided anew (:mod:`.division`).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.improve.division import Divider
from hetero.planner.improve.plan_changes import (
    PlanChange,
    PlanFamily,
    exchanges,
    idle_devices,
    of_replicas,
    one_or_all,
)
from hetero.planner.improve.replica_changes import degrees, fused, microbatches, order
from hetero.planner.problem import Problem

PER_STAGE = (2, 1)
"""Microbatches more in flight than on the stage behind: those that hide a transfer, or those that take least memory."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A change, and after it the replicas that it changed divided anew, and the samples of all.

    before: what is changed.
    """

    change: PlanChange
    before: Plan
    divider: Divider
    per_stage: int = 2

    def __call__(self) -> Plan:
        changed = self.change()
        before = set(self.before.replicas)
        touched = [r for r, replica in enumerate(changed.replicas) if replica not in before]
        settled = self.divider.settled(changed, touched, per_stage=self.per_stage)
        return self.before if settled is None else settled


def structures(divider: Divider) -> tuple[PlanFamily, ...]:
    """All kinds of changes that divide anew."""
    changed: tuple[PlanFamily, ...] = (
        *(partial(of_replicas, family) for family in (order, fused, degrees, microbatches)),
        exchanges,
        idle_devices,
        moved_stages,
        moved_devices,
        joined,
        parted,
        side_by_side,
        apart,
        straightened,
    )
    return (partial(divided, divider), *(partial(_settled, divider, family) for family in changed))


def _settled(divider: Divider, family: PlanFamily, plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    for change in family(plan, problem):
        yield Settled(change, plan, divider)


def divided(divider: Divider, plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """The layers of replicas that are alike, or of all, and the samples of all replicas divided anew."""
    every = range(len(plan.replicas))
    for replicas in ((), *plan.alike(), every):
        for per_stage in PER_STAGE if replicas else PER_STAGE[:1]:
            yield partial(_divided, divider, plan, tuple(replicas), per_stage)


def _divided(divider: Divider, plan: Plan, replicas: tuple[int, ...], per_stage: int) -> Plan:
    found = divider.settled(plan, replicas, per_stage=per_stage)
    return plan if found is None else found


def _pairs(plan: Plan) -> Iterator[list[tuple[int, int]]]:
    """Pairs of replicas that change in the same manner: one of each two kinds, or all of them where there are as many,
    and of replicas that are alike one pair, or all."""
    kinds = plan.alike()
    for here, there in itertools.permutations(kinds, 2):
        yield [(here[0], there[0])]
        if len(here) == len(there) > 1:
            yield list(zip(here, there, strict=True))
    for members in kinds:
        if len(members) > 1:
            yield [(members[0], members[1])]
        if len(members) > 3 and len(members) % 2 == 0:
            yield list(zip(members[::2], members[1::2], strict=True))


PairChange = Callable[[Replica, Replica], tuple[Replica | None, Replica]]


def _with_pairs(plan: Plan, pairs: Sequence[tuple[int, int]], change: PairChange) -> Plan:
    """``plan`` with what ``change`` makes of each pair; a replica of which nothing is left goes."""
    changed: dict[int, Replica | None] = {}
    for a, b in pairs:
        changed[a], changed[b] = change(plan.replicas[a], plan.replicas[b])
    return _with_left(plan, changed)


def _with_left(plan: Plan, changed: Mapping[int, Replica | None], more: Sequence[Replica] = ()) -> Plan:
    left = (changed.get(r, replica) for r, replica in enumerate(plan.replicas))
    return dataclasses.replace(plan, replicas=(*(each for each in left if each is not None), *more))


def _all_divisible(plan: Plan, pairs: Sequence[tuple[int, int]]) -> bool:
    return not any(plan.replicas[r].is_interleaved for pair in pairs for r in pair)


def moved_stages(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """A stage goes to another replica with its devices."""
    for pairs in _pairs(plan):
        giver, taker = (plan.replicas[r] for r in pairs[0])
        if _all_divisible(plan, pairs):
            for s, place in itertools.product(range(len(giver.stages)), range(len(taker.stages) + 1)):
                yield partial(_with_pairs, plan, pairs, partial(_stage_moved, s, place))


def _stage_moved(s: int, place: int, giver: Replica, taker: Replica) -> tuple[Replica | None, Replica]:
    moved = giver.stages[s]
    left = [*giver.stages[:s], *giver.stages[s + 1 :]]
    return _left(giver, left), _with_stages(taker, [*taker.stages[:place], moved, *taker.stages[place:]])


def _left(replica: Replica, stages: Sequence[Stage]) -> Replica | None:
    return _with_stages(replica, stages) if stages else None


def _with_stages(replica: Replica, stages: Sequence[Stage], samples: int | None = None) -> Replica:
    """A replica of these stages, whose layers are still to be divided."""
    count = replica.num_samples if samples is None else samples
    coarsest = max(stage.samples_per_microbatch for stage in stages)
    return Replica(num_samples=max(coarsest, count), stages=tuple(stages), schedule=replica.schedule)


def moved_devices(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """One device of a stage, or half of them, becomes a stage elsewhere, in its own replica too."""
    own = ([(r, r) for r in some] for members in plan.alike() for some in one_or_all(members))
    for pairs in (*_pairs(plan), *own):
        giver, taker = (plan.replicas[r] for r in pairs[0])
        if not _all_divisible(plan, pairs):
            continue
        for s, stage in enumerate(giver.stages):
            for count in sorted({1, len(stage.ranks) // 2} & set(range(1, len(stage.ranks)))):
                for place in range(len(taker.stages) + 1):
                    change = partial(_devices_moved, s, count, place, problem)
                    if giver is taker:
                        yield partial(_with_own, plan, [r for r, _ in pairs], change)
                    else:
                        yield partial(_with_pairs, plan, pairs, change)


def _with_own(plan: Plan, replicas: Sequence[int], change: PairChange) -> Plan:
    return plan.with_replicas({r: change(plan.replicas[r], plan.replicas[r])[1] for r in replicas})


def _devices_moved(
    s: int, count: int, place: int, problem: Problem, giver: Replica, taker: Replica
) -> tuple[Replica | None, Replica]:
    stage = giver.stages[s]
    samples = taker.stages[min(place, len(taker.stages) - 1)].samples_per_microbatch
    moved = _on(stage, stage.ranks[-count:], samples, problem)
    rest = _on(stage, stage.ranks[:-count], stage.samples_per_microbatch, problem)
    left = [*giver.stages[:s], rest, *giver.stages[s + 1 :]]
    stages = left if giver is taker else list(taker.stages)
    stages.insert(place, moved)
    return _left(giver, left), _with_stages(taker, stages)


def _on(stage: Stage, ranks: tuple[int, ...], samples: int, problem: Problem) -> Stage:
    """A stage like this on some of its ranks, with the largest tp that both have, and so many samples per microbatch or
    the next number below that they can have."""
    tp = next(tp for tp in range(min(stage.tp, len(ranks)), 0, -1) if stage.tp % tp == 0 and len(ranks) % tp == 0)
    dp = len(ranks) // tp
    size = max(1, samples // dp)
    return dataclasses.replace(
        stage,
        ranks=tuple(sorted(ranks)),
        tp=tp,
        dp=dp,
        micro_batch_size=size,
        sequence_parallel=problem.splits_sequence(tp),
        fp8=problem.computes_in_fp8(stage.device, tp=tp, micro_batch_size=size),
    )


def joined(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Two replicas become one, with the stages of the one behind those of the other."""
    for pairs in _pairs(plan):
        if _all_divisible(plan, pairs):
            yield partial(_with_pairs, plan, pairs, _joined)


def _joined(first: Replica, second: Replica) -> tuple[Replica | None, Replica]:
    samples = first.num_samples + second.num_samples
    return None, _with_stages(first, [*first.stages, *second.stages], samples)


def straightened(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Interleaved stages become one per device group, in the order of their first ones."""
    for members in plan.alike():
        if plan.replicas[members[0]].is_interleaved:
            yield partial(_straightened, plan, members)


def _straightened(plan: Plan, members: Sequence[int]) -> Plan:
    changed = {}
    for r in members:
        replica = plan.replicas[r]
        firsts = [replica.stages[group[0]] for group in replica.device_groups]
        changed[r] = Replica(num_samples=replica.num_samples, stages=tuple(firsts))
    return plan.with_replicas(changed)


def parted(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """A replica becomes two, or all that are alike do; of the stages the first ones and the others, or every other
    one."""
    for members in plan.alike():
        replica = plan.replicas[members[0]]
        places = range(len(replica.stages))
        if replica.is_interleaved or len(places) == 1:
            continue
        for first in dict.fromkeys((*(tuple(places[:s]) for s in places[1:]), tuple(places[::2]))):
            for some in one_or_all(members):
                yield partial(_parted, plan, some, first)


def _parted(plan: Plan, members: Sequence[int], first: Sequence[int]) -> Plan:
    changed: dict[int, Replica | None] = {}
    more = []
    for r in members:
        replica = plan.replicas[r]
        stages = list(enumerate(replica.stages))
        here, there = ([stage for s, stage in stages if (s in first) == inside] for inside in (True, False))
        changed[r] = _with_stages(replica, here, replica.num_samples // 2)
        more.append(_with_stages(replica, there, replica.num_samples - replica.num_samples // 2))
    return _with_left(plan, changed, more)


def side_by_side(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Replicas that are alike become one whose stages have the data-parallel ranks of all: two of them, two and two, or
    all."""
    for members in plan.alike():
        if len(members) == 1 or plan.replicas[members[0]].is_interleaved:
            continue
        pairs = [members[i : i + 2] for i in range(0, len(members) - 1, 2)]
        ways = ([members[:2]], pairs, [members])
        for sets in dict.fromkeys(tuple(tuple(each) for each in way) for way in ways):
            yield partial(_side_by_side, plan, sets)


def _side_by_side(plan: Plan, sets: Sequence[Sequence[int]]) -> Plan:
    changed: dict[int, Replica | None] = {}
    for members in sets:
        replicas = [plan.replicas[r] for r in members]
        stages = [
            dataclasses.replace(
                alike[0],
                ranks=tuple(itertools.chain.from_iterable(sorted(stage.ranks for stage in alike))),
                dp=sum(stage.dp for stage in alike),
            )
            for alike in zip(*(replica.stages for replica in replicas), strict=True)
        ]
        samples = sum(replica.num_samples for replica in replicas)
        changed |= dict.fromkeys(members[1:])
        changed[members[0]] = _with_stages(replicas[0], stages, samples)
    return _with_left(plan, changed)


def apart(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """The data-parallel ranks of a replica's stages become those of two replicas, or of as many as all stages have
    parts."""
    for members in plan.alike():
        replica = plan.replicas[members[0]]
        most = math.gcd(*(stage.dp for stage in replica.stages))
        if replica.is_interleaved or most == 1:
            continue
        for parts in {most} | ({2} if most % 2 == 0 else set()):
            for some in one_or_all(members):
                yield partial(_apart, plan, some, parts)


def _apart(plan: Plan, members: Sequence[int], parts: int) -> Plan:
    changed: dict[int, Replica | None] = {}
    more = []
    for r in members:
        replica = plan.replicas[r]
        share = replica.num_samples // parts
        pieces = [
            _with_stages(replica, [_part(stage, i, parts) for stage in replica.stages], share) for i in range(parts)
        ]
        changed[r], *others = pieces
        more += others
    return _with_left(plan, changed, more)


def _part(stage: Stage, i: int, parts: int) -> Stage:
    size = len(stage.ranks) // parts
    return dataclasses.replace(stage, ranks=stage.ranks[i * size : (i + 1) * size], dp=stage.dp // parts)
