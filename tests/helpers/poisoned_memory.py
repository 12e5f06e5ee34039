"""Builds trainers without initial weights on memory full of NaN, so that what is not loaded shows."""

from collections.abc import Callable

import torch

from hetero.runtime.trainer import Trainer


def built(build: Callable[[], Trainer], *, draws_weights: bool) -> Trainer:
    """Build a trainer; where it draws no weights, all memory that torch allocates for it holds NaN."""
    # Deterministic algorithms fill new tensors (torch.utils.deterministic.fill_uninitialized_memory).
    torch.use_deterministic_algorithms(not draws_weights)
    try:
        trainer = build()
    finally:
        torch.use_deterministic_algorithms(False)
    readable = [tensor for _, tensor in trainer.parameters.values() if _has_memory(tensor)]
    if not draws_weights and readable:
        assert any(tensor.isnan().any() for tensor in readable), "the memory was not poisoned"
    return trainer


def assert_filled(trainer: Trainer) -> None:
    """Check that every parameter and buffer of a rank, and all that its optimizer keeps, are numbers."""
    tensors = {name: tensor for module in trainer._modules for name, tensor in module.named_parameters()}
    tensors |= {name: tensor for module in trainer._modules for name, tensor in module.named_buffers()}
    tensors |= {f"{each.name} {each.offsets}": each.tensor for each in trainer.optimizer.state(owner=None)}
    tensors = {name: tensor for name, tensor in tensors.items() if _has_memory(tensor)}
    tensors |= trainer.weights()
    wrong = [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.isnan().any()]
    assert not wrong, f"not filled: {wrong}"


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it may be read: weights that live on the host have no memory on the device between steps."""
    return tensor.untyped_storage().nbytes() > 0
