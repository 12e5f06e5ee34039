"""Is what the ranks of a plan saw what one process saw?"""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from hetero.plan.ir import Plan, Precision
from hetero.spec.parameters import Parameter, parameters, shard_intervals
from tests.helpers.training import Sums, Trace

LOSS_BOUND: dict[Precision, float] = {"bf16": 4e-3, "fp16": 5e-4}
"""Relative, per step: half precision keeps 8 bits of a number (fp16 11), and the loss averages over 50 tokens."""

GRADIENT_BOUND: dict[Precision, float] = {"bf16": 5e-2, "fp16": 4e-3}
"""2-norm of the difference to one process's gradient over the gradient's norm."""


def assert_same_training(plan: Plan, traces: Sequence[Trace | None], expected: Trace, *, tolerance: float) -> None:
    """Losses, gradient norms, every gradient and every weight after every step, relative to the largest element."""
    by_name = {parameter.name: parameter for parameter in parameters(plan.model)}
    for rank, trace in enumerate(traces):
        if trace is None:
            assert rank in plan.idle_ranks
            continue
        assert trace.losses == pytest.approx(expected.losses, rel=tolerance)
        assert trace.grad_norms == pytest.approx(expected.grad_norms, rel=tolerance)
        for step, (weights, full) in enumerate(zip(trace.weights, expected.weights, strict=True)):
            for name, weight in weights.items():
                where = f"weight {name}, rank {rank}, step {step}"
                assert_close(weight, shard(full[name], by_name[name], trace), where, tolerance=tolerance)
        for step, (sums, all_sums) in enumerate(zip(trace.gradients, expected.gradients, strict=True)):
            full = assembled(all_sums, by_name)
            for name, offsets, box in sums:
                where = f"gradient of {name} from {offsets}, rank {rank}, step {step}"
                there = tuple(slice(start, start + size) for start, size in zip(offsets, box.shape, strict=True))
                assert_close(box, full[name][there], where, tolerance=tolerance, scale=np.abs(full[name]).max())
    for step in range(len(expected.gradients)):
        by_rank = [trace.gradients[step] for trace in traces if trace is not None]
        assert assembled([box for sums in by_rank for box in sums], by_name).keys() == by_name.keys()


def assembled(sums: Sums, by_name: Mapping[str, Parameter]) -> dict[str, np.ndarray]:
    """Whole gradients from their boxes, which leave no element out."""
    full = {name: np.full(by_name[name].shape, np.nan) for name in {name for name, _, _ in sums}}
    for name, offsets, box in sums:
        full[name][tuple(slice(start, start + size) for start, size in zip(offsets, box.shape, strict=True))] = box
    assert not any(np.isnan(gradient).any() for gradient in full.values()), "some element was nobody's"
    return full


def shard(full: np.ndarray, parameter: Parameter, trace: Trace) -> np.ndarray:
    """The part of one process's tensor that a rank of ``trace`` holds."""
    if parameter.shard_dim is None:
        return full
    intervals = shard_intervals(parameter, tp=trace.tp, tp_rank=trace.tp_rank)
    indices = np.concatenate([np.arange(i.global_start, i.global_start + i.length) for i in intervals])
    return np.take(full, indices, axis=parameter.shard_dim)


def assert_close(
    actual: np.ndarray, expected: np.ndarray, what: str, *, tolerance: float, scale: float | None = None
) -> None:
    """``scale`` is by default the largest element of ``expected``."""
    scale = np.abs(expected).max() if scale is None else scale
    error = np.abs(actual - expected).max()
    assert actual.shape == expected.shape, what
    assert error <= tolerance * scale + np.finfo(np.float64).tiny, f"{what}: off by {error:.1e} of {scale:.1e}"
