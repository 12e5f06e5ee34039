"""Elements of a model's layers: how many tensor parallelism cuts, and how many every rank holds whole.

All blocks are alike, so a model is a few numbers, however many layers and parameters it has.
"""

from collections import defaultdict
from itertools import accumulate
from typing import Literal

from hetero.cost.layers.stage_modules import Part, parts_of
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import EMBEDDING, HALF, stage_parameters

Which = Literal["cut", "whole", "all"]
"""Parameters that tensor parallelism cuts, that every rank holds whole, or both."""


class LayerSizes:
    """Elements by part.

    word_embedding: the one cut parameter of the embedding, which a tied head holds again.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._num_layers = model.num_layers
        self._tied = model.tied_embeddings
        at: dict[float, tuple[Part, ...]] = {
            -1: ("embedding",),
            0: ("attention", "block"),
            HALF: ("mlp", "block"),
            model.num_layers: ("head",),
        }
        first = stage_parameters(model, first_layer=0, end_layer=1)
        last = stage_parameters(model, first_layer=model.num_layers, end_layer=model.num_layers)
        ends = [p for p in first if p.position < 1] + [p for p in last if p.position == model.num_layers]
        self.word_embedding = sum(p.numel for p in ends if p.name == EMBEDDING)
        self._cut: defaultdict[Part, int] = defaultdict(int)
        self._whole: defaultdict[Part, int] = defaultdict(int)
        self._in_order: defaultdict[Part, list[tuple[int, bool]]] = defaultdict(list)
        for parameter in ends:
            numel, is_cut = parameter.numel, parameter.shard_dim is not None
            for part in at[parameter.position]:
                (self._cut if is_cut else self._whole)[part] += numel
                self._in_order[part].append((numel, is_cut))

    def running_sums(self) -> dict[Which, dict[Part, tuple[int, ...]]]:
        """Of the elements of each part's parameters, in their order; nothing where the part has none such."""
        found: dict[Which, dict[Part, tuple[int, ...]]] = {"cut": {}, "whole": {}, "all": {}}
        for part, elements in self._in_order.items():
            found["cut"][part] = tuple(accumulate(numel for numel, is_cut in elements if is_cut))
            found["whole"][part] = tuple(accumulate(numel for numel, is_cut in elements if not is_cut))
            found["all"][part] = tuple(accumulate(numel for numel, _ in elements))
        return found

    def cut(self, part: Part) -> int:
        """Elements of the part that tensor parallelism cuts."""
        return self._cut[part]

    def whole(self, part: Part) -> int:
        """Elements of the part that every tensor-parallel rank holds."""
        return self._whole[part]

    def local(self, part: Part, tp: int) -> int:
        """Elements of the part's weights on one of ``tp`` ranks; a head's without a tied embedding."""
        return self.cut(part) // tp + self.whole(part)

    def held(self, *, first_layer: float, end_layer: float, tp: int) -> int:
        """Elements of the weights of a stage of layers ``[first_layer, end_layer)`` on one of ``tp`` ranks."""
        parts = parts_of(first_layer, end_layer, num_layers=self._num_layers)
        total = sum(count * self.local(part, tp) for part, count in parts.items())
        if self._tied and "head" in parts and first_layer > 0:
            total += self.word_embedding // tp
        return total
