"""Finds the pipeline that needs the least memory: whether a model fits a cluster at all, and a plan if it does.

One replica with one sample per microbatch and one microbatch in flight; every stage recomputes as its memory asks.
Whatever replica a plan has, the same stages hold the same layers in such a pipeline on the same devices and take no
more there; so if no such pipeline holds the model, no plan of whole layers does, and if one does, it is a plan.

How many layers a node holds follows from its devices one stage at a time. With e and h the number of embeddings and
heads on the first g devices, 0 or 1, and ``layers`` the most that a stage of tp devices holds with its ends,

    held[g, e, h] = max over tp, e' <= e, h' <= h of  held[g - tp, e', h'] + layers(tp, e - e', h - h')
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.deadline import Deadline
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.stage_options import Slot, StageOption, StageOptionTable

Ends = tuple[bool, bool]
"""Whether the embedding is there, and whether the head is."""

NO_END: Ends = (False, False)
EMBEDDING_END: Ends = (True, False)
HEAD_END: Ends = (False, True)
BOTH_ENDS: Ends = (True, True)


GPUS_PER_LOOK = 64
"""Devices of a node that are packed between two looks at the deadline."""

FITTING_S = 1.0
"""Seconds that the packing may take however little time is left: whether a model fits is said in any case, but for
nodes of very many devices. It takes some hundredths for a cluster of eight node types with eight devices each."""


@dataclass(frozen=True, slots=True)
class PackedStage:
    """A stage of that pipeline: its devices, from ``offset`` of its node on, and the most layers that they hold."""

    tp: int
    offset: int
    ends: Ends
    most_layers: int


@dataclass(frozen=True, slots=True)
class PackedNode:
    """The stages of one node that hold the most layers together: the last one, and those on the devices before it."""

    node_type: PlannerNodeType
    layers: int
    last: PackedStage | None = None
    before: "PackedNode | None" = None

    @property
    def stages(self) -> tuple[PackedStage, ...]:
        found: list[PackedStage] = []
        node: PackedNode | None = self
        while node is not None:
            found += [node.last] if node.last is not None else []
            node = node.before
        return tuple(reversed(found))


TpOfEnds = tuple[int, int]
"""The tp of the embedding's stage and of the head's."""


class LeastMemoryPipeline:
    """Packs the layers of one problem onto its nodes with the least memory.

    Args:
        stage_options: price the stages, for devices that sum no gradients but those of a tied embedding.
        deadline: without it the packing takes the time that it takes.

    Raises:
        OutOfTime: the deadline was over before all devices were looked at.
    """

    def __init__(self, problem: Problem, stage_options: StageOptionTable, deadline: Deadline | None = None) -> None:
        self._problem = problem
        self._stage_options = stage_options
        self._deadline = deadline
        self._node_types = stage_options.usable_node_types
        self._by_tp = {
            tps: {node_type.index: self._node(node_type, tps) for node_type in self._node_types}
            for tps in self._tps_of_ends()
        }

    def _tps_of_ends(self) -> Iterator[TpOfEnds | None]:
        """The pairs of tp to look at: a tied embedding costs its two holders more the less alike their tp is; otherwise
        any will do."""
        if not self._problem.model.tied_embeddings:
            yield None
            return
        tps = self._stage_options.legal_tps(max(node_type.gpus_per_node for node_type in self._node_types))
        yield from itertools.product(tps, repeat=2)

    def layers_of_node(self, node_type: PlannerNodeType) -> int:
        """The most layers between embedding and head that one node of ``node_type`` holds."""
        return max(nodes[node_type.index][NO_END].layers for nodes in self._by_tp.values())

    def has_place_for(self, ends: Ends) -> bool:
        """Whether some node has a stage with these ends and a layer."""
        return any(ends in of_node_type for nodes in self._by_tp.values() for of_node_type in nodes.values())

    def closest_stage(self, wanted: Sequence[Ends]) -> tuple[str, int, int, int]:
        """Device, tp, bytes needed and bytes there of the stage that comes closest to holding one of the ``wanted``
        ends with a layer, for the end that lacks most."""
        short = []
        for ends in wanted:
            stages = [
                (needed - option.capacity_bytes, node_type.device, tp, needed, option.capacity_bytes)
                for tps in self._by_tp
                for node_type in self._node_types
                for tp in self._stage_options.legal_tps(node_type.gpus_per_node)
                if tps is None or all(tp == each for each, here in zip(tps, ends, strict=True) if here)
                for option in self._options(node_type, tp, ends, tps)
                for needed in [int(option.memory.bytes(1, 1, first=ends[0], last=ends[1]))]
            ]
            short.append(min(stages))
        return max(short)[1:]

    def most_layers(self) -> int | None:
        """The most layers that all nodes together hold; ``None`` if there is no place for the embedding or the head
        beside a layer."""
        best = self._best()
        return None if best is None else sum(node.layers for node in best[1])

    def _best(self) -> tuple[TpOfEnds | None, tuple[PackedNode, ...]] | None:
        """The nodes that hold most, with the embedding on the first one and the head on it or on the second."""
        best: tuple[TpOfEnds | None, tuple[PackedNode, ...]] | None = None
        most = 0
        for tps, nodes in self._by_tp.items():
            for ends in self._places_of_ends(nodes):
                left = {node_type.index: node_type.count for node_type in self._node_types}
                for node in ends:
                    left[node.node_type.index] -= 1
                total = sum(n.layers for n in ends) + sum(nodes[k][NO_END].layers * n for k, n in left.items())
                if total > most:
                    most = total
                    ordered = sorted(self._node_types, key=lambda node_type: -nodes[node_type.index][NO_END].layers)
                    # More nodes than layers hold the model anyway, if they hold any.
                    middles = [
                        nodes[node_type.index][NO_END]
                        for node_type in ordered
                        for _ in range(min(left[node_type.index], self._problem.model.num_layers))
                    ]
                    best = tps, (*ends, *middles)
        return best

    def plan(self) -> Plan | None:
        """The pipeline with as few stages as hold the model, the largest first; ``None`` if none holds it."""
        best = self._best()
        if best is None or sum(node.layers for node in best[1]) < self._problem.model.num_layers:
            return None
        used: dict[int, int] = {}
        placed: list[tuple[PlannerNodeType, int, PackedStage]] = []
        for node in best[1]:
            number = used[node.node_type.index] = used.get(node.node_type.index, -1) + 1
            placed += [
                (node.node_type, node.node_type.ranks_of_node(number)[stage.offset], stage) for stage in node.stages
            ]
        # Which end a stage has says where it stands; the order of the others is free.
        placed.sort(key=lambda each: each[2].ends[1] - each[2].ends[0])
        shares = self._shares([stage for _, _, stage in placed])
        stages = list(self._stages([(*each, n) for each, n in zip(placed, shares, strict=True) if n], best[0]))
        return self._problem.plan_of([Replica(num_samples=self._problem.global_batch_size, stages=tuple(stages))])

    def _node(self, node_type: PlannerNodeType, tps: TpOfEnds | None) -> dict[Ends, PackedNode]:
        """The most layers of one node by the recursion at the head of this file; ends that do not fit are missing."""
        held: list[dict[Ends, PackedNode]] = [{NO_END: PackedNode(node_type, 0)}]
        sizes = self._stage_options.legal_tps(node_type.gpus_per_node)
        every = itertools.product(sizes, (NO_END, EMBEDDING_END, HEAD_END, BOTH_ENDS))
        most = {
            (tp, ends): layers
            for tp, ends in every
            if (layers := self._most_layers_of_stage(node_type, tp, ends, tps)) > 0
        }
        for g in range(1, node_type.gpus_per_node + 1):
            if self._deadline is not None and g % GPUS_PER_LOOK == 1:
                self._deadline.check()
            best = dict(held[g - 1])  # A device may idle.
            for (tp, ends), layers in most.items():
                for before, node in held[g - tp].items() if tp <= g else ():
                    if (before[0] and ends[0]) or (before[1] and ends[1]):
                        continue
                    both = before[0] or ends[0], before[1] or ends[1]
                    if both not in best or node.layers + layers > best[both].layers:
                        last = PackedStage(tp, g - tp, ends, layers)
                        best[both] = PackedNode(node_type, node.layers + layers, last, node)
            held.append(best)
        return held[-1]

    def _most_layers_of_stage(self, node_type: PlannerNodeType, tp: int, ends: Ends, tps: TpOfEnds | None) -> int:
        """The most layers of one stage; others have at least one layer for each end that is not here."""
        if tps is not None and any(here and tp != wanted for here, wanted in zip(ends, tps, strict=True)):
            return 0
        room = self._problem.model.num_layers - (not ends[0]) - (not ends[1])
        options = self._options(node_type, tp, ends, tps)
        return min(room, max(option.most_layers(1, first=ends[0], last=ends[1]) for option in options))

    def _options(self, node_type: PlannerNodeType, tp: int, ends: Ends, tps: TpOfEnds | None) -> list[StageOption]:
        """Every recomputation of a stage, the fastest first, then those with state on the host; with the memory that is
        left beside gradient sums.

        As in :mod:`hetero.cost.memory`, tensor-parallel ranks sum what each of them holds whole, the two copies of a
        tied embedding meet in one group per cell between their shard edges, and what the other's edges cut is held
        twice.
        """
        costs = self._problem.costs
        groups, held_twice = int(tp > 1), 0
        if tps is not None and ends in (EMBEDDING_END, HEAD_END):
            cells = math.lcm(*tps)
            groups += cells // tp
            if tp < cells:
                held_twice = (
                    (costs.element_bytes + costs.gradient_bytes) * costs.parameter_counts.sharded("embedding") // tp
                )
        reserved = groups * costs.runtime.communicator_bytes + held_twice
        found = self._stage_options.every(Slot(node_type.index, tp, tp), 1)
        return [replace(option, capacity_bytes=option.capacity_bytes - reserved) for option in found]

    def _places_of_ends(self, nodes: dict[int, dict[Ends, PackedNode]]) -> Iterator[tuple[PackedNode, ...]]:
        """The choices of nodes for the embedding and the head: one with both, or one with each."""
        for of_node_type in nodes.values():
            if BOTH_ENDS in of_node_type:
                yield (of_node_type[BOTH_ENDS],)
        for a, b in itertools.product(self._node_types, repeat=2):
            first, last = nodes[a.index].get(EMBEDDING_END), nodes[b.index].get(HEAD_END)
            if first is not None and last is not None and (a is not b or a.count > 1):
                yield first, last

    def _shares(self, stages: Sequence[PackedStage]) -> list[int]:
        """Divide the layers among the stages: one on each end, and of the rest as many as the largest ones hold."""
        shares = [int(any(stage.ends)) for stage in stages]
        left = self._problem.model.num_layers - sum(shares)
        for i in sorted(range(len(stages)), key=lambda i: -stages[i].most_layers):
            more = min(left, stages[i].most_layers - shares[i])
            shares[i] += more
            left -= more
        return shares

    def _stages(
        self, placed: Sequence[tuple[PlannerNodeType, int, PackedStage, int]], tps: TpOfEnds | None
    ) -> Iterator[Stage]:
        """The stages, with the fastest recomputation and, up to 1F1B's own, the depth that each one's memory has room
        for."""
        layer, depth = 0, self._problem.global_batch_size
        for s, (node_type, rank, stage, share) in enumerate(placed):
            first, last = stage.ends
            options = self._options(node_type, stage.tp, stage.ends, tps)
            option = next(option for option in options if option.fits(share, 1, first=first, last=last))
            # No deeper than the stage before: what that one does not send cannot be held.
            depth = min(depth, len(placed) - s, option.deepest(share, first=first, last=last))
            yield Stage(
                first_layer=layer,
                end_layer=layer + share,
                ranks=tuple(range(rank, rank + stage.tp)),
                device=node_type.device,
                tp=stage.tp,
                sequence_parallel=self._problem.splits_sequence(stage.tp),
                micro_batch_size=1,
                in_flight=depth,
                recompute=option.recompute,
                fp8=option.fp8,
                offload=option.offload(layer),
            )
            layer += share
