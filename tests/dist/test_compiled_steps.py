"""Where there is CUDA, the warm-up compiles all that steps call, and a step compiles nothing: played on the CPU.

The runtime believes that it is on CUDA, megatron-core's fused functions are compiled, and backwards run in a thread of
their own. A step or an evaluation that compiles fails, whatever the number of tokens that experts get. The training is
one process's that compiles nothing, in float64 to 1e-9.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from hetero.plan.ir import Plan, Precision, Recompute, Replica
from hetero.runtime.options import StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from tests.helpers.comparison import LOSS_BOUND, assert_same_training
from tests.helpers.host_training import activations_to_hosts, gradients_to_hosts, left_to_hosts, weights_to_hosts
from tests.helpers.layouts import STYLES
from tests.helpers.plans import plan, replica, stage
from tests.helpers.played_cuda import backwards_in_another_thread, compiled_functions, playing_cuda
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, microbatches, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

NUM_STEPS = 3
TOLERANCE = 1e-9
LOSS_TOLERANCE: dict[Precision, float] = {"fp32": 1e-5, "bf16": LOSS_BOUND["bf16"]}
"""Relative, where rounding hides more."""

WAYS: dict[str, tuple[Recompute, int | None]] = {
    "whole": ("none", None),
    "selective": ("selective", None),
    "full": ("full", None),
    "delayed": ("none", 1),
}
"""Recomputation, and by how many microbatches weight gradients are delayed."""


def train_where_steps_may_not_compile(rank: int, made: Plan, options: StageOptions | None = None) -> Trace | None:
    """A warm-up, an evaluation and some steps, as on CUDA."""
    threads: set[int] = set()

    def prepare(trainer: Trainer, rank: int) -> None:
        for _, tensor in trainer.parameters.values():
            tensor.register_hook(lambda gradient: threads.add(threading.get_ident()))
        torch.compiler.set_stance("fail_on_recompile")
        trainer.evaluate(microbatches(made, rank, step=0) if reads_data(trainer._context) else None)

    with playing_cuda(), compiled_functions(), backwards_in_another_thread():
        try:
            trace = train(rank, made, NUM_STEPS, SMALL_BUCKETS, options, prepare=prepare)
        finally:
            torch.compiler.set_stance("default")
    assert len(threads) == 1, "all backwards run in one thread"
    assert threads != {threading.get_ident()}, "and it is not that of the forwards"
    return trace


def train_with_fused_functions(rank: int, made: Plan, options: StageOptions | None = None) -> Trace | None:
    """The same training by the same functions, which are not compiled."""
    with playing_cuda():
        return train(rank, made, NUM_STEPS, SMALL_BUCKETS, options)


def on_one_rank(style: str, precision: Precision, way: str = "whole") -> Plan:
    recompute, delay = WAYS[way]
    stages = (stage(layers=(0, 3), ranks=(0,), mbs=2, recompute=recompute, delay=delay),)
    return three_layers(style, precision, replica(*stages, num_samples=8))


def three_layers(style: str, precision: Precision, *replicas: Replica) -> Plan:
    model = dataclasses.replace(STYLES[style](), num_layers=3)
    return dataclasses.replace(plan(model, list(replicas)), precision=precision)


def assert_trains_without_compiling(made: Plan, *, micro_batch_size: int = 1) -> None:
    traces = run_ranks(train_where_steps_may_not_compile, made.world_size, made, timeout_s=120)
    alone = one_process_plan(made, micro_batch_size=micro_batch_size)
    expected = run_alone(train_with_fused_functions, alone)
    if made.precision == "fp64":
        assert_same_training(made, traces, expected, tolerance=TOLERANCE)
    else:
        for trace in traces:
            assert trace.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE[made.precision])


def _cases() -> Iterator[Any]:
    """Each style and way in one precision; experts in each second run of the tests, dense models in each sixth."""
    precisions: tuple[Precision, ...] = ("fp64", "fp32", "bf16")
    for (i, style), (j, way) in itertools.product(enumerate(("gpt2-tied", "llama-gqa", "moe")), enumerate(WAYS)):
        every = 2 if style == "moe" else 6
        mark = pytest.mark.rotates(f"compiled steps of {style}, {way}", every=every, turn=(3 * i + j) % every)
        for precision in precisions:
            yield pytest.param(style, precision, way, id=f"{style}-{precision}-{way}", marks=mark)


@pytest.mark.parametrize(("style", "precision", "way"), list(_cases()))
def test_no_step_compiles(style: str, precision: Precision, way: str) -> None:
    assert_trains_without_compiling(on_one_rank(style, precision, way), micro_batch_size=2)


@pytest.mark.parametrize(
    ("style", "way"),
    [
        pytest.param(style, way, marks=pytest.mark.rotates(f"compiled steps of ranks, {style}", every=2))
        for style, way in itertools.product(("llama-qk-norm", "moe"), ("full", "delayed"))
    ],
)
def test_no_step_of_several_ranks_compiles(style: str, way: str) -> None:
    """Tensor and sequence parallelism, a cut between attention and MLP, and slices that cross it."""
    recompute, delay = WAYS[way]
    first = stage(layers=(0, 1.5), ranks=(0, 1), tp=2, sp=True, mbs=2, recompute=recompute, delay=delay)
    second = stage(layers=(1.5, 3), ranks=(2,), recompute=recompute, delay=delay)
    assert_trains_without_compiling(three_layers(style, "fp64", replica(first, second, num_samples=8)))


RESIDENCIES: dict[str, Callable[[Plan], Plan]] = {
    "optimizer": partial(left_to_hosts, speculate=True),
    "gradients": partial(gradients_to_hosts, speculate=True),
    "weights": partial(weights_to_hosts, turn=0, speculate=True),
    "activations": activations_to_hosts,
    "everything": lambda made: activations_to_hosts(weights_to_hosts(made, turn=0, speculate=True)),
}


@pytest.mark.rotates(every=2)
@pytest.mark.parametrize("left", list(RESIDENCIES))
def test_no_step_with_a_host_compiles(left: str) -> None:
    """Through the copies that CUDA has, whose streams and pinned memory are played."""
    assert_trains_without_compiling(RESIDENCIES[left](on_one_rank("moe", "fp64")), micro_batch_size=2)


@pytest.mark.rotates(every=6)
@pytest.mark.parametrize("style", ["gpt2-tied", "moe"])
def test_no_step_with_dropout_compiles(style: str) -> None:
    options = StageOptions(init_method_std=0.1, hidden_dropout=0.1, attention_dropout=0.1)
    (trace,) = run_ranks(train_where_steps_may_not_compile, 1, on_one_rank(style, "bf16", "full"), options)
    assert torch.tensor(trace.losses).isfinite().all()
