"""Is what the ranks of a plan saw what one process saw?"""

from collections.abc import Sequence

import numpy as np
import pytest

from hetero.plan.ir import Plan
from hetero.spec.parameters import Parameter, parameters, shard_intervals
from tests.helpers.training import Trace


def assert_same_training(plan: Plan, traces: Sequence[Trace | None], expected: Trace, *, tolerance: float) -> None:
    """Losses, gradient norms, every gradient and every weight after every step, relative to the largest element."""
    by_name = {parameter.name: parameter for parameter in parameters(plan.model)}
    for rank, trace in enumerate(traces):
        if trace is None:
            assert rank in plan.idle_ranks
            continue
        assert trace.losses == pytest.approx(expected.losses, rel=tolerance)
        assert trace.grad_norms == pytest.approx(expected.grad_norms, rel=tolerance)
        for what in ("gradients", "weights"):
            for step, (actual, full) in enumerate(zip(getattr(trace, what), getattr(expected, what), strict=True)):
                for name, tensor in actual.items():
                    where = f"{what} of {name}, rank {rank}, step {step}"
                    assert_close(tensor, shard(full[name], by_name[name], trace), where, tolerance=tolerance)


def shard(full: np.ndarray, parameter: Parameter, trace: Trace) -> np.ndarray:
    """The part of one process's tensor that a rank of ``trace`` holds."""
    if parameter.shard_dim is None:
        return full
    intervals = shard_intervals(parameter, tp=trace.tp, tp_rank=trace.tp_rank)
    indices = np.concatenate([np.arange(i.global_start, i.global_start + i.length) for i in intervals])
    return np.take(full, indices, axis=parameter.shard_dim)


def assert_close(actual: np.ndarray, expected: np.ndarray, what: str, *, tolerance: float) -> None:
    scale = np.abs(expected).max()
    error = np.abs(actual - expected).max()
    assert actual.shape == expected.shape, what
    assert error <= tolerance * scale + np.finfo(np.float64).tiny, f"{what}: off by {error:.1e} of {scale:.1e}"
