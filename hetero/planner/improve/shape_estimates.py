"""Estimates the step of a pipeline of which nothing but its shape is known, in less than a tenth of a millisecond, so
that thousands of shapes can be looked at.

With M_s microbatches on stage s, t_s(i, k) the seconds of a forward and a backward of layers i to k there with the
recomputation that memory asks for (:mod:`.division_costs`), x_s those of both transfers to the stage behind, and T the
longest stage under the best cuts,

    T = min over cuts of  max over s of  M_s t_s

    step = max(T, samples x busiest interface) + sum_{s < last} x_s + min(fill + tail, fill / 3 + sums)

    fill = sum_{s < last} T / min(M_s, M_s+1)

as if every stage took T in all; of two neighbours the one with more microbatches has to do several before the other one
can begin, or after it has ended. Behind that come the sums of gradients: of all copies of a stage and some devices of
each other replica, of its share of the layers, and behind all the tied embedding's on both ends. Those of one node take
turns, and they begin with the last backward of its first stage:

    tail = max over nodes of  sum of its sums - 2/3 sum_{i <= its first stage} T / M_i

If backwards may be split, a third of the fill is enough, but then weights' gradients wait, and sums begin at the end:
the shorter of both counts.

A heuristic: the division that follows has the fill in what it minimises, and what else is on the interfaces is not in
it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from hetero.cost.network import all_reduce_cost
from hetero.errors import ConfigError
from hetero.plan.ir import Stage
from hetero.planner.improve.compositions import RanksOfCopies
from hetero.planner.improve.division import Divider, ReplicaSteps
from hetero.planner.improve.division_costs import Matrix, StageKind
from hetero.planner.improve.replica_changes import PER_STAGE_BEHIND
from hetero.planner.improve.replica_shapes import ReplicaShape, StageShape
from hetero.planner.problem import Problem

BACKWARD_SHARE = 2 / 3
"""Of the seconds of a microbatch, those of its backward. A heuristic."""

SPLIT_FILL = 1 / 3
"""Of the fill, what is left where backwards are split: as in ZB-H1, (p - 1)(f + b - w) instead of (p - 1)(f + b + w) of
forwards, inputs' and weights' gradients that are equally long (arXiv 2401.10241)."""

NodesOfStage = tuple[int, tuple[int, ...]]
"""Type and numbers of the nodes that a stage is on."""

Placeless = tuple[int, int, int, int]
"""A stage, wherever it is: node type, devices, tp, samples of a microbatch per rank."""


class Boundary(NamedTuple):
    """The two transfers across a boundary.

    seconds: of both, for a slice.
    there_s, back_s: for which an interface is busy with a sample.
    """

    seconds: float
    there_s: float
    back_s: float


class BetweenStages(NamedTuple):
    """What the stages of a pipeline make each other wait.

    fill_s: until the last one begins, and after it has ended, by computes alone.
    transfers_s: of both transfers across all boundaries.
    wires_s: for which the busiest interface is busy with a sample.
    """

    fill_s: float
    transfers_s: float
    wires_s: float


class Tails(NamedTuple):
    """Seconds of sums of gradients behind the last backward: where they begin with the last backward of a stage, and
    where weights' gradients wait, so that none begins before the end."""

    whole_s: float
    split_s: float


