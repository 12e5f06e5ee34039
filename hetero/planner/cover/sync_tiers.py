"""Sorts the links between nodes into tiers, from fast to slow: how many seconds a gradient byte takes on each.

A layer's gradient is summed over all that hold the layer, in a ring that goes at the speed of its slowest link. So what
counts is which node types hold the layer. With the links sorted into tiers, from the fastest to the slowest,

    seconds of layer l on a node of type k = bytes_l x max( inside_k, tier of the slowest link between l's holders )

and a node's sums follow one another on its network interfaces. The numbers come from :mod:`hetero.cost.network`.
"""

import itertools
import math
from functools import cached_property

from hetero.cost.network import ring_all_reduce_cost
from hetero.errors import ConfigError
from hetero.planner.problem import Problem
from hetero.spec.parameters import EMBEDDING, parameters

SAME_TIER = 1e-6
"""Relative difference below which two links are one tier."""


LONG_RING = 16
"""Devices of a ring that counts as long, as far as the cluster has them. Each of n devices sends 2 (n - 1) / n of the
bytes, in a longer ring 7 % more at most; a heuristic."""


class SyncTiers:
    """Tells which tier of links joins two node types, and how many gradient bytes each layer has."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._bytes = problem.costs.runtime.bucket_numel * problem.costs.gradient_bytes

    @cached_property
    def inside_s_per_byte(self) -> tuple[float, ...]:
        """Seconds per byte of a ring over all devices of a node, by node type; 0 if it has one device."""
        return tuple(self._s_per_byte(list(node_type.ranks_of_node(0))) for node_type in self._problem.node_types)

    @cached_property
    def _between(self) -> dict[tuple[int, int], float]:
        """Seconds per byte of a ring over two nodes' devices, by node types; infinite where there is no such link."""
        s_per_byte = {}
        for a, b in itertools.combinations_with_replacement(self._problem.node_types, 2):
            if a.index != b.index or a.count > 1:
                ranks = [*a.ranks_of_node(0), *b.ranks_of_node(int(a.index == b.index))]
                # A ring of two has half the traffic per device of a long one: count as if it were long.
                n = len(ranks)
                longer = max(n, min(self._problem.cluster.num_devices, LONG_RING))
                s_per_byte[a.index, b.index] = self._s_per_byte(ranks) * (1 - 1 / longer) / (1 - 1 / n)
        return s_per_byte

    def _s_per_byte(self, ranks: list[int]) -> float:
        """Seconds per byte of an all-reduce over ``ranks``; infinite where a link is missing."""
        if len(ranks) < 2:
            return 0.0
        try:
            cost = ring_all_reduce_cost(
                self._bytes,
                ranks,
                self._problem.topology,
            )
        except ConfigError:
            return float("inf")
        return cost.seconds / self._bytes

    @cached_property
    def tiers(self) -> tuple[float, ...]:
        """The tiers as seconds per gradient byte, ascending."""
        found: list[float] = []
        for s_per_byte in sorted(self._between.values()):
            if not found or s_per_byte > found[-1] * (1 + SAME_TIER):
                found.append(s_per_byte)
        return tuple(found)

    def tier_between(self, a: int, b: int) -> int | None:
        """The tier of the link between nodes of types ``a`` and ``b``; ``None`` if there are no two such
        nodes."""
        return self._tiers_between.get((min(a, b), max(a, b)))

    @cached_property
    def _tiers_between(self) -> dict[tuple[int, int], int]:
        return {
            node_types: max(i for i, tier in enumerate(self.tiers) if tier <= s_per_byte)
            for node_types, s_per_byte in self._between.items()
        }

    def fastest_s_per_byte(self, node_type: int) -> float:
        """Seconds per byte of the fastest ring that leaves a node of ``node_type``."""
        leaving = (s_per_byte for node_types, s_per_byte in self._between.items() if node_type in node_types)
        return min(leaving, default=0.0)

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Gradient bytes of the embedding, of each layer, and of the head, in this order.

        A tied head sums the embedding's gradient too.
        """
        model = self._problem.model
        numel = [0] * (model.num_layers + 2)
        for parameter in parameters(model):
            numel[math.floor(parameter.position) + 1] += parameter.numel
            if parameter.name == EMBEDDING and model.tied_embeddings:
                numel[-1] += parameter.numel
        return tuple(count * self._problem.costs.gradient_bytes for count in numel)

    @cached_property
    def word_embedding_bytes(self) -> int:
        """Gradient bytes of the word embedding alone."""
        model = self._problem.model
        return model.padded_vocab_size * model.hidden_size * self._problem.costs.gradient_bytes

    def bytes_of(self, first: int, end: int) -> int:
        """Gradient bytes of positions ``[first, end)``; -1 is the embedding."""
        return sum(self.layer_bytes[first + 1 : end + 1])
