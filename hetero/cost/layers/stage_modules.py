"""The modules of a stage as costs count them: blocks, halves of blocks at its ends, the embedding and the head.

A stage that ends between the attention and the MLP of a layer has half a block there, which is priced as its share of
the block.
"""

import math
from collections import Counter
from collections.abc import Mapping

from hetero.spec.profile import ModuleKind


def modules_of(first_layer: float, end_layer: float) -> list[ModuleKind]:
    """The transformer layers of ``[first_layer, end_layer)`` in the order of the forward, halves at the ends."""
    first_block, end_block = math.ceil(first_layer), math.floor(end_layer)
    modules: list[ModuleKind] = ["mlp"] if first_layer < first_block else []
    modules += ["block"] * (end_block - first_block)
    modules += ["attention"] if end_block < end_layer else []
    return modules


def module_counts(first_layer: float, end_layer: float, *, num_layers: int) -> Mapping[ModuleKind, int]:
    """How many modules of each kind ``[first_layer, end_layer)`` of ``num_layers`` has, embedding and head too."""
    counts = Counter(modules_of(first_layer, end_layer))
    if first_layer == 0:
        counts["embedding"] = 1
    if end_layer == num_layers:
        counts["head"] = 1
    return counts
