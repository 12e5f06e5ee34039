"""What is exact about a training step from one checkpoint to the next, in every precision and under every plan."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.checkpoint.folder import find_checkpoint, read_state
from hetero.checkpoint.reader import SavedTensors
from hetero.checkpoint.state import CheckpointState
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.sharded_state import TensorSlice
from hetero.spec.parameters import Parameter, parameters

ROUNDING = 2.0**-18
"""Of float32 arithmetic, relative to the largest element of a tensor: a few operations, each off by 2 ** -24, and the
gradient is known from a first moment that it is a tenth of."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint: whole tensors by kind and canonical name, in the types that they were saved in, and its scalars."""

    state: CheckpointState
    tensors: dict[str, torch.Tensor]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters(self.state.model)

    def main(self, name: str) -> torch.Tensor:
        """What the optimizer updates: the master copy, or where there is none the weights."""
        return self.tensors.get(f"master/{name}", self.tensors[f"weights/{name}"])


def read_saved(folder: Path, step: int) -> Saved:
    """The checkpoint of ``step`` in ``folder``."""
    path = find_checkpoint(folder, step)
    state, saved = read_state(path), SavedTensors(path)
    kinds = ["weights", "exp_avg", "exp_avg_sq", *(["master"] if state.precision in ("bf16", "fp16") else [])]
    slices = [
        TensorSlice(
            name=(name := f"{kind}/{parameter.name}"),
            shape=parameter.shape,
            offsets=(0,) * len(parameter.shape),
            # In another type, weights would be taken from their master copy.
            tensor=torch.full(parameter.shape, torch.nan, dtype=saved.dtype(name)),
        )
        for kind in kinds
        for parameter in parameters(state.model)
    ]
    saved.fill(slices)
    return Saved(state, {each.name: each.tensor for each in slices})


def assert_same_state(ours: Saved, theirs: Saved) -> None:
    """Bit for bit, and every scalar but the plan that wrote it."""
    for field in dataclasses.fields(CheckpointState):
        mine, other = getattr(ours.state, field.name), getattr(theirs.state, field.name)
        assert field.name == "plan" or mine == other, f"{field.name} is {mine}, {other} was saved"
    assert_same_tensors(ours, theirs)


def assert_same_tensors(ours: Saved, theirs: Saved) -> None:
    """Bit for bit."""
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        other = theirs.tensors[name]
        assert tensor.dtype == other.dtype, name
        assert torch.equal(tensor, other), f"{name} is not what was saved"


def assert_weights_are_rounded_masters(saved: Saved) -> None:
    """Bit for bit."""
    for parameter in saved.parameters:
        weights = saved.tensors[f"weights/{parameter.name}"]
        rounded = saved.main(parameter.name).to(weights.dtype)
        assert torch.equal(weights, rounded), f"weights/{parameter.name} is not its master copy, rounded"


def assert_adamw_step(before: Saved, after: Saved, adam: AdamOptions, *, lr: float, num_updates: int) -> None:
    """``after`` is what AdamW (arXiv 1711.05101) makes of ``before`` and some gradient, its ``num_updates``-th update.

    The gradient is what the first moment moved by; the second moment and the weights have to follow from it, to the
    rounding of float32.
    """
    assert after.state.adam_step == num_updates
    beta1, beta2 = adam.betas
    for parameter in after.parameters:
        name = parameter.name
        mean, square = after.tensors[f"exp_avg/{name}"].double(), after.tensors[f"exp_avg_sq/{name}"].double()
        gradient = gradient_of_step(before, after, name, beta1=beta1)
        followed = beta2 * before.tensors[f"exp_avg_sq/{name}"].double() + (1 - beta2) * gradient.square()
        _assert_close(square, followed, f"exp_avg_sq/{name}")
        decay = adam.weight_decay if parameter.decays else 0.0
        direction = (mean / (1 - beta1**num_updates)) / ((square / (1 - beta2**num_updates)).sqrt() + adam.eps)
        followed = before.main(name).double() * (1 - lr * decay) - lr * direction
        _assert_close(after.main(name).double(), followed, f"main weight {name}")


def gradient_of_step(before: Saved, after: Saved, name: str, *, beta1: float) -> torch.Tensor:
    """The clipped gradient that moved the first moment, in float64."""
    kind = f"exp_avg/{name}"
    return (after.tensors[kind].double() - beta1 * before.tensors[kind].double()) / (1 - beta1)


def gradient_distance(before: Saved, ours: Saved, theirs: Saved, *, beta1: float) -> float:
    """How far the gradients of two steps from one state are apart: 2-norm of the difference over that of ``theirs``."""
    squared_difference = squared_norm = 0.0
    for parameter in before.parameters:
        mine = gradient_of_step(before, ours, parameter.name, beta1=beta1)
        other = gradient_of_step(before, theirs, parameter.name, beta1=beta1)
        squared_difference += float((mine - other).square().sum())
        squared_norm += float(other.square().sum())
    return math.sqrt(squared_difference / squared_norm)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error, largest = float((actual - expected).abs().max()), float(expected.abs().max())
    assert error <= ROUNDING * largest, f"{what} is not AdamW's: off by {error:.1e} of {largest:.1e}"
