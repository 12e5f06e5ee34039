"""Counts the kernels that the host launches for one pass of a layer, and the seconds that this takes.

A small layer takes as long as its host needs to launch its kernels, whatever they compute. The numbers are those of
megatron-core's local layers as this runtime builds them for CUDA: fused activation, bias and dropout, torch's
attention, norms in one kernel. ``python -m tests.helpers.launch_count`` counts them, and a test compares. Views launch
nothing.

Gated layers are counted as Llama has them, with rotated heads and RMSNorm, the others as GPT-2, with LayerNorm and
biases: a shape says nothing of positions and norms. TransformerEngine's layers have other launches, which have not been
counted, and are priced with the same numbers.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from hetero.cost.layers.layer_kernels import ComputePass, LayerConfig
from hetero.spec.profile import ModuleKind

LAUNCH_S = 3.8e-5
"""Seconds of the host per launch. On one H200 (2026-11-27, 16 processors of a virtual machine) a step of 12 Llama-like
layers of hidden 1024 in bf16 with 4 microbatches took 0.1496 s: less head, embedding and update as priced, 2.76 ms for
the 72 launches of the two passes of a layer. A heuristic for other hosts."""


class Launches(NamedTuple):
    """Numbers of kernels of the two passes."""

    forward: int
    backward: int


GATED: Mapping[ModuleKind, Launches] = {
    "embedding": Launches(2, 1),
    "attention": Launches(30, 24),
    "mlp": Launches(5, 9),
    "head": Launches(25, 14),
}
"""In half precision, where the products add weights' gradients to their sums."""

NOT_GATED: Mapping[ModuleKind, Launches] = {
    "embedding": Launches(4, 3),
    "attention": Launches(6, 14),
    "mlp": Launches(5, 13),
    "head": Launches(25, 14),
}

ROUTING, PER_EXPERT = Launches(25, 21), Launches(3, 5)
"""Of an MLP of experts: the router, the way to the experts and back, norm and residual sum; and of each expert."""

NUM_WEIGHTS: Mapping[ModuleKind, int] = {"embedding": 1, "attention": 2, "mlp": 2, "head": 1}
"""Weights whose gradients a pass of its own adds, where no product does; of an MLP, of each expert."""


def num_launches(layer: LayerConfig, compute_pass: ComputePass) -> int:
    """Return how many kernels the host launches for one pass of ``layer``."""
    if layer.kind == "block":
        return sum(_of_module(layer, part, compute_pass) for part in ("attention", "mlp"))
    return _of_module(layer, layer.kind, compute_pass)


def counted_launches_s(layer: LayerConfig, compute_pass: ComputePass) -> float:
    """Return the host's seconds for one pass of ``layer``, by counting."""
    return LAUNCH_S * num_launches(layer, compute_pass)


def over_dense(layer: LayerConfig, compute_pass: ComputePass) -> float:
    """Return the launches of one pass of ``layer`` over those of the same layer with one MLP in place of experts."""
    dense = dataclasses.replace(layer, shape=dataclasses.replace(layer.shape, num_experts=None))
    return num_launches(layer, compute_pass) / num_launches(dense, compute_pass)


def _of_module(layer: LayerConfig, kind: ModuleKind, compute_pass: ComputePass) -> int:
    experts = (layer.shape.num_experts or 0) if kind == "mlp" else 0
    if experts:
        launches = Launches(*(base + experts * each for base, each in zip(ROUTING, PER_EXPERT, strict=True)))
    else:
        launches = (GATED if layer.shape.gated else NOT_GATED)[kind]
    if compute_pass == "forward":
        return launches.forward
    return launches.backward + NUM_WEIGHTS[kind] * (experts or 1) * layer.adds_sums
