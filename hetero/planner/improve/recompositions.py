"""Deals the nodes of the cluster anew among replicas of few kinds: plans that share nothing with those before.

A change of one replica among eight equal ones gains nothing, since the step is that of the longest, and a change of all
of them may lead through plans that are worse. So here all replicas are made at once. A **composition** says what they
are made of: so many copies of a pipeline of so many nodes, halves or parts of nodes of each type, and what it leaves of
a node type in pipelines of that type alone, all in pieces as even as can be. A pipeline then has

* an order of its node types, where the devices of one of them may be at both ends: the first stage and the last one
  share the tied embedding, which the types between need not sum then;
* a tp on each type, nodes, halves of nodes or several nodes as its stages, and about as many samples per microbatch on
  all of them.

Both are drawn at random, the second with an eye to what is fast. Whether a composition could be worth it is told by how
fast its devices are at best: with layers and samples divided evenly by speed, in the copies f,

    fill_f + n_f period_f  equal for all copies,  sum of n_f = batch.

Those that could be the shortest are divided by :mod:`.division` and estimated (:mod:`.step_estimate`). By how
much longer one of a composition then was tells what to expect of its other pipelines.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.improve.division import DIVIDING_S, Divider, ReplicaSteps
from hetero.planner.problem import PlannerNodeType, Problem

MOST_SAMPLES = 64
"""Samples of a microbatch, at most. A heuristic."""

PER_STAGE = (2, 2, 1)
"""Microbatches more in flight than on the stage behind, one of which is drawn. A heuristic."""

TRIES = 4
"""Pipelines that are drawn for each composition. A heuristic."""

MOST_ALIKE = 3
"""Pipelines of a composition that was tried before, among those that are tried at once. A heuristic."""

MOST_LONGER = 10.0
"""By how many times at most a step may be found to be longer than estimated."""

FASTEST = 3
"""Among so many of the fastest tensor-parallel degrees one is drawn. A heuristic."""

STAGE_S = 1e-4
"""Seconds of making a stage, about, for the count of work; an estimate."""


class NodeParts(NamedTuple):
    """What a copy has of one node type.

    devices: in each of its ``parts`` of nodes.
    """

    node_type: int
    devices: int
    parts: int


class EqualPipelines(NamedTuple):
    """So many pipelines of these pieces."""

    number: int
    pieces: tuple[NodeParts, ...]


Composition = tuple[EqualPipelines, ...]


class _Block(NamedTuple):
    """Devices of one node that make a stage; ``first`` counts from the first rank of the copy's part of the type."""

    node_type: int
    first: int
    devices: int
    tp: int


class _Pipeline(NamedTuple):
    """The stages of a copy in their order, and samples of a microbatch."""

    blocks: tuple[_Block, ...]
    samples: int


class Recomposition(NamedTuple):
    """A composition with its pipelines.

    step_s: by the estimate.
    per_stage: microbatches more in flight than on the stage behind.
    """

    step_s: float
    composition: Composition
    pipelines: tuple[_Pipeline, ...]
    per_stage: int

    @property
    def making_s(self) -> float:
        """Seconds of making its plan, about, for the count of work."""
        each = zip(self.composition, self.pipelines, strict=True)
        return DIVIDING_S + STAGE_S * sum(copies.number * len(pipeline.blocks) for copies, pipeline in each)