class ShapeTimes:
    """What stages and boundaries take, whatever pipeline they belong to; it is remembered."""

    def __init__(self, problem: Problem, divider: Divider) -> None:
        self.problem, self._divider = problem, divider
        self._kind = cache(self._kind_of)
        self._boundary = cache(self._boundary_of)
        self.layer_s = cache(self._seconds_of_layer)

    def table(self, stage: StageShape, size: int, *, neighbours: int, ways: int, depth: int) -> Matrix:
        """Seconds of a microbatch of so many samples per rank, by the positions where the stage begins and ends.

        ways: ranks that hold the same layers.
        """
        kind = self._kind(stage.node_type, stage.tp, size, neighbours, ways)
        return self._divider.costs.table(kind, depth).seconds

    def _kind_of(self, node_type: int, tp: int, size: int, neighbours: int, ways: int) -> StageKind:
        problem, of_type = self.problem, self.problem.node_types[node_type]
        return StageKind(
            device=of_type.device,
            tp=tp,
            samples=size,
            sequence_parallel=problem.splits_sequence(tp),
            fp8=problem.computes_in_fp8(of_type.device, tp=tp, micro_batch_size=size),
            wgrad_delay=None,
            capacity_bytes=of_type.memory_bytes,
            neighbours=neighbours,
            shares_gradients=ways > 1,
            ways=ways if problem.distributed_optimizer else 1,
        )

    def boundary(self, sender: StageShape, size: int, receiver: StageShape, receiver_size: int) -> Boundary:
        """What is between these stages. Nodes of one type are alike."""
        same_node = sender[:2] == receiver[:2]
        here, there = _placeless(sender, size), _placeless(receiver, receiver_size)
        return self._boundary(here, there, same_node)

    def _boundary_of(self, sender: Placeless, receiver: Placeless, same_node: bool) -> Boundary:
        of_type, next_type = (self.problem.node_types[each[0]] for each in (sender, receiver))
        here, behind = self._placed(sender, of_type.first_rank), 0
        if same_node:
            behind = len(here.ranks)
        elif of_type is next_type:
            behind = -(-len(here.ranks) // of_type.gpus_per_node) * of_type.gpus_per_node
        there = self._placed(receiver, next_type.first_rank + behind)
        forward, backward = self._divider.transfers.between(here, there), self._divider.transfers.between(there, here)
        samples = min(here.samples_per_microbatch, there.samples_per_microbatch)
        there_s, back_s = (max((busy for _, busy in cost.ports), default=0.0) for cost in (forward, backward))
        return Boundary(forward.seconds + backward.seconds, there_s / samples, back_s / samples)

    def stage(self, shape: StageShape, size: int, start: int) -> Stage:
        """A stage of this shape from rank ``start`` on, with so many samples of a microbatch per rank; layers and depth
        are settled later."""
        return self._placed(_placeless(shape, size), start)

    def _placed(self, stage: Placeless, start: int) -> Stage:
        node_type, devices, tp, size = stage
        problem, device = self.problem, self.problem.node_types[node_type].device
        return Stage(
            first_layer=0,
            end_layer=1,
            ranks=tuple(range(start, start + devices)),
            device=device,
            tp=tp,
            dp=devices // tp,
            sequence_parallel=problem.splits_sequence(tp),
            micro_batch_size=size,
            in_flight=1,
            fp8=problem.computes_in_fp8(device, tp=tp, micro_batch_size=size),
        )

    def _seconds_of_layer(self, node_type: int, tp: int, size: int) -> float:
        """Forward and backward of a microbatch of so many samples per rank."""
        problem, device = self.problem, self.problem.node_types[node_type].device
        cost = problem.costs.layer(
            "block",
            device=device,
            tp=tp,
            micro_batch_size=size,
            sequence_parallel=problem.splits_sequence(tp),
            fp8=problem.computes_in_fp8(device, tp=tp, micro_batch_size=size),
        )
        return cost.forward_s + cost.backward_s


class ShapeEstimates:
    """Estimates steps of the copies of one pipeline of a composition."""

    def __init__(self, times: ShapeTimes, copies: RanksOfCopies) -> None:
        self._times, self._copies = times, copies
        self._layer_sum_s = cache(self._seconds_of_layer_sum)
        self._tied_sum_s = cache(self._seconds_of_tied_sum)

    def steps(self, shape: ReplicaShape, samples: float) -> ReplicaSteps | None:
        """What so many samples take on each copy; ``None`` if nothing fits, if they cannot have as many as there are,
        or if two that talk to one another have no link, or a device no profile."""
        if not shape.divides or not self._adds_up(shape, samples):
            return None
        try:
            return self._steps(shape, samples)
        except ConfigError:
            return None

    def _steps(self, shape: ReplicaShape, samples: float) -> ReplicaSteps | None:
        stages = shape.stages
        sizes = [stage.micro_batch_size(shape.samples) for stage in stages]
        counts = [samples / (size * stage.dp) for size, stage in zip(sizes, stages, strict=True)]
        longest_s = self._longest_s(stages, sizes, counts)
        if longest_s == math.inf:
            return None
        between = self._between(stages, sizes, [longest_s / count for count in counts])
        tails = self._tails(shape, sizes, counts, longest_s)
        behind_s = between.fill_s + tails.whole_s
        if self._times.problem.delays_weight_gradients:
            behind_s = min(behind_s, SPLIT_FILL * between.fill_s + tails.split_s)
        return ReplicaSteps(1, between.transfers_s + behind_s, max(longest_s / samples, between.wires_s))

    def _adds_up(self, shape: ReplicaShape, samples: float) -> bool:
        """Whether a copy has a whole microbatch of every stage, and the batch could be so many of these, if there are
        no other pipelines."""
        unit = math.lcm(*(stage.samples(shape.samples) for stage in shape.stages))
        if unit > max(1.0, samples):
            return False
        return bool(self._copies.others) or self._times.problem.global_batch_size % unit == 0

    def _longest_s(self, stages: Sequence[StageShape], sizes: Sequence[int], counts: Sequence[float]) -> float:
        """T: what the longest stage computes in all."""
        samples = [stage.dp * size for stage, size in zip(stages, sizes, strict=True)]
        last = len(stages) - 1
        ways = self._copies.number * stages[0].dp
        reached = None
        for s, (stage, size, count) in enumerate(zip(stages, sizes, counts, strict=True)):
            behind = PER_STAGE_BEHIND * sum(map(max, samples[s:], samples[s + 1 :]))
            depth = min(max(1, int(count)), _about(1 + -(-behind // samples[s])))
            table = self._times.table(stage, size, neighbours=(s > 0) + (s < last), ways=ways, depth=depth)
            seconds = count * table
            reached = seconds[0] if reached is None else np.maximum(reached[:, None], seconds).min(axis=0)
        return math.inf if reached is None else float(reached[-1])

    def _between(
        self, stages: Sequence[StageShape], sizes: Sequence[int], microbatch_s: Sequence[float]
    ) -> BetweenStages:
        fill_s = transfers_s = 0.0
        sends: defaultdict[NodesOfStage, float] = defaultdict(float)
        receives: defaultdict[NodesOfStage, float] = defaultdict(float)
        for s, (here, there) in enumerate(itertools.pairwise(stages)):
            boundary = self._times.boundary(here, sizes[s], there, sizes[s + 1])
            fill_s += max(microbatch_s[s : s + 2])
            transfers_s += boundary.seconds
            sends[here[:2]] += boundary.there_s
            receives[there[:2]] += boundary.there_s
            sends[there[:2]] += boundary.back_s
            receives[here[:2]] += boundary.back_s
        return BetweenStages(fill_s, transfers_s, max((*sends.values(), *receives.values()), default=0.0))

    def _tails(self, shape: ReplicaShape, sizes: Sequence[int], counts: Sequence[float], longest_s: float) -> Tails:
        """Sums of gradients behind the last backward."""
        stages, firsts = shape.stages, shape.firsts(self._copies.pieces)
        model = self._times.problem.model
        layers = [
            longest_s / count / self._times.layer_s(stage.node_type, stage.tp, size)
            for stage, size, count in zip(stages, sizes, counts, strict=True)
        ]
        share = min(1.0, model.num_layers / sum(layers))
        summing: defaultdict[NodesOfStage, float] = defaultdict(float)
        begins: dict[NodesOfStage, float] = {}
        before_s = 0.0
        for stage, first, held, count in zip(stages, firsts, layers, counts, strict=True):
            first %= self._copies.pieces[stage.node_type]
            before_s += BACKWARD_SHARE * longest_s / count
            # Nodes of one type are alike.
            begins.setdefault(stage[:2], -before_s)
            summing[stage[:2]] += share * held * self._layer_sum_s(stage.node_type, stage.devices, stage.tp, first)
        tied_s = 0.0
        if len(stages) > 1 and model.tied_embeddings:
            tied_s = self._tied_sum_s(stages[0], firsts[0], stages[-1], firsts[-1])
        whole_s = max(0.0, *(begins[nodes] + seconds for nodes, seconds in summing.items()))
        return Tails(whole_s + tied_s, max(summing.values()) + tied_s)

    def _seconds_of_layer_sum(self, node_type: int, devices: int, tp: int, first: int) -> float:
        """The sum of the gradients of a layer."""
        problem = self._times.problem
        device = problem.node_types[node_type].device
        numel = problem.costs.parameters_per_rank(device=device, first_layer=1, end_layer=2, tp=tp)
        return self._sum_s(numel, (*self._ranks(node_type, devices, tp, first), *self._copies.others), rings=tp)

    def _seconds_of_tied_sum(self, stage: StageShape, first: int, last_stage: StageShape, last_first: int) -> float:
        """The sum of the word embedding's gradients of the first and the last stage."""
        model, tp = self._times.problem.model, max(stage.tp, last_stage.tp)
        both = (stage, first), (last_stage, last_first)
        ranks = [rank for each, at in both for rank in self._ranks(each.node_type, each.devices, each.tp, at)]
        return self._sum_s(model.padded_vocab_size * model.hidden_size // tp, ranks, rings=tp)

    def _sum_s(self, numel: int, ranks: Sequence[int], *, rings: int) -> float:
        """Seconds of so many sums at once, one on each tensor-parallel rank. Between nodes they share an interface."""
        if len(ranks) == 1:
            return 0.0
        problem = self._times.problem
        (ring,) = all_reduce_cost(numel * problem.costs.gradient_bytes, ranks, (), problem.topology).phases
        return ring.seconds * (rings if ring.ports else 1)

    def _ranks(self, node_type: int, devices: int, tp: int, first: int) -> list[int]:
        """The first tensor-parallel rank of each data-parallel one, of all copies."""
        starts = [firsts[node_type] + first for firsts in self._copies.firsts]
        return [rank for start in starts for rank in range(start, start + devices, tp)]


def _placeless(stage: StageShape, size: int) -> Placeless:
    return stage.node_type, stage.devices, stage.tp, size


@cache
def _about(depth: int) -> int:
    """A depth that is no smaller, of few, as a table is made for each."""
    power = 1 << (depth - 1).bit_length()
    return 3 * power // 4 if power > 2 and depth <= 3 * power // 4 else power
