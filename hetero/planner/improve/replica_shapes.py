"""Says which devices of a replica make which stage, and changes that: the order of stages, their devices and tp, and
the samples of a microbatch on each. Layers are none of it.

Nodes of one type are alike, so that only their number within the replica matters, and of a node how many devices go to
each stage.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from hetero.planner.improve.compositions import EqualPipelines, NodeParts
from hetero.planner.problem import Problem

MOST_SAMPLES, MOST_PER_DEVICE = 64, 4
"""Samples of a microbatch, at most; more where so many for each device of a type are more. Heuristics."""

CUT_SHARE, HALVES_SHARE = 0.4, 0.75
"""So often the devices of a piece make several stages; and so often of an even number two alike. Heuristics."""

FUSED_SHARES, FUSED_CUTS = (0.0, 0.3, 1.0), (0, 0, 1, 2)
"""Of the types of a pipeline such a share, which is drawn, have nodes together in stages, and these are cut so many
times. Heuristics."""


class StageShape(NamedTuple):
    """Devices that make a stage: some of one node, or all of several.

    nodes: which of the nodes that the replica has something of, of this type.
    halved: how often a microbatch of the replica's is halved on this stage.
    """

    node_type: int
    nodes: tuple[int, ...]
    devices: int
    tp: int
    halved: int = 0

    @property
    def dp(self) -> int:
        return self.devices // self.tp

    def micro_batch_size(self, samples: int) -> int:
        """Of each of its data-parallel ranks, where a microbatch has about so many samples."""
        return max(1, (samples >> self.halved) // self.dp)

    def samples(self, samples: int) -> int:
        """Of its microbatch, where that has about so many samples."""
        return self.dp * self.micro_batch_size(samples)


class ReplicaShape(NamedTuple):
    """The stages of a replica in their order, and about how many samples a microbatch has on each."""

    stages: tuple[StageShape, ...]
    samples: int

    @property
    def divides(self) -> bool:
        """Whether of two neighbours the microbatch of one is so many whole ones of the other."""
        samples = [stage.samples(self.samples) for stage in self.stages]
        return all(max(both) % min(both) == 0 for both in itertools.pairwise(samples))

    def firsts(self, pieces: Mapping[int, int]) -> list[int]:
        """Of each stage its first device, counted from the first one that the replica has of its type.

        pieces: devices that the replica has of a node, by node type.
        """
        used: dict[tuple[int, int], int] = {}
        found = []
        for stage in self.stages:
            place = stage.node_type, stage.nodes[0]
            found.append(stage.nodes[0] * pieces[stage.node_type] + used.get(place, 0))
            used[place] = used.get(place, 0) + stage.devices
        return found

    def numbered(self) -> "ReplicaShape":
        """The same with nodes numbered in the order of the stages; those of one stage follow one another."""
        numbers: dict[tuple[int, int], int] = {}
        seen: dict[int, int] = {}
        stages = []
        for stage in self.stages:
            for node in stage.nodes:
                if (stage.node_type, node) not in numbers:
                    numbers[stage.node_type, node] = seen.get(stage.node_type, 0)
                    seen[stage.node_type] = seen.get(stage.node_type, 0) + 1
            stages.append(stage._replace(nodes=tuple(numbers[stage.node_type, node] for node in stage.nodes)))
        return ReplicaShape(tuple(stages), self.samples)


Stages = list[StageShape]


class ShapeDice:
    """Draws shapes of the pipelines ``copies``, and random changes of them."""

    def __init__(self, problem: Problem, copies: EqualPipelines, dice: random.Random) -> None:
        self._problem, self._copies, self._dice = problem, copies, dice
        self._per_node = {piece.node_type: piece.devices for piece in copies.pieces}
        self._tps = cache(self._legal_tps)
        self._changes: tuple[Callable[[Stages, int], Stages | None], ...] = (
            self._with_two_swapped,
            self._with_one_elsewhere,
            self._with_other_tp,
            self._with_one_cut,
            self._with_two_joined,
            self._with_devices_moved,
        )

    def drawn(self) -> ReplicaShape:
        """A random shape."""
        dice, pieces = self._dice, list(self._copies.pieces)
        samples = 2 ** dice.randint(0, int(math.log2(self.most_samples)))
        fused = dice.choice(FUSED_SHARES)
        if sum(piece.parts for piece in pieces) > self._problem.model.num_layers / 2:
            fused = 1.0  # Hardly more than a layer on a stage.
        dice.shuffle(pieces)
        stages = [self._stages_of(piece, samples, fused) for piece in pieces]
        # The devices of one type at both ends of the others.
        if len(pieces) > 1 and len(stages[0]) > 1 and dice.random() < 0.5:
            before = dice.randint(1, len(stages[0]) - 1)
            stages = [stages[0][:before], *stages[1:], stages[0][before:]]
        return ReplicaShape(tuple(itertools.chain.from_iterable(stages)), samples).numbered()

    @property
    def most_samples(self) -> int:
        devices = max(piece.devices * piece.parts for piece in self._copies.pieces)
        most = max(MOST_SAMPLES, MOST_PER_DEVICE * devices)
        return max(1, min(most, self._problem.global_batch_size // self._copies.number))

    def _stages_of(self, piece: NodeParts, samples: int, fused: float) -> Stages:
        """The stages of one node type: its parts of nodes, several of them together as often as ``fused`` says, or
        pieces of each."""
        dice, per_node = self._dice, piece.devices
        nodes = [(node,) for node in range(piece.parts)]
        if piece.parts > 1 and dice.random() < fused:
            ends = itertools.accumulate(_cut(piece.parts, dice.choice(FUSED_CUTS), dice), initial=0)
            together = [tuple(range(first, end)) for first, end in itertools.pairwise(ends)]
            return [self._stage(piece.node_type, each, per_node * len(each), samples) for each in together]
        sizes: Sequence[int] = [per_node]
        if per_node > 1 and dice.random() < CUT_SHARE:
            halves = per_node % 2 == 0 and dice.random() < HALVES_SHARE
            sizes = [per_node // 2] * 2 if halves else _cut(per_node, dice.randint(1, 2), dice)
        return [self._stage(piece.node_type, node, size, samples) for node in nodes for size in sizes]

    def _stage(self, node_type: int, nodes: tuple[int, ...], devices: int, samples: int) -> StageShape:
        """A stage with some tp, but no more data-parallel ranks than samples, if that is possible."""
        tps = self._tps(devices // len(nodes))
        return StageShape(
            node_type, nodes, devices, self._dice.choice([tp for tp in tps if devices // tp <= samples] or tps[-1:])
        )

    def _legal_tps(self, devices: int) -> list[int]:
        """Degrees of tensor parallelism on so many devices of a node."""
        groups = self._problem.model.num_query_groups
        return [tp for tp in range(1, devices + 1) if devices % tp == 0 and groups % tp == 0]

    def changed(self, shape: ReplicaShape) -> ReplicaShape | None:
        """``shape`` with one random change; ``None`` where the one that was drawn is not possible."""
        stages, dice = list(shape.stages), self._dice
        kind, s = dice.randrange(len(self._changes) + 2), dice.randrange(len(stages))
        if kind == len(self._changes):
            samples = shape.samples * 2 if dice.random() < 0.5 else shape.samples // 2
            return shape._replace(samples=samples) if 1 <= samples <= self.most_samples else None
        if kind > len(self._changes):
            return self._with_other_microbatch(shape, s)
        changed = self._changes[kind](stages, s)
        return None if changed is None else ReplicaShape(tuple(changed), shape.samples).numbered()

    def _with_other_microbatch(self, shape: ReplicaShape, s: int) -> ReplicaShape | None:
        """Half as many samples in the microbatches of one stage, or twice as many."""
        stage = shape.stages[s]
        halved = stage.halved + self._dice.choice((-1, 1))
        if halved < 0:
            # Twice as many as on any other, which have as many as before.
            others = [each._replace(halved=each.halved + (i != s)) for i, each in enumerate(shape.stages)]
            return ReplicaShape(tuple(others), 2 * shape.samples) if 2 * shape.samples <= self.most_samples else None
        if halved > stage.halved and stage.micro_batch_size(shape.samples) == 1:
            return None
        return shape._replace(stages=(*shape.stages[:s], stage._replace(halved=halved), *shape.stages[s + 1 :]))

    def _with_two_swapped(self, stages: Stages, s: int) -> Stages:
        other = self._dice.randrange(len(stages))
        stages[s], stages[other] = stages[other], stages[s]
        return stages

    def _with_one_elsewhere(self, stages: Stages, s: int) -> Stages:
        stage = stages.pop(s)
        stages.insert(self._dice.randint(0, len(stages)), stage)
        return stages

    def _with_other_tp(self, stages: Stages, s: int) -> Stages:
        tps = self._tps(stages[s].devices // len(stages[s].nodes))
        stages[s] = stages[s]._replace(tp=self._dice.choice(tps))
        return stages

    def _with_one_cut(self, stages: Stages, s: int) -> Stages | None:
        """One stage in two, of some of its devices each, or of some of its nodes."""
        stage, dice = stages[s], self._dice
        if stage.devices == 1:
            return None
        if len(stage.nodes) > 1:
            first = dice.randint(1, len(stage.nodes) - 1)
            parts = [self._of(stage, nodes=nodes) for nodes in (stage.nodes[:first], stage.nodes[first:])]
        else:
            devices = dice.randint(1, stage.devices - 1)
            parts = [self._of(stage, devices=each) for each in (devices, stage.devices - devices)]
        stages[s] = parts[0]
        stages.insert(s + 1 if dice.random() < 0.5 else dice.randint(0, len(stages)), parts[1])
        return stages

    def _with_two_joined(self, stages: Stages, s: int) -> Stages | None:
        """Two stages of one node, or of whole nodes, in one."""
        stage = stages[s]
        other = self._one_of(stages, s, lambda each: self._can_join(stage, each))
        if other is None:
            return None
        joined = stages[other]
        stages[s] = (
            self._of(stage, devices=stage.devices + joined.devices)
            if stage.nodes == joined.nodes
            else self._of(stage, nodes=stage.nodes + joined.nodes)
        )
        stages.pop(other)
        return stages

    def _with_devices_moved(self, stages: Stages, s: int) -> Stages | None:
        """Some devices of a stage in another stage of the same node."""
        stage = stages[s]
        if stage.devices == 1 or len(stage.nodes) > 1:
            return None
        other = self._one_of(stages, s, lambda each: each[:2] == stage[:2])
        if other is None:
            return None
        moved = self._dice.randint(1, stage.devices - 1)
        stages[s] = self._of(stage, devices=stage.devices - moved)
        stages[other] = self._of(stages[other], devices=stages[other].devices + moved)
        return stages

    def _can_join(self, one: StageShape, other: StageShape) -> bool:
        whole = all(each.devices == len(each.nodes) * self._per_node[each.node_type] for each in (one, other))
        return one.node_type == other.node_type and (one.nodes == other.nodes or whole)

    def _one_of(self, stages: Stages, s: int, suits: Callable[[StageShape], bool]) -> int | None:
        suiting = [i for i, each in enumerate(stages) if i != s and suits(each)]
        return self._dice.choice(suiting) if suiting else None

    def _of(self, stage: StageShape, *, nodes: tuple[int, ...] | None = None, devices: int | None = None) -> StageShape:
        """The stage on these whole nodes, or with so many devices of its node; its tp stays if it can."""
        nodes = nodes or stage.nodes
        devices = devices or len(nodes) * self._per_node[stage.node_type]
        tps = self._tps(devices // len(nodes))
        return stage._replace(nodes=nodes, devices=devices, tp=stage.tp if stage.tp in tps else tps[0])


def _cut(whole: int, times: int, dice: random.Random) -> Sequence[int]:
    """Random parts of a number, that is cut so many times at most."""
    ends = sorted(dice.sample(range(1, whole), min(times, whole - 1)))
    return [end - start for start, end in itertools.pairwise([0, *ends, whole])]
