"""Every kernel runs once before the first receive is posted, and the training is bit for bit the one without that."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan, Precision
from hetero.runtime import trainer as trainer_module
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.stage import StageModel
from hetero.runtime.trainer import Trainer, reads_data
from tests.dist.test_forward_again import NAME, the_last_forward_twice, under
from tests.dist.test_layouts import DELAYS, LAYOUTS, layout
from tests.helpers import training
from tests.helpers.layouts import STYLES, with_delays
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan as plan_of
from tests.helpers.plans import replica, sharded, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ADAM, SMALL_BUCKETS, Trace, microbatches, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

DROPOUT = StageOptions(
    init_method_std=0.1,
    attention_dropout=0.2,
    hidden_dropout=0.2,
    moe_router_load_balancing="aux_loss",
    moe_aux_loss_coeff=0.1,
)
SCALE = LossScaleOptions(constant=2.0**7)
"""In fp16, where one that adapts would skip the first steps."""

GATHERS = DataParallelOptions(bucket_numel=3000, overlap_param_gather=True)


def trained_twice(rank: int, made: Plan, data_parallel: DataParallelOptions) -> tuple[Trace | None, Trace | None]:
    """The same two steps with and without a warm-up."""
    with mock.patch.dict("hetero.schedule.orders.ORDERS", {NAME: the_last_forward_twice}):
        traces = []
        for warms_up in (True, False):
            with mock.patch.object(training, "Trainer", functools.partial(Trainer, warms_up=warms_up)):
                traces.append(train(rank, made, 2, data_parallel, DROPOUT, loss_scale=SCALE, weights_at="the end"))
        return traces[0], traces[1]


def _cases() -> list[Any]:
    """Of each style a layout with several ranks; half precision, split backwards, gathers, forwards that run again."""
    rows = {style: pytest.mark.rotates(style, every=6, turn=i) for i, style in enumerate(STYLES)}
    cases = [
        pytest.param(plan, SMALL_BUCKETS, id=f"{name}-{style}", marks=[pytest.mark.slow, rows[style]])
        for name, style, plan in LAYOUTS
        if plan.world_size > 1
    ]
    everything = layout("everything", "gpt2-tied")
    forwards_again = plan_of(
        gpt2_model(),
        [replica(stage(layers=(0, 3), ranks=(0,), delay=1), stage(layers=(3, 6), ranks=(1, 2), tp=2, sp=True))],
    )
    for precision in ("bf16", "fp16"):
        made = dataclasses.replace(everything, precision=precision)
        marks = [pytest.mark.slow, pytest.mark.rotates("half precision", every=2, turn=0)]
        cases.append(pytest.param(made, SMALL_BUCKETS, id=precision, marks=marks))
    ways = pytest.mark.rotates("ways of everything", every=2, turn=1)
    split = with_delays(layout("everything", "llama-tied"), DELAYS["as-zb-h1"])
    cases.append(pytest.param(split, SMALL_BUCKETS, id="split", marks=[pytest.mark.slow, ways]))
    cases.append(pytest.param(sharded(everything), GATHERS, id="sharded", marks=[pytest.mark.slow, ways]))
    cases.append(pytest.param(under(NAME, forwards_again), SMALL_BUCKETS, id="forwards again"))
    return cases


@pytest.mark.parametrize(("made", "data_parallel"), list(_cases()))
def test_a_warm_up_changes_no_bit(made: Plan, data_parallel: DataParallelOptions) -> None:
    """With dropout, whose random numbers go on where they would have, and with an auxiliary loss."""
    for warm, cold in run_ranks(trained_twice, made.world_size, made, data_parallel):
        assert (warm is None) == (cold is None)
        if warm is not None and cold is not None:
            assert warm.losses == cold.losses
            assert warm.grad_norms == cold.grad_norms
            assert warm.weights[-1].keys() == cold.weights[-1].keys()
            for name, weight in warm.weights[-1].items():
                np.testing.assert_array_equal(weight, cold.weights[-1][name])


def test_all_styles_have_a_layout_for_that() -> None:
    assert {style for _, style, plan in LAYOUTS if plan.world_size > 1} == set(STYLES)


def events_of_a_start(rank: int, made: Plan, warms_up: bool | None, on_cuda: bool = False) -> list[str]:
    """What a rank does from the building of its stages to the end of its first step, evaluation included."""
    events: list[str] = []
    forward, run, start = StageModel.forward, torch.autograd.Variable._execution_engine.run_backward, dist.irecv

    def forwards(model: StageModel, *arguments: Any) -> torch.Tensor:
        graph = "with" if torch.is_grad_enabled() else "without"
        events.append(f"forward {graph} a graph in {'training' if model.module.training else 'evaluation'}")
        return forward(model, *arguments)

    def posts(operations: list[dist.P2POp]) -> Any:
        events.extend("receive" for operation in operations if operation.op is start)
        return batch(operations)

    def backwards(*arguments: Any, **options: Any) -> Any:
        events.append("backward")
        return run(*arguments, **options)

    batch = dist.batch_isend_irecv
    # It connects, by receives for which every rank is ready.
    context = create_groups(made, device=torch.device("cpu"))
    engine = mock.Mock(run_backward=backwards)
    with (
        mock.patch.object(StageModel, "forward", forwards),
        mock.patch.object(dist, "batch_isend_irecv", posts),
        mock.patch.object(trainer_module, "runs_cuda", return_value=on_cuda),
        mock.patch("megatron.core.pipeline_parallel.schedules.Variable._execution_engine", engine),
    ):
        trainer = Trainer(
            context,
            options=StageOptions(),
            adam=ADAM,
            seed=7,
            data_parallel=SMALL_BUCKETS,
            warms_up=warms_up,
        )
        data = microbatches(made, rank, step=0) if reads_data(context) else None
        trainer.step(data)
        trainer.evaluate(data)
    return events


KINDS = [
    "forward without a graph in evaluation",
    "forward with a graph in training",
    "backward",
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_receive_is_posted_before_all_kinds_of_computes_have_run(precision: Precision) -> None:
    stages = [stage(layers=(2 * s, 2 * s + 2), ranks=(s,), delay=1 if s == 1 else None) for s in range(3)]
    made = dataclasses.replace(plan_of(gpt2_model(), [replica(*stages, num_samples=4)]), precision=precision)
    for events in run_ranks(events_of_a_start, 3, made, True):
        before, after = events[: events.index("receive")], events[events.index("receive") :]
        assert before[: len(KINDS)] == KINDS
        assert set(after) - {"receive"} <= set(before)
    for rank, events in enumerate(run_ranks(events_of_a_start, 3, made, False)):
        assert set(KINDS) - set(events[: events.index("receive")]), f"rank {rank} is cold without a warm-up"


@pytest.mark.slow
def test_on_cuda_a_warm_up_happens_by_itself() -> None:
    stages = [stage(layers=(3 * s, 3 * s + 3), ranks=(s,)) for s in range(2)]
    made = plan_of(gpt2_model(), [replica(*stages, num_samples=2)])
    for on_cuda in (True, False):
        warm = run_ranks(events_of_a_start, 2, made, None, on_cuda)
        assert warm == run_ranks(events_of_a_start, 2, made, on_cuda)
