"""Changes of one replica: everything that a plan says of its stages, a little other.

A change is made only when it is called for, so that whoever picks one at random lists them for nothing. It may be
illegal, or not fit.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from hetero.plan.ir import Recompute, Replica, Stage
from hetero.plan.validate import least_in_flight, least_samples_in_flight
from hetero.planner.problem import Problem
from hetero.spec.parameters import HALF

ReplicaChange = Callable[[], Replica]
ReplicaFamily = Callable[[Replica, Problem], Iterator[ReplicaChange]]

LAYERS_MOVED = (1.0, HALF, 2.0)
DEPTHS = (1, -1, 2, -2, 4, -4)
"""By how much layers and depths change at once. Heuristics."""

PER_STAGE_BEHIND = 2
"""Microbatches in flight for each stage behind, if nothing else is said. A heuristic: with two a transfer is hidden."""

MICRO_BATCH_SIZES = (1, 2, 4)
"""That a stage with other degrees may have, beside as many samples in all as before. A heuristic."""


def layers(replica: Replica, problem: Problem) -> Iterator[ReplicaChange]:
    """Layers and halves of layers move from one stage to another."""
    for (a, giver), (b, _) in itertools.permutations(enumerate(replica.stages), 2):
        for count in LAYERS_MOVED:
            if giver.num_layers > count:
                yield partial(replica.with_layers_moved, a, b, count)


def depths(replica: Replica, problem: Problem) -> Iterator[ReplicaChange]:
    """Another depth of one stage, or so many samples more or less in flight on all stages up to one, or from one on."""
    places = range(len(replica.stages))
    runs = dict.fromkeys([*(tuple(places[: s + 1]) for s in places), *(tuple(places[s:]) for s in places)])
    sizes = [stage.samples_per_microbatch for stage in replica.stages]
    for s, more in itertools.product(places, DEPTHS):
        yield partial(_deeper, replica, (s,), more * sizes[s])
    for stages, unit, more in itertools.product(runs, dict.fromkeys((min(sizes), max(sizes))), DEPTHS):
        if len(stages) > 1:
            yield partial(_deeper, replica, stages, more * unit)


def _deeper(replica: Replica, stages: Sequence[int], samples: int) -> Replica:
    """So many samples more in flight, rounded to whole microbatches."""
    depths = [
        max(1, stage.in_flight + round(samples / stage.samples_per_microbatch * (s in stages)))
        for s, stage in enumerate(replica.stages)
    ]
    return deep_enough(replica.with_each_stage(in_flight=depths))


def deep_enough(replica: Replica) -> Replica:
    """The same with depths of no more than all microbatches, and as much as those behind it ask for."""
    if replica.is_interleaved:
        return replica
    for s in reversed(range(len(replica.stages))):
        depth = min(replica.stages[s].in_flight, max(1, replica.num_microbatches(s)))
        replica = replica.with_stage(s, in_flight=max(depth, least_in_flight(replica, s)))
    return replica


def depths_of(stages: Sequence[Stage], counts: Sequence[int], per_stage: int) -> list[int]:
    """In-flight depths by rule, ``per_stage`` microbatches for each boundary behind.

    With u_i samples in a microbatch of stage i, they are in samples on stage s

        u_s + per_stage x sum over i >= s of max(u_i, u_i+1)

    in whole microbatches. Stages that are equally fast take as long for a microbatch as the step has samples in it, and
    of two neighbours the one with smaller microbatches does several while the other one waits: so with one per stage
    all that is on the way there and back is in flight, and with more of them transfers and waits are hidden.
    """
    sizes = [stage.samples_per_microbatch for stage in stages]
    return [
        min(count, 1 + -(-per_stage * sum(map(max, sizes[s:], sizes[s + 1 :])) // size))
        for s, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]


def evenly_deep(replica: Replica, per_stage: int) -> Replica:
    """The same with such depths."""
    if replica.is_interleaved:
        return replica
    depths = depths_of(replica.stages, replica.microbatch_counts, per_stage)
    return deep_enough(replica.with_each_stage(in_flight=depths))


class Slack(NamedTuple):
    """What a stage has in flight beyond the least, by the microbatches of the stage behind it, in microbatches.

    equal: its own, where those behind are as large.
    larger: of those behind, where they are larger.
    smaller: its own, where those behind are smaller.
    """

    equal: float
    larger: float
    smaller: float

    def samples(self, here: int, behind: int) -> float:
        """Between microbatches of so many samples."""
        if here == behind:
            return self.equal * here
        return self.larger * behind if here < behind else self.smaller * here


def barely_deep(replica: Replica, slack: Slack) -> Replica:
    """The same with little more in flight than 1F1B needs (:func:`hetero.plan.validate.least_in_flight`).

    With u samples in a microbatch and N of them in flight here, u' and N' behind,

        N u = (N' - 1) u' + max(u, u') + slack.

    More in flight is not better by itself: the first backward comes after more forwards. Where microbatches differ, so
    that a stage gets several gradients at once, a step may take two fifths longer with two samples more or less.
    """
    if replica.is_interleaved:
        return replica
    sizes = [stage.samples_per_microbatch for stage in replica.stages]
    replica = replica.with_stage(len(sizes) - 1, in_flight=1)
    for s, (here, behind) in reversed(list(enumerate(itertools.pairwise(sizes)))):
        samples = least_samples_in_flight(replica, s) + slack.samples(here, behind)
        replica = replica.with_stage(s, in_flight=min(replica.num_microbatches(s), math.ceil(samples / here)))
    return replica


def recomputation(replica: Replica, problem: Problem) -> Iterator[ReplicaChange]:
    """Another recomputation of one stage: of none, some or all of its layers."""
    for s, stage in enumerate(replica.stages):
        held = len(stage.layer_numbers)
        now = _recomputed(stage)
        counts = sorted({1, now - 1, now + 1, held // 2, held} & set(range(1, held + 1)) - {now})
        others: list[tuple[Recompute, int | None]] = [("none", None), ("selective", None)]
        others += [("full", count if count < held else None) for count in counts]
        for recompute, count in others:
            if (recompute, count) != (stage.recompute, stage.recompute_num_layers):
                yield partial(_recomputing, replica, s, recompute, count)


def _recomputed(stage: Stage) -> int:
    """Layers whose forward is computed again."""
    if stage.recompute != "full":
        return 0
    return len(stage.layer_numbers) if stage.recompute_num_layers is None else stage.recompute_num_layers


def _recomputing(replica: Replica, s: int, recompute: Recompute, count: int | None) -> Replica:
    delay = None if recompute == "full" else replica.stages[s].wgrad_delay
    return replica.with_stage(s, recompute=recompute, recompute_num_layers=count, wgrad_delay=delay)


def one_layer_more_recomputed(replica: Replica, s: int) -> Replica | None:
    """The same with one more layer of stage ``s`` recomputed; ``None`` if all are."""
    stage = replica.stages[s]
    count, held = _recomputed(stage) + 1, len(stage.layer_numbers)
    return _recomputing(replica, s, "full", count if count < held else None) if count <= held else None


def may_split(stage: Stage) -> bool:
    """Whether the stage has a backward that could be split: what is computed again in full, comes back from the host or
    adds up there has none."""
    offload = stage.offload
    return stage.recompute != "full" and offload.activations_until is None and offload.gradients_from is None


def delays(replica: Replica, problem: Problem) -> Iterator[ReplicaChange]:
    """Another delay of the weights' gradients of one stage, or all of them a little more or less."""
    if not problem.delays_weight_gradients or len(replica.stages) == 1:
        return
    splits = [s for s, stage in enumerate(replica.stages) if may_split(stage)]
    for s in splits:
        now, most = replica.stages[s].wgrad_delay, replica.num_microbatches(s) - 1
        others: list[int | None] = [None, 0, s] if now is None else [None, 0, now - 1, now + 1, now + 3, 2 * now + 1]
        others.append(most)
        for delay in dict.fromkeys(others):
            if delay != now and (delay is None or delay >= 0):
                yield partial(_delayed, replica, {s: delay})
    yield partial(_delayed, replica, dict.fromkeys(splits))
    for more in (-2, -1, 1, 2):
        every: dict[int, int | None] = {s: max(0, (replica.stages[s].wgrad_delay or 0) + more) for s in splits}
        yield partial(_delayed, replica, every)


def _delayed(replica: Replica, by_stage: dict[int, int | None]) -> Replica:
    return replica.with_each_stage(
        wgrad_delay=[by_stage.get(s, stage.wgrad_delay) for s, stage in enumerate(replica.stages)]
    )


def microbatches(replica: Replica, problem: Problem) -> Iterator[ReplicaChange]:
    """Twice or half the samples per microbatch, on one stage or all."""
    places = range(len(replica.stages))
    for factor, chosen in itertools.product((2.0, 0.5), [tuple(places), *((s,) for s in places)]):
        sizes = [stage.micro_batch_size * (factor if s in chosen else 1) for s, stage in enumerate(replica.stages)]
        if all(size == int(size) >= 1 for size in sizes):
            yield partial(_in_microbatches, replica, [int(size) for size in sizes])


def _in_microbatches(replica: Replica, sizes: Sequence[int]) -> Replica:
    return deep_enough(replica.with_each_stage(micro_batch_size=sizes))


def degrees(replica: Replica, problem: Problem) -> Iterator[ReplicaChange]:
    """Other tp and dp on the devices of a stage."""
    if replica.is_interleaved:
        return
    for s, stage in enumerate(replica.stages):
        for on in _on_devices(stage, stage.ranks, problem):
            if (on.tp, on.micro_batch_size) != (stage.tp, stage.micro_batch_size):
                yield partial(_rebuilt, replica, s, 1, [on])


def fused(replica: Replica, problem: Problem) -> Iterator[ReplicaChange]:
    """Two neighbours on equal devices of one node become one stage, and one on several devices becomes two."""
    if replica.is_interleaved:
        return
    for s, (a, b) in enumerate(itertools.pairwise(replica.stages)):
        ranks = tuple(sorted((*a.ranks, *b.ranks)))
        if a.device == b.device and len({problem.topology.node(rank) for rank in ranks}) == 1:
            for on in _on_devices(a.with_layers(a.start, b.end), ranks, problem):
                yield partial(_rebuilt, replica, s, 2, [on])
    for s, stage in enumerate(replica.stages):
        held = len(stage.ranks)
        for size in sorted({1, held // 2, held - 1} & set(range(1, held))):
            share = max(1, round(stage.num_layers * size / held))
            if share < stage.num_layers:
                yield from _cut(replica, s, size, share, problem)


def _cut(replica: Replica, s: int, size: int, share: int, problem: Problem) -> Iterator[ReplicaChange]:
    """The first ``size`` devices of a stage have ``share`` of its layers, the others the rest, in the same
    microbatches."""
    stage = replica.stages[s]
    halves = (
        (stage.with_layers(stage.start, stage.start + share), tuple(sorted(stage.ranks[:size]))),
        (stage.with_layers(stage.start + share, stage.end), tuple(sorted(stage.ranks[size:]))),
    )
    alike = (
        [
            on
            for on in _on_devices(part, ranks, problem, ())
            if on.samples_per_microbatch == stage.samples_per_microbatch
        ]
        for part, ranks in halves
    )
    for both in itertools.product(*alike):
        yield partial(_rebuilt, replica, s, 1, both)


def order(replica: Replica, problem: Problem) -> Iterator[ReplicaChange]:
    """Two stages change places with their devices, or one leaves its layers to a neighbour and idles."""
    if replica.is_interleaved:
        return
    for a, b in itertools.combinations(range(len(replica.stages)), 2):
        if replica.stages[a].device != replica.stages[b].device or b - a == 1:
            swapped = list(replica.stages)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield partial(laid_out, replica, swapped)
    for s, heir in itertools.product(range(len(replica.stages)), (-1, 1)):
        if 0 <= s + heir < len(replica.stages):
            kept = list(replica.stages)
            kept[s + heir] = kept[s + heir].with_layers(0, kept[s + heir].num_layers + kept[s].num_layers)
            del kept[s]
            yield partial(laid_out, replica, kept)


def _on_devices(
    stage: Stage, ranks: tuple[int, ...], problem: Problem, others: Sequence[int] = MICRO_BATCH_SIZES
) -> Iterator[Stage]:
    """The same layers on these ranks, with any tp, and about as many samples per microbatch or ``others`` on a rank."""
    for tp in range(1, len(ranks) + 1):
        if len(ranks) % tp or problem.model.num_query_groups % tp:
            continue
        dp = len(ranks) // tp
        sizes = dict.fromkeys([max(1, stage.samples_per_microbatch // dp), *others])
        for size in sizes:
            yield dataclasses.replace(
                stage,
                ranks=ranks,
                tp=tp,
                dp=dp,
                micro_batch_size=size,
                sequence_parallel=problem.splits_sequence(tp),
                fp8=problem.computes_in_fp8(stage.device, tp=tp, micro_batch_size=size),
            )


def _rebuilt(replica: Replica, first: int, count: int, stages: Sequence[Stage]) -> Replica:
    """The same with ``stages`` in the place of so many from ``first`` on."""
    return laid_out(replica, [*replica.stages[:first], *stages, *replica.stages[first + count :]])


def laid_out(replica: Replica, stages: Sequence[Stage]) -> Replica:
    """These stages one behind the other, with as many layers as each has, and depths that hide a transfer."""
    start, laid = 0.0, []
    for stage in stages:
        laid.append(stage.with_layers(start, start + stage.num_layers))
        start += stage.num_layers
    return evenly_deep(replica.with_stages(laid), PER_STAGE_BEHIND)


REPLICA_FAMILIES: tuple[ReplicaFamily, ...] = (
    layers,
    depths,
    recomputation,
    delays,
    microbatches,
    degrees,
    fused,
    order,
)
