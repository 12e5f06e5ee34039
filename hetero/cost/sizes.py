"""Elements of a model's layers: how many tensor parallelism cuts, and how many every rank holds whole.

All blocks are alike, so a model is six numbers, however many layers and parameters it has.
"""

from collections import defaultdict
from collections.abc import Iterable

from hetero.spec.model import ModelSpec
from hetero.spec.parameters import EMBEDDING, Parameter, stage_parameters


class LayerSizes:
    """Elements by layer position: -1 is the embedding, the number of layers the head.

    word_embedding: the one cut parameter of the embedding, which a tied head holds again.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._num_layers = model.num_layers
        self._tied = model.tied_embeddings
        first = stage_parameters(model, first_layer=0, end_layer=1)
        last = stage_parameters(model, first_layer=model.num_layers - 1, end_layer=model.num_layers)
        held = [p for p in first if p.position in (-1, 0)] + [p for p in last if p.position == model.num_layers]
        self.word_embedding = sum(p.numel for p in held if p.name == EMBEDDING)
        self._cut = _by_position(p for p in held if p.shard_dim is not None)
        self._whole = _by_position(p for p in held if p.shard_dim is None)

    def cut(self, position: int) -> int:
        """Elements of the layer that tensor parallelism cuts."""
        return self._cut[self._alike(position)]

    def whole(self, position: int) -> int:
        """Elements of the layer that every tensor-parallel rank holds."""
        return self._whole[self._alike(position)]

    def held(self, *, first_layer: int, end_layer: int, tp: int) -> int:
        """Elements of the weights of a stage of layers ``[first_layer, end_layer)`` on one of ``tp`` ranks."""
        total = (end_layer - first_layer) * self._local(0, tp)
        if first_layer == 0:
            total += self._local(-1, tp)
        if end_layer == self._num_layers:
            total += self._local(self._num_layers, tp)
            if self._tied and first_layer > 0:
                total += self.word_embedding // tp
        return total

    def _local(self, position: int, tp: int) -> int:
        return self.cut(position) // tp + self.whole(position)

    def _alike(self, position: int) -> int:
        return position if position in (-1, self._num_layers) else 0


def _by_position(held: Iterable[Parameter]) -> dict[int, int]:
    sizes: defaultdict[int, int] = defaultdict(int)
    for parameter in held:
        sizes[parameter.position] += parameter.numel
    return sizes
