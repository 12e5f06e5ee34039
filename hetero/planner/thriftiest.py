"""The pipeline that needs the least memory: whether a model fits a cluster at all, and a plan if it does.

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
from hetero.planner.candidates import RECOMPUTES, Candidates, Slot, StageOption
from hetero.planner.problem import NodeKind, Problem

Ends = tuple[bool, bool]
"""Whether the embedding is there, and whether the head is."""

NO_END: Ends = (False, False)
EMBEDDING: Ends = (True, False)
HEAD: Ends = (False, True)
BOTH: Ends = (True, True)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stage: its devices, from ``offset`` of its node on, and the layers that they hold at most."""

    tp: int
    offset: int
    ends: Ends
    most_layers: int


@dataclass(frozen=True, slots=True)
class Node:
    """The stages of one node that hold most layers together."""

    kind: NodeKind
    pieces: tuple[Piece, ...]
    layers: int


TpOfEnds = tuple[int, int]
"""The tp of the embedding's stage and of the head's."""


class Thriftiest:
    """What the nodes of one problem hold at most.

    Args:
        candidates: price the stages, for devices that sum no gradients but those of a tied embedding.
    """

    def __init__(self, problem: Problem, candidates: Candidates) -> None:
        self._problem = problem
        self._candidates = candidates
        self._kinds = candidates.usable_kinds
        self._by_tp = {tps: {kind.index: self._node(kind, tps) for kind in self._kinds} for tps in self._tps_of_ends()}

    def _tps_of_ends(self) -> Iterator[TpOfEnds | None]:
        """A tied embedding costs its two holders more the less alike their tp is; otherwise any will do."""
        if not self._problem.model.tied_embeddings:
            yield None
            return
        tps = self._candidates.legal_tps(max(kind.gpus_per_node for kind in self._kinds))
        yield from itertools.product(tps, repeat=2)

    def layers_of_node(self, kind: NodeKind) -> int:
        """The most layers between embedding and head that one node of ``kind`` holds."""
        return max(nodes[kind.index][NO_END].layers for nodes in self._by_tp.values())

    def has_place_for(self, ends: Ends) -> bool:
        """Whether some node has a stage with these ends and a layer."""
        return any(ends in of_kind for nodes in self._by_tp.values() for of_kind in nodes.values())

    def most_layers(self) -> int | None:
        """That all nodes together hold; ``None`` if there is no place for the embedding or the head beside a layer."""
        best = self._best()
        return None if best is None else sum(node.layers for node in best[1])

    def _best(self) -> tuple[TpOfEnds | None, tuple[Node, ...]] | None:
        """The nodes that hold most, with the embedding on the first one and the head on it or on the second."""
        best: tuple[TpOfEnds | None, tuple[Node, ...]] | None = None
        most = 0
        for tps, nodes in self._by_tp.items():
            for ends in self._places_of_ends(nodes):
                left = {kind.index: kind.count for kind in self._kinds}
                for node in ends:
                    left[node.kind.index] -= 1
                total = sum(n.layers for n in ends) + sum(nodes[k][NO_END].layers * n for k, n in left.items())
                if total > most:
                    most = total
                    ordered = sorted(self._kinds, key=lambda kind: -nodes[kind.index][NO_END].layers)
                    middles = [nodes[kind.index][NO_END] for kind in ordered for _ in range(left[kind.index])]
                    best = tps, (*ends, *middles)
        return best

    def plan(self) -> Plan | None:
        """The pipeline with as few stages as hold the model, the largest first; ``None`` if none holds it."""
        best = self._best()
        if best is None or sum(node.layers for node in best[1]) < self._problem.model.num_layers:
            return None
        used: dict[int, int] = {}
        seats: list[tuple[NodeKind, int, Piece]] = []
        for node in best[1]:
            number = used[node.kind.index] = used.get(node.kind.index, -1) + 1
            seats += [(node.kind, node.kind.ranks_of_node(number)[piece.offset], piece) for piece in node.pieces]
        # Which end a stage has says where it stands; the order of the others is free.
        seats.sort(key=lambda seat: seat[2].ends[1] - seat[2].ends[0])
        shares = self._shares([piece for _, _, piece in seats])
        stages = list(self._stages([(*seat, n) for seat, n in zip(seats, shares, strict=True) if n], best[0]))
        working = {rank for stage in stages for rank in stage.ranks}
        return Plan(
            model=self._problem.model,
            seq_length=self._problem.seq_length,
            global_batch_size=self._problem.global_batch_size,
            precision=self._problem.precision,
            distributed_optimizer=self._problem.distributed_optimizer,
            replicas=(Replica(num_samples=self._problem.global_batch_size, stages=tuple(stages)),),
            idle_ranks=tuple(r for r in range(self._problem.cluster.num_devices) if r not in working),
        )

    def _node(self, kind: NodeKind, tps: TpOfEnds | None) -> dict[Ends, Node]:
        """The recursion at the head of this file; ends that do not fit are missing."""
        held: list[dict[Ends, Node]] = [{NO_END: Node(kind, (), 0)}]
        sizes = self._candidates.legal_tps(kind.gpus_per_node)
        every = itertools.product(sizes, (NO_END, EMBEDDING, HEAD, BOTH))
        most = {
            (tp, ends): layers for tp, ends in every if (layers := self._most_layers_of_stage(kind, tp, ends, tps)) > 0
        }
        for g in range(1, kind.gpus_per_node + 1):
            best = dict(held[g - 1])  # A device may idle.
            for (tp, ends), layers in most.items():
                for before, node in held[g - tp].items() if tp <= g else ():
                    if (before[0] and ends[0]) or (before[1] and ends[1]):
                        continue
                    both = before[0] or ends[0], before[1] or ends[1]
                    if both not in best or node.layers + layers > best[both].layers:
                        pieces = (*node.pieces, Piece(tp, g - tp, ends, layers))
                        best[both] = Node(kind, pieces, node.layers + layers)
            held.append(best)
        return held[-1]

    def _most_layers_of_stage(self, kind: NodeKind, tp: int, ends: Ends, tps: TpOfEnds | None) -> int:
        """Of one stage; others have at least one layer for each end that is not here."""
        if tps is not None and any(here and tp != wanted for here, wanted in zip(ends, tps, strict=True)):
            return 0
        room = self._problem.model.num_layers - (not ends[0]) - (not ends[1])
        options = self._options(kind, tp, ends, tps)
        return min(room, max(option.most_layers(1, first=ends[0], last=ends[1]) for option in options))

    def _options(self, kind: NodeKind, tp: int, ends: Ends, tps: TpOfEnds | None) -> list[StageOption]:
        """Every recomputation, the fastest first, with the memory that is left beside gradient sums.

        As in :mod:`hetero.cost.memory`, tensor-parallel ranks sum what each of them holds whole, the two copies of a
        tied embedding meet in one group per cell between their shard edges, and what the other's edges cut is held
        twice.
        """
        costs = self._problem.costs
        groups, held_twice = int(tp > 1), 0
        if tps is not None and ends in (EMBEDDING, HEAD):
            cells = math.lcm(*tps)
            groups += cells // tp
            if tp < cells:
                held_twice = (
                    (costs.element_bytes + costs.gradient_bytes) * costs.parameter_counts.sharded("embedding") // tp
                )
        reserved = groups * costs.runtime.communicator_bytes + held_twice
        found = (self._candidates.option(Slot(kind.index, tp, tp), 1, recompute) for recompute in RECOMPUTES)
        return [replace(option, capacity_bytes=option.capacity_bytes - reserved) for option in found]

    def _places_of_ends(self, nodes: dict[int, dict[Ends, Node]]) -> Iterator[tuple[Node, ...]]:
        """Nodes with the embedding and the head: one with both, or one with each."""
        for of_kind in nodes.values():
            if BOTH in of_kind:
                yield (of_kind[BOTH],)
        for a, b in itertools.product(self._kinds, repeat=2):
            first, last = nodes[a.index].get(EMBEDDING), nodes[b.index].get(HEAD)
            if first is not None and last is not None and (a is not b or a.count > 1):
                yield first, last

    def _shares(self, pieces: Sequence[Piece]) -> list[int]:
        """Layers of each stage: one on each end, and of the rest as many as the largest ones hold."""
        shares = [int(any(piece.ends)) for piece in pieces]
        left = self._problem.model.num_layers - sum(shares)
        for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].most_layers):
            more = min(left, pieces[i].most_layers - shares[i])
            shares[i] += more
            left -= more
        return shares

    def _stages(self, seats: Sequence[tuple[NodeKind, int, Piece, int]], tps: TpOfEnds | None) -> Iterator[Stage]:
        """With the fastest recomputation and, up to 1F1B's own, the depth that each one's memory has room for."""
        layer, depth = 0, self._problem.global_batch_size
        for s, (kind, rank, piece, share) in enumerate(seats):
            first, last = piece.ends
            options = self._options(kind, piece.tp, piece.ends, tps)
            option = next(option for option in options if option.fits(share, 1, first=first, last=last))
            # No deeper than the stage before: what that one does not send cannot be held.
            depth = min(depth, len(seats) - s, option.deepest(share, first=first, last=last))
            yield Stage(
                first_layer=layer,
                end_layer=layer + share,
                ranks=tuple(range(rank, rank + piece.tp)),
                device=kind.device,
                tp=piece.tp,
                sequence_parallel=self._problem.splits_sequence(piece.tp),
                micro_batch_size=1,
                in_flight=depth,
                recompute=option.recompute,
            )
            layer += share
