"""Random changes of whole plans: of layers, depths, recomputation, microbatches, samples, degrees, devices.

They know nothing of what the planner changes, nor of what pays: whoever looks for a better plan with them looks
independently of it. A change may be illegal or not fit; whoever scores it finds out.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.problem import Problem

Move = Callable[[Plan, Problem, random.Random], Plan | None]
"""Another plan; ``None`` if the move finds nothing to change where it looks."""


def random_neighbour(plan: Plan, problem: Problem, dice: random.Random) -> Plan | None:
    """One to three random moves, one after the other; ``None`` if nothing comes of them."""
    changed: Plan | None = plan
    for _ in range(dice.choice((1, 1, 1, 2, 2, 3))):
        try:
            changed = dice.choice(MOVES)(changed, problem, dice) if changed is not None else None
        except (ValueError, ZeroDivisionError, IndexError):
            return None  # Nothing to choose from.
    return changed


def _in_some_replicas(change: Callable[[Replica, Problem, random.Random], Replica | None]) -> Move:
    """The move that changes one replica, or all that are like it."""

    def move(plan: Plan, problem: Problem, dice: random.Random) -> Plan | None:
        members = dice.choice(plan.alike())
        if dice.random() < 0.5:
            members = [dice.choice(members)]
        changed = change(plan.replicas[members[0]], problem, dice)
        if changed is None:
            return None
        if len(members) > 1:
            same_sizes = [s.ranks for s in changed.stages] == [s.ranks for s in plan.replicas[members[0]].stages]
            members = members if same_sizes else members[:1]
        return _with_idle(
            plan.with_alike(members, changed) if len(members) > 1 else plan.with_replica(members[0], changed), plan
        )

    return move


def _with_idle(plan: Plan, before: Plan) -> Plan:
    """The same, with those ranks idle that no stage has, of those that there were ``before``."""
    working = {rank for _, _, stage in plan.stages() for rank in stage.ranks}
    return dataclasses.replace(plan, idle_ranks=tuple(sorted(set(before.ranks()) - working)))


def _layers(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    a, b = dice.sample(range(len(replica.stages)), 2)
    count = dice.choice((0.5, 1.0, 1.0, 2.0))
    return replica.with_layers_moved(a, b, count) if replica.stages[a].num_layers > count else None


def _depths(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    first, last = sorted(dice.choices(range(len(replica.stages)), k=2))
    if dice.random() < 0.5:
        last = first
    more = dice.choice((-4, -3, -2, -1, 1, 2, 3, 4))
    return replica.with_each_stage(
        in_flight=[max(1, s.in_flight + more * (first <= i <= last)) for i, s in enumerate(replica.stages)]
    )


def _recompute(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    s = dice.randrange(len(replica.stages))
    stage = replica.stages[s]
    how = dice.choice(("none", "selective", "full", "some"))
    count = dice.randint(1, len(stage.layer_numbers)) if how == "some" else None
    recompute = "full" if how == "some" else how
    delay = None if recompute == "full" else stage.wgrad_delay
    return replica.with_stage(s, recompute=recompute, recompute_num_layers=count, wgrad_delay=delay)


def _delays(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    if not problem.splits_backward:
        return None
    delay = dice.choice((None, 0, 1, 2, 3, 5, 8, 13))
    chosen = dice.choice(([dice.randrange(len(replica.stages))], range(len(replica.stages))))
    return replica.with_each_stage(
        wgrad_delay=[
            stage.wgrad_delay if s not in chosen or stage.recompute == "full" else delay
            for s, stage in enumerate(replica.stages)
        ]
    )


def _microbatches(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    chosen = dice.choice(([dice.randrange(len(replica.stages))], range(len(replica.stages))))
    factor = dice.choice((0.5, 2.0))
    sizes = [s.micro_batch_size * (factor if i in chosen else 1) for i, s in enumerate(replica.stages)]
    if any(size < 1 for size in sizes):
        return None
    return replica.with_each_stage(micro_batch_size=[int(size) for size in sizes])


def _samples(plan: Plan, problem: Problem, dice: random.Random) -> Plan | None:
    a, b = dice.sample(range(len(plan.replicas)), 2)
    giver, taker = plan.replicas[a], plan.replicas[b]
    count = dice.choice((1, 2, 3, 4)) * max(s.samples_per_microbatch for s in (*giver.stages, *taker.stages))
    if giver.num_samples <= count:
        return None
    return plan.with_replicas(
        {
            a: dataclasses.replace(giver, num_samples=giver.num_samples - count),
            b: dataclasses.replace(taker, num_samples=taker.num_samples + count),
        }
    )


def _degrees(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    s = dice.randrange(len(replica.stages))
    stage = replica.stages[s]
    sizes = [tp for tp in range(1, len(stage.ranks) + 1) if len(stage.ranks) % tp == 0 and tp != stage.tp]
    return _with_stages(replica, s, 1, [_on(stage, stage.ranks, dice.choice(sizes), problem, dice)])


def _fuse(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    """Two neighbours become one stage on the devices of both."""
    s = dice.randrange(len(replica.stages) - 1)
    a, b = replica.stages[s : s + 2]
    ranks = tuple(sorted(a.ranks + b.ranks))
    if a.device != b.device or len({problem.topology.node(rank) for rank in ranks}) > 1 or a.ranks == b.ranks:
        return None
    tp = dice.choice([tp for tp in range(1, len(ranks) + 1) if len(ranks) % tp == 0])
    return _with_stages(replica, s, 2, [_on(a.with_layers(a.start, b.end), ranks, tp, problem, dice)])


def _cut(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    """A stage becomes two, each on a part of its devices."""
    s = dice.randrange(len(replica.stages))
    stage = replica.stages[s]
    size = dice.randrange(1, len(stage.ranks))
    parts = sorted(stage.ranks[:size]), sorted(stage.ranks[size:])
    half = stage.start + max(0.5, round(stage.num_layers * size / len(stage.ranks)))
    if half >= stage.end:
        return None
    edges = ((stage.start, half), (half, stage.end))
    stages = []
    for ranks, edge in zip(parts, edges, strict=True):
        tp = dice.choice([tp for tp in range(1, len(ranks) + 1) if len(ranks) % tp == 0])
        stages.append(_on(stage.with_layers(*edge), tuple(ranks), tp, problem, dice))
    return _with_stages(replica, s, 1, stages)


def _swap(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    """Two stages swap places with their devices and their numbers of layers."""
    a, b = sorted(dice.sample(range(len(replica.stages)), 2))
    order = list(range(len(replica.stages)))
    order[a], order[b] = order[b], order[a]
    return _laid_out(replica, [replica.stages[i] for i in order])


def _drop(replica: Replica, problem: Problem, dice: random.Random) -> Replica | None:
    """The devices of a stage idle, and a neighbour has its layers."""
    s = dice.randrange(len(replica.stages))
    neighbour = dice.choice([t for t in (s - 1, s + 1) if 0 <= t < len(replica.stages)])
    kept = list(replica.stages)
    kept[neighbour] = kept[neighbour].with_layers(0, kept[neighbour].num_layers + kept[s].num_layers)
    del kept[s]
    return _laid_out(replica, kept)


def _add(plan: Plan, problem: Problem, dice: random.Random) -> Plan | None:
    """Idle devices of a node become a stage of a replica."""
    rank = dice.choice(plan.idle_ranks)
    ranks = [each for each in plan.idle_ranks if problem.topology.node(each) == problem.topology.node(rank)]
    ranks = ranks[: dice.randint(1, len(ranks))]
    r = dice.randrange(len(plan.replicas))
    replica = plan.replicas[r]
    giver = max(range(len(replica.stages)), key=lambda s: replica.stages[s].num_layers)
    stages = list(replica.stages)
    stages[giver] = stages[giver].with_layers(0, stages[giver].num_layers - 1)
    tp = dice.choice([tp for tp in range(1, len(ranks) + 1) if len(ranks) % tp == 0])
    device = problem.cluster.device_of_rank(rank).name
    new = dataclasses.replace(stages[giver].with_layers(0, 1), device=device)
    stages.insert(dice.randint(0, len(stages)), _on(new, tuple(ranks), tp, problem, dice))
    changed = _laid_out(replica, stages)
    return _with_idle(plan.with_replica(r, changed), plan) if changed is not None else None


def _buckets(plan: Plan, problem: Problem, dice: random.Random) -> Plan | None:
    numel = dice.choice((None, 2_000_000, 10_000_000, 20_000_000, 80_000_000, 320_000_000))
    return dataclasses.replace(plan, gradient_sync=dataclasses.replace(plan.gradient_sync, bucket_numel=numel))


def _on(stage: Stage, ranks: tuple[int, ...], tp: int, problem: Problem, dice: random.Random) -> Stage:
    """The same layers on these ranks, with some or as many samples per microbatch."""
    dp = len(ranks) // tp
    samples = stage.samples_per_microbatch
    size = samples // dp if samples % dp == 0 and dice.random() < 0.5 else dice.choice((1, 1, 2, 4))
    return dataclasses.replace(
        stage, ranks=ranks, tp=tp, dp=dp, micro_batch_size=max(1, size), sequence_parallel=problem.splits_sequence(tp)
    )


def _with_stages(replica: Replica, first: int, count: int, stages: Sequence[Stage]) -> Replica | None:
    return _laid_out(replica, [*replica.stages[:first], *stages, *replica.stages[first + count :]])


def _laid_out(replica: Replica, stages: Sequence[Stage]) -> Replica | None:
    """These stages one behind the other, with the layers that each has, and depths of 1F1B in equal microbatches."""
    start, laid = 0.0, []
    coarsest = max(stage.samples_per_microbatch for stage in stages)
    for s, stage in enumerate(stages):
        end = start + stage.num_layers
        if stage.num_layers <= 0:
            return None
        depth = -(-2 * coarsest * (len(stages) - s) // stage.samples_per_microbatch) - 1
        most = max(1, replica.num_samples // stage.samples_per_microbatch)
        laid.append(dataclasses.replace(stage.with_layers(start, end), in_flight=min(depth, most)))
        start = end
    return replica.with_stages(laid)


MOVES: tuple[Move, ...] = (
    *map(_in_some_replicas, (_layers, _layers, _layers, _depths, _depths, _recompute, _delays, _microbatches)),
    *map(_in_some_replicas, (_degrees, _fuse, _cut, _swap, _drop)),
    _samples,
    _add,
    _buckets,
)
"""What changes layers and depths comes more often: most of what is left to find is there. A heuristic."""
