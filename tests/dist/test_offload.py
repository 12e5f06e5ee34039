"""Whatever a plan leaves to its hosts: loss, gradients, norms and updated weights are those of one process.

Updates after the norm is known, previews that are right, and previews that are wrong because every step is clipped: to
1e-9 in float64, with workers that take their time at random, and with the bits of the same buckets on the device.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

from hetero.cost.host_memory import host_memory
from hetero.cost.memory import memory_costs, plan_memory
from hetero.plan.ir import Plan, Precision
from hetero.plan.offload import Offload
from hetero.plan.validate import validate
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer
from tests.helpers.comparison import assert_same_training
from tests.helpers.host_training import left_to_hosts, train_on_host, weights_to_hosts
from tests.helpers.layouts import in_turns, layout, layouts, with_delays
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import ADAM, SMALL_BUCKETS, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

NUM_STEPS = 3
TOLERANCE = 1e-9
BESIDE = DataParallelOptions(bucket_numel=3000, overlap_param_gather=True)
NEVER_CLIPPED = dataclasses.replace(ADAM, clip_grad=1e9)

Speculation = Literal["after the norm", "right", "wrong"]
SPECULATIONS: tuple[Speculation, ...] = ("after the norm", "right", "wrong")


def adam_of(speculation: Speculation) -> AdamOptions:
    """ADAM clips every step of these trainings."""
    return NEVER_CLIPPED if speculation == "right" else ADAM


ALWAYS = (
    "one-stage-gpt2-tied-wrong",
    "one-stage-tp4-sp-gpt2-tied-wrong",
    "micro-batch-4|1-gpt2-tied-wrong",
    "micro-batch-1|4-gpt2-tied-after the norm",
)
"""What every run has: the smallest layouts that find a planted fault which not all layouts find."""


def cases() -> Iterator[Any]:
    for name, style, described in layouts():
        for speculation in SPECULATIONS:
            made = left_to_hosts(described, speculate=speculation != "after the norm")
            case = f"{name}-{style}-{speculation}"
            marks = [pytest.mark.slow, *([] if case in ALWAYS else [in_turns(name, every=12, first=0)])]
            yield pytest.param(made, speculation, id=case, marks=marks)


@pytest.mark.parametrize(("made", "speculation"), list(cases()))
def test_a_layout_trains_like_one_process(made: Plan, speculation: Speculation, num_steps: int) -> None:
    validate(made)
    adam = adam_of(speculation)
    always = speculation == "wrong"
    traces = run_ranks(train_on_host, made.world_size, made, num_steps, BESIDE, adam, always, 0.001, timeout_s=120)
    alone = run_alone(train, one_process_plan(made), NUM_STEPS, SMALL_BUCKETS, None, None, "every step", "cpu", adam)
    assert_same_training(made, traces, alone.first(num_steps), tolerance=TOLERANCE)
    counts = [trace.host_counts for trace in traces if trace is not None and trace.host_counts]
    assert counts, "some host updates"
    for each in counts:
        if speculation == "after the norm":
            assert each["previewed"] == each["right"] == 0 < each["updated"]
        elif speculation == "wrong":
            assert each["right"] == 0 < each["updated"]
    if speculation != "after the norm":
        assert sum(each["previewed"] for each in counts) > 0
    if speculation == "right":
        assert sum(each["right"] for each in counts) > 0


EACH_ALONE = DataParallelOptions(bucket_numel=1, overlap_param_gather=True)
"""A bucket for each parameter, whoever keeps what where."""


@dataclasses.dataclass(frozen=True)
class Beside:
    """A training whose bits are compared with and without hosts."""

    plan: Plan
    speculation: Speculation
    overflows: bool = False
    with_weights: bool = False


def beside_the_device() -> Iterator[Any]:
    everything, tied = layout("everything", "llama-gqa"), layout("depths-1+2+3", "gpt2-tied")
    split = with_delays(everything, (0, 1, 2, 3))
    for name, made, speculation, overflows in (
        ("fp64-direct", tied, "after the norm", False),
        ("split-fp64-wrong", split, "wrong", False),
        ("bf16-right", everything.with_precision("bf16"), "right", False),
        ("fp16-overflow-right", tied.with_precision("fp16"), "right", True),
        ("fp16-overflow-direct", everything.with_precision("fp16"), "after the norm", True),
        ("fp16-overflow-right-weights", tied.with_precision("fp16"), "right", True),
        ("bf16-wrong-weights", tied.with_precision("bf16"), "wrong", False),
    ):
        case = Beside(made, speculation, overflows, with_weights="weights" in name)
        # No other finds a forward that begins before the old weights are back.
        always = name == "fp16-overflow-right"
        turns = (
            []
            if always
            else [pytest.mark.rotates("overflows" if overflows else "bits", every=4, turn=1 if overflows else 2)]
        )
        yield pytest.param(case, id=name, marks=[pytest.mark.slow, *turns])


@pytest.mark.parametrize("case", list(beside_the_device()))
def test_the_bits_are_those_of_the_device(case: Beside) -> None:
    """Of every weight, with the same buckets; in fp16 the first steps overflow and are skipped.

    Where gradients add up on the host, no layer adds its own there: it does not on the device either.
    """
    on_device = sharded(case.plan)
    speculate = case.speculation != "after the norm"
    on_host = (
        weights_to_hosts(case.plan, turn=1, speculate=speculate)
        if case.with_weights
        else left_to_hosts(case.plan, speculate=speculate)
    )
    # Every overflow halves it.
    scale = LossScaleOptions(initial=2.0**22, hysteresis=1) if case.overflows else None
    num_steps = 9 if case.overflows else NUM_STEPS
    options = StageOptions(init_method_std=0.1, gradient_accumulation_fusion=not case.with_weights)
    both = [
        run_ranks(
            train_on_host,
            made.world_size,
            made,
            num_steps,
            EACH_ALONE,
            adam_of(case.speculation),
            case.speculation == "wrong",
            0.01 if case.overflows else 0.0,
            scale,
            options,
            timeout_s=120,
        )
        for made in (on_device, on_host)
    ]
    for theirs, ours in zip(*both, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is None:
            continue
        assert ours.losses == theirs.losses
        if case.overflows:
            assert not np.isfinite(ours.grad_norms[0]), "skipped"
            assert np.isfinite(ours.grad_norms[-1]), "not all are"
        for name, weight in ours.weights[-1].items():
            np.testing.assert_array_equal(weight, theirs.weights[-1][name], err_msg=name)
        assert ours.optimizer_bytes <= theirs.optimizer_bytes


@pytest.mark.slow
@pytest.mark.rotates("ways")
@pytest.mark.parametrize(
    ("speculate", "overlap"),
    [(False, True), (True, True), (False, False)],
    ids=["direct", "previewed", "without overlap"],
)
def test_nothing_overtakes_copies_and_updates_that_are_late(speculate: bool, overlap: bool) -> None:
    """By a tenth of a second, where a step takes a hundredth: two ranks that share all buckets, of which hosts have
    the head."""
    whole = plan(llama_model(num_layers=2), [replica(stage(layers=(0, 2), ranks=(0, 1), dp=2), num_samples=4)])
    on_device = sharded(whole)
    left = [Offload(optimizer_from=2, speculate=speculate, overlap=overlap)]
    on_host = on_device.with_replica(0, on_device.replicas[0].with_each_stage(offload=left))
    expected, found = (
        run_ranks(train_on_host, 2, made, NUM_STEPS, EACH_ALONE, NEVER_CLIPPED, False, late_by_s)
        for made, late_by_s in ((on_device, 0.0), (on_host, 0.1))
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert sum(ours.host_counts.values()) > 0
        for name, weight in ours.weights[-1].items():
            np.testing.assert_array_equal(weight, theirs.weights[-1][name], err_msg=name)


def order_of_a_step(rank: int, made: Plan) -> list[str]:
    """What happened in two steps, of updates on the host and of modules of the forward."""
    happened: list[str] = []

    def prepare(trainer: Trainer, rank: int) -> None:
        host: Any = trainer._host
        update = host._update

        def noted(bucket: Any, *args: Any) -> Any:
            time.sleep(0.05)
            arrived = update(bucket, *args)
            happened.append(f"updated {bucket.ranges[0].local.bucket.position:g}")
            return arrived

        host._update = noted
        layers = [module for module in trainer._modules[0].modules() if hasattr(module, "self_attention")]
        for number, layer in enumerate(layers):
            # Behind the hook that waits for its weights.
            layer.self_attention.linear_qkv.register_forward_pre_hook(
                lambda module, _, number=number: happened.append(f"layer {number}")
            )

    train(rank, made, 2, EACH_ALONE, weights_at="the end", prepare=prepare)
    return happened


def second_step(offload: Offload) -> list[str]:
    """From the first update of the first step on, of three layers."""
    alone = plan(llama_model(num_layers=3), [replica(stage(layers=(0, 3), ranks=(0,)), num_samples=1)])
    left = sharded(alone.with_replica(0, alone.replicas[0].with_stage(0, offload=offload)))
    (happened,) = run_ranks(order_of_a_step, 1, left)
    return happened[happened.index("updated 0") :]


@pytest.mark.slow
def test_without_overlap_the_forward_begins_after_the_last_update() -> None:
    happened = second_step(Offload(optimizer_from=0, overlap=False))
    assert happened.index("layer 0") > happened.index("updated 3")


@pytest.mark.slow
def test_a_forward_begins_before_the_last_update_ends() -> None:
    """And every layer after its own weights are back, in the order of the forward."""
    happened = second_step(Offload(optimizer_from=0))
    second = happened[: happened.index("updated 3")]
    assert second.index("layer 0") < second.index("layer 1") < second.index("updated 2")
    for layer in range(3):
        assert second.index(f"layer {layer}") > max(i for i, what in enumerate(second) if what == f"updated {layer}")


@pytest.mark.slow
def test_what_an_update_raises_is_raised() -> None:
    alone = plan(llama_model(num_layers=2), [replica(stage(layers=(0, 2), ranks=(0,)), num_samples=1)])
    left = sharded(alone.with_replica(0, alone.replicas[0].with_stage(0, offload=Offload(optimizer_from=1))))
    with pytest.raises(AssertionError, match="MemoryError: no more"):
        run_ranks(failing_update, 1, left)


def failing_update(rank: int, made: Plan) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no more")

    def prepare(trainer: Trainer, rank: int) -> None:
        host: Any = trainer._host
        host._threads.run = fail

    train(rank, made, 2, SMALL_BUCKETS, weights_at="the end", prepare=prepare)


@pytest.mark.slow
@pytest.mark.rotates("precisions", every=2, turn=0)
@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_what_is_held_is_what_is_predicted(precision: Precision) -> None:
    """On the device and on the host, but for the padding of segments and shards."""
    made = left_to_hosts(layout("everything", "llama-gqa").with_precision(precision), speculate=True)
    traces = run_ranks(train_on_host, made.world_size, made, 1, BESIDE, NEVER_CLIPPED, False, 0.0)
    costs = memory_costs(made)
    on_devices, on_hosts = plan_memory(made, costs), host_memory(made, costs)
    for r, s, each in made.stages():
        ours = [trace for trace in (traces[rank] for rank in each.ranks) if trace is not None]
        device, host = on_devices[r, s].optimizer, on_hosts[r, s].held if (r, s) in on_hosts else 0
        assert max(trace.optimizer_bytes for trace in ours) == pytest.approx(device, rel=0.12, abs=5000)
        assert max(trace.host_bytes for trace in ours) == pytest.approx(host, rel=0.12, abs=5000)
