"""Deals the nodes of the cluster anew among replicas of few kinds: plans that share nothing with those before.

A change of one replica among eight equal ones gains nothing, since the step is that of the longest, and a change of all
of them may lead through plans that are worse. So here all replicas are made at once. A **composition** says what they
are made of: so many copies of a pipeline of so many nodes, halves or parts of nodes of each type, and what it leaves of
a node type in pipelines of that type alone, all in pieces as even as can be. A pipeline then has

* an order of its node types, where the devices of one of them may be at both ends: the first stage and the last one
  share the tied embedding, which the types between need not sum then;
* a tp on each type, or on each size of stage; nodes, several nodes, halves or unlike pieces of nodes as its stages; and
  about as many samples per microbatch on all of them.

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

MOST_SAMPLES, MOST_PER_DEVICE = 64, 4
"""Samples of a microbatch, at most; more where so many for each device of a type are more. Heuristics."""

PER_STAGE = (1, 2, 2, 3)
"""Microbatches more in flight than on the stage behind, one of which is drawn. A heuristic."""

TRIES = 4
"""Pipelines that are drawn for each composition. A heuristic."""

MOST_ALIKE = 6
"""Pipelines of a composition that was tried before, among those that are tried at once, unless there are few
compositions. A heuristic."""

CUT_SHARE, HALVES_SHARE = 0.4, 0.75
"""So often the devices of a piece make several stages; and so often of an even number two alike. Heuristics."""

FUSED_SHARES, FUSED_CUTS = (0.0, 0.3, 1.0), (0, 0, 1, 2)
"""Of the types of a pipeline such a share, which is drawn, have nodes together in stages, and these are cut so many
times. Heuristics."""

QUANTILE = 0.1
"""What is known of so many compositions is expected of others. A heuristic: expecting the best of those that nobody has
looked at would look at each once, and at none twice."""

MOST_LONGER = 10.0
"""By how many times at most a step may be found to be longer than estimated."""

FASTEST, FASTEST_SHARE = 3, 0.6
"""So often the fastest tensor-parallel degree is taken, else one of so many of the fastest ones. Heuristics."""

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

    @property
    def dp(self) -> int:
        return self.devices // self.tp

    def micro_batch_size(self, samples: int) -> int:
        """Of each of its data-parallel ranks, where a microbatch has about so many samples."""
        return max(1, samples // self.dp)

    def samples(self, samples: int) -> int:
        """Of its microbatch, where that has about so many samples."""
        return self.dp * self.micro_batch_size(samples)


class _Pipeline(NamedTuple):
    """The stages of a copy in their order, and samples of a microbatch."""

    blocks: tuple[_Block, ...]
    samples: int

    @property
    def divides(self) -> bool:
        """Whether the samples of a microbatch of any stage are a multiple of those of any with fewer."""
        samples = sorted(block.samples(self.samples) for block in self.blocks)
        return all(more % fewer == 0 for fewer, more in itertools.pairwise(samples))


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
        """So many that each has several pipelines; where there are few, the same again."""
        return [drawn for _ in range(most // TRIES) if (drawn := self._drawn(dice))]

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
                if (composition, pipelines) not in self._seen and all(each.divides for each in pipelines):
                    self._seen.add((composition, pipelines))
                    step_s = self._step_s(composition, [self._steps(each) for each in pipelines])
                    self._left.append(Recomposition(step_s, composition, pipelines, dice.choice(PER_STAGE)))
        found: list[Recomposition] = []
        taken: Counter[Composition] = Counter()
        left = []
        # Where there are few compositions, more of each.
        others = max(MOST_ALIKE, most // max(1, len({each.composition for each in self._left})))
        unknown = self._typical()
        for each in sorted(self._left, key=lambda each: each.step_s * self._longer.get(each.composition, unknown)):
            if len(found) < most and taken[each.composition] < (others if each.composition in self._longer else 1):
                found.append(each)
                taken[each.composition] += 1
            else:
                left.append(each)
        self._left = left
        return found

    def _typical(self) -> float:
        """By how many times a step is longer than at best of which nothing is known yet: as of those that turned out to
        be rather good."""
        known = sorted(self._longer.values())
        return known[int(QUANTILE * len(known))] if known else 1.0

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
        problem, size = self._problem, block.micro_batch_size(samples)
        device = problem.node_types[block.node_type].device
        cost = problem.costs.layer(
            "block",
            device=device,
            tp=block.tp,
            micro_batch_size=size,
            sequence_parallel=problem.splits_sequence(block.tp),
            fp8=problem.computes_in_fp8(device, tp=block.tp, micro_batch_size=size),
        )
        return (cost.forward_s + cost.backward_s) * samples / block.samples(samples)

    def _fastest_tps(self, node_type: int, devices: int, samples: int) -> list[int]:
        groups = self._problem.model.num_query_groups
        legal = [tp for tp in range(1, devices + 1) if devices % tp == 0 and groups % tp == 0]
        legal = [tp for tp in legal if devices // tp <= samples] or legal[-1:]
        return sorted(legal, key=lambda tp: self._layer_s(_Block(node_type, 0, devices, tp), samples))[:FASTEST]

    def _some_tp(self, node_type: int, devices: int, samples: int, dice: random.Random) -> int:
        fastest = self._fastest(node_type, devices, samples)
        return fastest[0] if dice.random() < FASTEST_SHARE else dice.choice(fastest)

    def _pipeline(self, copies: EqualPipelines, dice: random.Random) -> _Pipeline:
        samples = 2 ** dice.randint(0, int(math.log2(self._most_samples(copies))))
        pieces, fused = list(copies.pieces), dice.choice(FUSED_SHARES)
        if sum(piece.parts for piece in pieces) > self._problem.model.num_layers / 2:
            fused = 1.0  # Hardly more than a layer on a stage.
        dice.shuffle(pieces)
        blocks = [self._blocks(piece, samples, fused, dice) for piece in pieces]
        # The devices of one type at both ends of the others.
        if len(pieces) > 1 and len(blocks[0]) > 1 and dice.random() < 0.5:
            before = dice.randint(1, len(blocks[0]) - 1)
            blocks = [blocks[0][:before], *blocks[1:], blocks[0][before:]]
        return _Pipeline(tuple(itertools.chain.from_iterable(blocks)), samples)

    def _most_samples(self, copies: EqualPipelines) -> int:
        devices = max(piece.devices * piece.parts for piece in copies.pieces)
        most = max(MOST_SAMPLES, MOST_PER_DEVICE * devices)
        return max(1, min(most, self._problem.global_batch_size // copies.number))

    def _blocks(self, piece: NodeParts, samples: int, fused: float, dice: random.Random) -> list[_Block]:
        """The stages of one node type: its parts of nodes, several of them together as often as ``fused`` says, or
        pieces of each."""
        sizes = [piece.devices] * piece.parts
        within = [piece.devices] * piece.parts
        if piece.parts > 1 and dice.random() < fused:
            sizes = [nodes * piece.devices for nodes in _cut(piece.parts, dice.choice(FUSED_CUTS), dice)]
            within = [piece.devices] * len(sizes)
        elif piece.devices > 1 and dice.random() < CUT_SHARE:
            halves = piece.devices % 2 == 0 and dice.random() < HALVES_SHARE
            parts = [piece.devices // 2] * 2 if halves else _cut(piece.devices, dice.randint(1, 2), dice)
            within = sizes = parts * piece.parts
        tps = {devices: self._some_tp(piece.node_type, devices, samples, dice) for devices in sorted(set(within))}
        firsts = itertools.accumulate(sizes, initial=0)
        return [
            _Block(piece.node_type, first, size, tps[devices])
            for first, size, devices in zip(firsts, sizes, within, strict=False)
        ]

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
            device, size = problem.node_types[block.node_type].device, block.micro_batch_size(pipeline.samples)
            start = first[block.node_type] + block.first
            stages.append(
                Stage(
                    first_layer=s,
                    end_layer=s + 1,
                    ranks=tuple(range(start, start + block.devices)),
                    device=device,
                    tp=block.tp,
                    dp=block.dp,
                    sequence_parallel=problem.splits_sequence(block.tp),
                    micro_batch_size=size,
                    in_flight=1,
                    fp8=problem.computes_in_fp8(device, tp=block.tp, micro_batch_size=size),
                )
            )
        coarsest = max(stage.samples_per_microbatch for stage in stages)
        return Replica(num_samples=-(-share // coarsest) * coarsest, stages=tuple(stages))


def _cut(whole: int, times: int, dice: random.Random) -> list[int]:
    """Random parts of a number, that is cut so many times at most."""
    ends = sorted(dice.sample(range(1, whole), min(times, whole - 1)))
    return [end - start for start, end in itertools.pairwise([0, *ends, whole])]