class Recomposer:
    """Draws compositions of the cluster of ``problem``, and makes plans of them."""

    def __init__(self, problem: Problem, divider: Divider) -> None:
        self._problem, self._divider = problem, divider
        self._layer_s = cache(self._seconds_of_layer)
        self._fastest = cache(self._fastest_tps)
        self._left: list[Recomposition] = []
        self._longer: dict[Composition, float] = {}
        self._seen: set[tuple[Composition, tuple[_Pipeline, ...]]] = set()

    def _compositions(self, dice: random.Random, most: int) -> list[Composition]:
        """Different ones, of so many pipelines each."""
        return list(dict.fromkeys(drawn for _ in range(most // TRIES) if (drawn := self._drawn(dice))))

    def _drawn(self, dice: random.Random) -> Composition:
        """A composition: some types together in copies, what is left of each type alone."""
        node_types = self._problem.node_types
        left = {each.index: each.count for each in self._problem.usable_node_types}
        made: list[EqualPipelines] = []
        if len(left) > 1:
            if dice.random() < 0.75:
                together = sorted(dice.sample(sorted(left), dice.choice((2, 2, 3)) if len(left) > 2 else 2))
                mixed = self._mixed([node_types[t] for t in together], left, dice)
                made += [mixed] if mixed is not None else []
            if made and len(left) > 1 and dice.random() < 0.25:
                left[dice.choice(sorted(left))] = 0  # What is left of it idles.
        for t, nodes in left.items():
            made += self._alone(node_types[t], nodes, dice)
        return tuple(sorted(made))

    def _mixed(
        self, types: Sequence[PlannerNodeType], left: dict[int, int], dice: random.Random
    ) -> EqualPipelines | None:
        """Equal pipelines that have something of each of these types; what they take is no longer ``left``."""
        leader = dice.choice(types)
        number = self._number(leader, left[leader.index], dice)
        pieces = []
        for each in types:
            nodes, per_node = left[each.index], 1
            devices, count = each.gpus_per_node, nodes // number
            if count == 0:
                per_node = -(-number // nodes)
                devices, count = each.gpus_per_node // per_node, 1
            elif count > 1 and dice.random() < 0.2:
                count = dice.randint(1, count - 1)
            if devices == 0:
                return None
            pieces.append(NodeParts(each.index, devices, count))
            left[each.index] -= -(-number // per_node) if per_node > 1 else number * count
        return EqualPipelines(number, tuple(pieces))

    def _number(self, leader: PlannerNodeType, nodes: int, dice: random.Random) -> int:
        """Among how many pipelines nodes of one type are dealt: so many whole nodes each, or parts of them."""
        if leader.gpus_per_node > 1 and dice.random() < 0.25:
            return nodes * dice.choice([n for n in (2, 3, 4, 8) if n <= leader.gpus_per_node])
        return nodes // dice.randint(1, nodes)

    def _alone(self, node_type: PlannerNodeType, nodes: int, dice: random.Random) -> Iterator[EqualPipelines]:
        """Equal pipelines on nodes of one type; nodes that are left over make some of them longer, if they are few."""
        if not nodes:
            return
        number = self._number(node_type, nodes, dice)
        if number > nodes:
            yield EqualPipelines(number, (NodeParts(node_type.index, node_type.gpus_per_node * nodes // number, 1),))
            return
        count, longer = divmod(nodes, number)
        if longer:
            yield EqualPipelines(longer, (NodeParts(node_type.index, node_type.gpus_per_node, count + 1),))
        yield EqualPipelines(number - longer, (NodeParts(node_type.index, node_type.gpus_per_node, count),))

    def drawn(self, dice: random.Random, more: int, most: int) -> list[Recomposition]:
        """After so many ``more`` have been drawn, up to so many of all that nobody has had: the ones of different
        compositions that are likely to be the shortest, and several of a composition once something is known of it."""
        for composition in self._compositions(dice, more):
            for _ in range(TRIES):
                pipelines = tuple(self._pipeline(copies, dice) for copies in composition)
                if (composition, pipelines) not in self._seen:
                    self._seen.add((composition, pipelines))
                    step_s = self._step_s(composition, [self._steps(each) for each in pipelines])
                    self._left.append(Recomposition(step_s, composition, pipelines, dice.choice(PER_STAGE)))
        found: list[Recomposition] = []
        taken: Counter[Composition] = Counter()
        left = []
        for each in sorted(self._left, key=lambda each: each.step_s * self._longer.get(each.composition, 1.0)):
            others = MOST_ALIKE if each.composition in self._longer else 1
            if len(found) < most and taken[each.composition] < others:
                found.append(each)
                taken[each.composition] += 1
            else:
                left.append(each)
        self._left = left
        return found

    def tell(self, drawn: Recomposition, step_s: float) -> None:
        """Take notice of how long the step is with sums of gradients and under memory: another one of this composition
        is likely to be longer than at best by as much."""
        longer = min(MOST_LONGER, step_s / drawn.step_s)
        self._longer[drawn.composition] = min(longer, self._longer.get(drawn.composition, MOST_LONGER))

    def _step_s(self, composition: Composition, steps: Sequence[ReplicaSteps]) -> float:
        """The step in which all copies are at work to its end."""
        numbers = [copies.number for copies in composition]
        rate = sum(number / each.period_s for number, each in zip(numbers, steps, strict=True))
        behind = sum(number * each.fill_s / each.period_s for number, each in zip(numbers, steps, strict=True))
        return (self._problem.global_batch_size + behind) / rate

    def _steps(self, pipeline: _Pipeline) -> ReplicaSteps:
        """Seconds per sample and before the first one, with layers by speed and without a look at memory."""
        num_layers = self._problem.model.num_layers
        seconds = [self._layer_s(block, pipeline.samples) for block in pipeline.blocks]
        together = 1 / sum(1 / each for each in seconds)
        period_s = num_layers * together / pipeline.samples
        return ReplicaSteps(1, (len(seconds) - 1) * period_s * pipeline.samples, period_s)

    def _seconds_of_layer(self, block: _Block, samples: int) -> float:
        """Forward and backward of a microbatch of so many samples."""
        problem, dp = self._problem, block.devices // block.tp
        size = max(1, samples // dp)
        device = problem.node_types[block.node_type].device
        cost = problem.costs.layer(
            "block",
            device=device,
            tp=block.tp,
            micro_batch_size=size,
            sequence_parallel=problem.splits_sequence(block.tp),
            fp8=problem.computes_in_fp8(device, tp=block.tp, micro_batch_size=size),
        )
        return (cost.forward_s + cost.backward_s) * samples / (size * dp)

    def _fastest_tps(self, node_type: int, devices: int, samples: int) -> list[int]:
        groups = self._problem.model.num_query_groups
        legal = [tp for tp in range(1, devices + 1) if devices % tp == 0 and groups % tp == 0]
        legal = [tp for tp in legal if devices // tp <= samples] or legal[-1:]
        return sorted(legal, key=lambda tp: self._layer_s(_Block(node_type, 0, devices, tp), samples))[:FASTEST]

    def _pipeline(self, copies: EqualPipelines, dice: random.Random) -> _Pipeline:
        samples = 2 ** dice.randint(0, int(math.log2(max(1, min(MOST_SAMPLES, self._most_samples(copies))))))
        pieces = list(copies.pieces)
        dice.shuffle(pieces)
        blocks = [self._blocks(piece, samples, dice) for piece in pieces]
        # The devices of one type at both ends of the others.
        if len(pieces) > 1 and len(blocks[0]) > 1 and dice.random() < 0.5:
            half = len(blocks[0]) // 2
            blocks = [blocks[0][:half], *blocks[1:], blocks[0][half:]]
        return _Pipeline(tuple(itertools.chain.from_iterable(blocks)), samples)

    def _most_samples(self, copies: EqualPipelines) -> int:
        return max(1, self._problem.global_batch_size // copies.number)

    def _blocks(self, piece: NodeParts, samples: int, dice: random.Random) -> list[_Block]:
        """The stages of one node type: its parts of nodes, halves of these, or several of them together."""
        sizes = [piece.devices] * piece.parts
        tp_within = piece.devices
        if piece.parts > 1 and dice.random() < 0.3:
            ends = sorted(dice.sample(range(1, piece.parts), dice.randint(0, min(2, piece.parts - 1))))
            sizes = [(end - start) * piece.devices for start, end in itertools.pairwise([0, *ends, piece.parts])]
        elif piece.devices % 2 == 0 and dice.random() < 0.4:
            tp_within //= 2
            sizes = [tp_within] * (2 * piece.parts)
        tp = dice.choice(self._fastest(piece.node_type, tp_within, samples))
        firsts = itertools.accumulate(sizes, initial=0)
        return [_Block(piece.node_type, first, size, tp) for first, size in zip(firsts, sizes, strict=False)]

    def plan(self, drawn: Recomposition) -> Plan | None:
        """The plan of these pipelines, with layers and samples divided; ``None`` if nothing fits.

        Raises:
            ConfigError: a device has no profile, or two that talk to one another no link.
        """
        plan = self._problem.plan_of(self._replicas(drawn.composition, drawn.pipelines))
        return self._divider.settled(plan, range(len(plan.replicas)), per_stage=drawn.per_stage)

    def _replicas(self, composition: Composition, pipelines: Sequence[_Pipeline]) -> Iterator[Replica]:
        node_types = self._problem.node_types
        steps = [self._steps(pipeline) for pipeline in pipelines]
        step_s = self._step_s(composition, steps)
        # By node type the next device that nobody has yet.
        free = {each.index: each.first_rank for each in node_types}
        for copies, pipeline, of_copy in zip(composition, pipelines, steps, strict=True):
            # Where a node has too few devices for another part, the rest of it idles.
            share = max(1, round((step_s - of_copy.fill_s) / of_copy.period_s / pipeline.samples)) * pipeline.samples
            for _ in range(copies.number):
                first = {}
                for piece in copies.pieces:
                    node_type = node_types[piece.node_type]
                    used = (free[piece.node_type] - node_type.first_rank) % node_type.gpus_per_node
                    if used + piece.devices > node_type.gpus_per_node:
                        free[piece.node_type] += node_type.gpus_per_node - used
                    first[piece.node_type] = free[piece.node_type]
                    free[piece.node_type] += piece.devices * piece.parts
                yield self._replica(pipeline, first, share)

    def _replica(self, pipeline: _Pipeline, first: dict[int, int], share: int) -> Replica:
        problem = self._problem
        stages = []
        for s, block in enumerate(pipeline.blocks):
            device, dp = problem.node_types[block.node_type].device, block.devices // block.tp
            size = max(1, pipeline.samples // dp)
            start = first[block.node_type] + block.first
            stages.append(
                Stage(
                    first_layer=s,
                    end_layer=s + 1,
                    ranks=tuple(range(start, start + block.devices)),
                    device=device,
                    tp=block.tp,
                    dp=dp,
                    sequence_parallel=problem.splits_sequence(block.tp),
                    micro_batch_size=size,
                    in_flight=1,
                    fp8=problem.computes_in_fp8(device, tp=block.tp, micro_batch_size=size),
                )
            )
        coarsest = max(stage.samples_per_microbatch for stage in stages)
        return Replica(num_samples=-(-share // coarsest) * coarsest, stages=tuple(stages))
