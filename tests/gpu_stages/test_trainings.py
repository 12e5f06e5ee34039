"""What trainings print is read, and what is wrong with them is found."""

import sys

import pytest

from hetero.spec.shipped_devices import SHIPPED_DEVICES
from megatron.pretrain.cli.arguments import parse_args
from tests.bench import bench_uniform
from tests.gpu.measured_step import plan_of
from tests.gpu_stages.measured_steps import list_workloads
from tests.gpu_stages.stages import list_stages
from tests.gpu_stages.target import Target
from tests.gpu_stages.trainings import (
    EXPERIMENTS,
    Training,
    TrainingRun,
    check_experts,
    check_losses,
    check_precision,
    check_ramp_up,
)
from tests.gpu_stages.wide_step import predicted_s, wide_model, wide_plan

H200 = Target(device="cuda", name="NVIDIA H200", half="bf16")

LOG = """environment: default: CUDA_DEVICE_MAX_CONNECTIONS=32
V1127 12:00:01.000 torch/_dynamo/guards.py:1 [0/1] [__recompiles] Recompiling function weighted_swiglu in fused.py:1
step  1/10 | batch 4 | loss 5.565026 | grad norm 2.2320 | 12.1 samples/s | step time 1,330.4 ms | skipped 0
V1127 12:00:02.000 torch/_dynamo/guards.py:1 [0/2] [__recompiles] Recompiling function weighted_swiglu in fused.py:1
step 10/10 | loss 5.5 | grad norm 2.2320 | lr 3.000e-04 | 194 tokens/s | step time 30.4 ms | skipped 0 | ETA 0:00:00
seconds: training 0.5
"""


def run_of(log: str, name: str = "one", exit_codes: tuple[int, ...] = (0,)) -> TrainingRun:
    run = TrainingRun(training=Training(name=name, flags=()), exit_codes=list(exit_codes))
    for second, line in enumerate(log.splitlines()):
        run.read(line, at_s=float(second))
    return run


def with_losses(*losses: float, name: str = "one") -> TrainingRun:
    return TrainingRun(training=Training(name=name, flags=()), losses=list(losses), exit_codes=[0])


def test_a_log_is_read() -> None:
    run = run_of(LOG)
    assert run.losses == [5.565026, 5.5]
    assert run.batches == [4]
    assert run.seconds == [1.3304, 0.0304]
    assert run.first_step_s == 2
    assert run.recompiled == ["weighted_swiglu"], "the first one was before the first step"
    assert run.row == "| one | 1 | 2 | 5.565026 to 5.500000 | 30.4 | 30.4 | 2.0 | 1 |"


def test_a_training_that_did_not_begin_has_a_row_too() -> None:
    assert run_of("Traceback").row == "| one | 1 | 0 | - | - | - | - | 0 |"


def test_recompilations_are_a_problem() -> None:
    steps = "\n".join(LOG.splitlines()[2:3] * 10)
    assert list(check_experts([run_of(steps)])) == []
    assert list(check_experts([run_of(f"{steps}\n{LOG.splitlines()[3]}")])) == [
        "1 recompilations after the first step: weighted_swiglu"
    ]


def test_the_batch_has_to_grow() -> None:
    run = with_losses(1.0, 1.0)
    run.batches = [4, 16]
    assert list(check_ramp_up([run])) == []
    run.batches = [4, 4]
    assert list(check_ramp_up([run])) == ["the batches were [4, 4], instead of 4 at first and 16 at last"]


def test_a_rank_that_failed_is_named() -> None:
    assert "one: exit codes 0, 1" in check_ramp_up([run_of("", exit_codes=(0, 1))])


@pytest.mark.parametrize("other", [5.1, float("nan")])
def test_losses_that_are_far_are_a_problem(other: float, capsys: pytest.CaptureFixture[str]) -> None:
    near, far = with_losses(5.0, 4.00001, name="pp2"), with_losses(5.0, other, name="dp2")
    (problem,) = check_losses([with_losses(5.0, 4.0), near, far], 1e-5)
    assert problem.startswith("dp2: losses are ")
    assert "pp2: losses within 2.5e-06 of one's, bound 1e-05" in capsys.readouterr().out


def test_losses_that_are_missing_are_a_problem() -> None:
    problems = list(check_precision([with_losses(*[5.0] * 10), with_losses(name="bf16")]))
    assert problems == ["bf16: 0 steps instead of 10", "bf16: losses are nan from one's, bound 1e-02"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_trainings_of_an_experiment_have_names_of_their_own(name: str) -> None:
    names = [training.name for training in EXPERIMENTS[name](H200).trainings]
    assert len(set(names)) == len(names)


def test_the_wide_model_is_llamas() -> None:
    model = wide_model(H200)
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (8, 4096, 14336)
    assert (model.num_attention_heads, model.num_query_groups, model.padded_vocab_size) == (32, 8, 128_256)


def test_the_wide_step_is_predicted_by_data_sheet() -> None:
    """Within what any change of the cost model may move it."""
    plan = wide_plan(H200)
    assert plan is not None
    called = SHIPPED_DEVICES.called("NVIDIA H200")
    assert called is not None
    assert plan.replicas[0].stages[0].device == called.name
    assert 0.5 < predicted_s(plan, []) < 1.5
    assert wide_plan(Target(device="cuda", name="an unknown device")) is None


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_flags_for_a_gpu_are_accepted(name: str) -> None:
    """A rehearsal trains smaller models, with the same flags and other numbers."""
    for training in EXPERIMENTS[name](H200).trainings:
        config = parse_args(list(training.flags))
        assert config.model.hidden_size == 256


def test_workloads_for_a_gpu_have_plans() -> None:
    device = SHIPPED_DEVICES.of("H200")
    plans = [plan_of(workload, device) for workload in list_workloads(H200)]
    assert [plan.precision for plan in plans] == ["bf16", "bf16", "bf16", "fp32"]


def test_options_of_the_benchmark_for_a_gpu_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in list_stages(H200, "runs/gpu"):
        if stage.name.startswith("bench-"):
            monkeypatch.setattr(sys, "argv", ["bench_uniform", *stage.command[2:]])
            arguments = bench_uniform._arguments()
            assert (arguments.device, arguments.precision, arguments.plans) == ("cuda", "bf16", ["1 rank"])
