"""Seconds per gradient byte of the rings in which nodes sum their gradients.

A layer's gradient is summed over all that hold the layer. Its ring goes at the pace of its slowest link, so what
counts is which kinds of node hold the layer. With the links sorted into levels, from the fastest to the slowest,

    seconds of layer l on a node of kind k = bytes_l x max( inside_k, level of the slowest link between l's holders )

and a node's sums follow one another on its network interfaces. The numbers come from :mod:`hetero.cost.network`.
"""

import itertools
import math
from functools import cached_property

from hetero.cost.network import ring_all_reduce_cost
from hetero.errors import ConfigError
from hetero.planner.problem import Problem
from hetero.spec.parameters import EMBEDDING, parameters

SAME_LEVEL = 1e-6
"""Relative difference below which two links are one level."""


class Rings:
    """The levels of a problem's cluster, and the gradient bytes of its model's layers."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._bytes = problem.costs.runtime.bucket_numel * problem.costs.gradient_bytes

    @cached_property
    def inside_s_per_byte(self) -> tuple[float, ...]:
        """Of each kind: a ring over all devices of a node; 0 if it has one device."""
        return tuple(self._pace(list(kind.ranks_of_node(0))) for kind in self._problem.kinds)

    @cached_property
    def _between(self) -> dict[tuple[int, int], float]:
        """Seconds per byte of a ring over two nodes' devices, by kinds; infinite where there is no such link."""
        paces = {}
        for a, b in itertools.combinations_with_replacement(self._problem.kinds, 2):
            if a.index != b.index or a.count > 1:
                ranks = [*a.ranks_of_node(0), *b.ranks_of_node(int(a.index == b.index))]
                # A ring of two has half the traffic per device of a long one: count as if it were long.
                n = len(ranks)
                longer = max(n, min(self._problem.cluster.num_devices, 16))
                paces[a.index, b.index] = self._pace(ranks) * (1 - 1 / longer) / (1 - 1 / n)
        return paces

    def _pace(self, ranks: list[int]) -> float:
        if len(ranks) < 2:
            return 0.0
        try:
            cost = ring_all_reduce_cost(
                self._bytes,
                ranks,
                self._problem.topology,
                host_gb_per_s=self._problem.costs.runtime.sync_host_gb_per_s,
            )
        except ConfigError:
            return float("inf")
        return cost.seconds / self._bytes

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """Different paces between nodes, ascending in seconds per byte."""
        found: list[float] = []
        for pace in sorted(self._between.values()):
            if not found or pace > found[-1] * (1 + SAME_LEVEL):
                found.append(pace)
        return tuple(found)

    def level_between(self, a: int, b: int) -> int | None:
        """The level of the link between nodes of kinds ``a`` and ``b``; ``None`` if there are no two such nodes."""
        pace = self._between.get((min(a, b), max(a, b)))
        if pace is None:
            return None
        return max(i for i, level in enumerate(self.levels) if level <= pace)

    def fastest_s_per_byte(self, kind: int) -> float:
        """The fastest ring that leaves a node of ``kind``."""
        return min((pace for kinds, pace in self._between.items() if kind in kinds), default=0.0)

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
