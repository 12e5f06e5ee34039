"""Says which block of a stage each of its weights belongs to, and when a forward begins a block.

A block is the embedding, a layer or the half of one that the stage holds, or the head
(:func:`hetero.plan.offload.block_positions`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch

from hetero.plan.ir import Stage
from hetero.plan.offload import block_positions, place_of
from hetero.runtime.buckets import LocalBucket

Begins = Callable[[float], None]
"""Told the position of a block at which a forward has arrived."""


def layers_of(stage: Stage, module: torch.nn.Module) -> Iterator[tuple[float, torch.nn.Module]]:
    """The layers of a stage's module, each with the position of its block."""
    decoder = module.decoder
    assert isinstance(decoder, torch.nn.Module)
    layers = decoder.layers
    assert isinstance(layers, torch.nn.ModuleList)
    for number, layer in zip(stage.layer_numbers, layers, strict=True):
        yield max(float(number), stage.start), layer


def tell_beginnings(stage: Stage, module: torch.nn.Module, begins: Begins, *, is_last: bool) -> None:
    """Let every block but the embedding, with which a forward begins, tell ``begins`` that a forward has come to it.

    Also an evaluation, a warm-up, or a layer that is computed again in a backward.

    Args:
        is_last: the stage has the head.
    """

    def hook(position: float, module: torch.nn.Module, args: object) -> None:
        begins(position)

    for position, layer in layers_of(stage, module):
        layer.register_forward_pre_hook(partial(hook, position))
    if is_last:
        decoder = module.decoder
        assert isinstance(decoder, torch.nn.Module)
        head = decoder.final_layernorm
        assert isinstance(head, torch.nn.Module)
        head.register_forward_pre_hook(partial(hook, stage.end))


def blocks_of(
    buckets: Iterable[LocalBucket], stages: Mapping[int, Stage], *, num_layers: int
) -> Iterator[tuple[torch.nn.Parameter, tuple[int, float]]]:
    """Of every parameter in ``buckets``, the stage and the position of the block that it is a part of.

    Args:
        stages: by index, those of the rank.
    """
    numbers, held = list(stages), list(stages.values())
    for local in buckets:
        for segment, of_bucket in zip(local.segments, local.bucket.segments, strict=True):
            index, here = place_of(of_bucket.parameter.position, held)
            positions = block_positions(held[index], num_layers=num_layers)
            yield segment.tensor, (numbers[index], max(p for p in positions if p <= here))
