"""Numbers of parameters of a model's layers: those that tensor parallelism shards, and those that it replicates.

All blocks are alike, so a model is a few numbers, however many layers and parameters it has.
"""

from collections import defaultdict
from itertools import accumulate
from typing import Literal

from hetero.cost.layers.stage_modules import module_counts
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import EMBEDDING, HALF, stage_parameters
from hetero.spec.profile import ModuleKind

TpSharding = Literal["sharded", "replicated", "all"]
"""Parameters of which every tensor-parallel rank holds a shard, those that every one holds whole, or both."""


class ParameterCounts:
    """Elements of the weights of each kind of module.

    word_embedding: the one sharded parameter of the embedding, which a tied head holds again.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._num_layers = model.num_layers
        self._tied = model.tied_embeddings
        at: dict[float, tuple[ModuleKind, ...]] = {
            -1: ("embedding",),
            0: ("attention", "block"),
            HALF: ("mlp", "block"),
            model.num_layers: ("head",),
        }
        first = stage_parameters(model, first_layer=0, end_layer=1)
        last = stage_parameters(model, first_layer=model.num_layers, end_layer=model.num_layers)
        ends = [p for p in first if p.position < 1] + [p for p in last if p.position == model.num_layers]
        self.word_embedding = sum(p.numel for p in ends if p.name == EMBEDDING)
        self._sharded: defaultdict[ModuleKind, int] = defaultdict(int)
        self._replicated: defaultdict[ModuleKind, int] = defaultdict(int)
        self._in_order: defaultdict[ModuleKind, list[tuple[int, bool]]] = defaultdict(list)
        for parameter in ends:
            numel, is_sharded = parameter.numel, parameter.shard_dim is not None
            for kind in at[parameter.position]:
                (self._sharded if is_sharded else self._replicated)[kind] += numel
                self._in_order[kind].append((numel, is_sharded))

    def running_sums(self) -> dict[TpSharding, dict[ModuleKind, tuple[int, ...]]]:
        """Running sums of the elements of each module's parameters, in their order; empty where it has none such."""
        found: dict[TpSharding, dict[ModuleKind, tuple[int, ...]]] = {"sharded": {}, "replicated": {}, "all": {}}
        for kind, elements in self._in_order.items():
            found["sharded"][kind] = tuple(accumulate(numel for numel, is_sharded in elements if is_sharded))
            found["replicated"][kind] = tuple(accumulate(numel for numel, is_sharded in elements if not is_sharded))
            found["all"][kind] = tuple(accumulate(numel for numel, _ in elements))
        return found

    def sharded(self, kind: ModuleKind) -> int:
        """Elements of the module that tensor parallelism shards."""
        return self._sharded[kind]

    def replicated(self, kind: ModuleKind) -> int:
        """Elements of the module that every tensor-parallel rank holds."""
        return self._replicated[kind]

    def per_rank(self, kind: ModuleKind, tp: int) -> int:
        """Elements of the module's weights on one of ``tp`` ranks; a head's without a tied embedding."""
        return self.sharded(kind) // tp + self.replicated(kind)

    def largest(self, kind: ModuleKind, tp: int) -> int:
        """Elements of the largest weight of the module on one of ``tp`` ranks."""
        return max((numel // (tp if is_sharded else 1) for numel, is_sharded in self._in_order[kind]), default=0)

    def of_layers(self, *, first_layer: float, end_layer: float, tp: int) -> int:
        """Elements of the weights of a stage of layers ``[first_layer, end_layer)`` on one of ``tp`` ranks."""
        counts = module_counts(first_layer, end_layer, num_layers=self._num_layers)
        total = sum(count * self.per_rank(kind, tp) for kind, count in counts.items())
        if self._tied and "head" in counts and first_layer > 0:
            total += self.word_embedding // tp
        return total
