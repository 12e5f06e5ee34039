"""An emulated cluster: the numbers are those of one process, the times those of the description.

Times are compared on the ranks' emulated clocks, which a busy machine does not slow down, and whether a machine can
keep up is counted in processor seconds: other tests may run beside these.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hetero.cost.cost_model import CostModel
from hetero.cost.runtime_model import HETERO
from hetero.cost.simulation.simulator import simulate
from hetero.cost.stage_memory import blocks_on_host
from hetero.distributed.process_groups import create_groups
from hetero.emulation.options import EmulationOptions
from hetero.emulation.ranks.setup import emulate
from hetero.emulation.records import EmulatedRun, StepRecord
from hetero.emulation.timeline import executed
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.offload import Offload
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from hetero.spec.cluster import ClusterSpec
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link
from hetero.spec.parameters import parameters
from tests.helpers.cases import slow
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.synthetic_profiles import cost_model, nodes, profile
from tests.helpers.training import ADAM, SMALL_BUCKETS, data_of, one_process, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

BLOCK_S = (0.02, 0.04)
"""Forward and backward of a layer for one sample: far above what this machine needs for the small one."""

MODEL = gpt2_model()
NUM_STEPS = 3
NEVER_CLIPPED = dataclasses.replace(ADAM, clip_grad=1e9)
VOCABULARY = 60
BUCKET_NUMEL = 20_000


def a100_stage(first: float, end: float, *ranks: int, **arguments: Any) -> Any:
    return stage(layers=(first, end), ranks=ranks, device="A100-40", **arguments)


def emulated_steps(
    rank: int,
    described: Plan,
    cluster: ClusterSpec,
    costs: CostModel,
    data_parallel: DataParallelOptions,
    options: EmulationOptions,
    adam: AdamOptions,
) -> tuple[tuple[StepRecord, ...], list[float]]:
    """Steps on one rank: what it recorded, and the losses."""
    emulation = emulate(
        described,
        cluster,
        costs,
        options=options,
        vocab_size=VOCABULARY,
        bucket_numel=data_parallel.bucket_numel,
    )
    context = create_groups(emulation.plan, device=torch.device("cpu"), timing=emulation.timing)
    trainer = Trainer(
        context,
        options=StageOptions(init_method_std=0.1),
        adam=adam,
        seed=7,
        data_parallel=dataclasses.replace(data_parallel, bucket_numel=emulation.bucket_numel),
    )
    session = TrainingSession(context, trainer, data=data_of(context))
    losses = [session.step().loss for _ in range(NUM_STEPS)]
    trainer.finish_gather()
    return tuple(emulation.timing.steps), losses


def run(
    described: Plan,
    cluster: ClusterSpec,
    *,
    data_parallel: DataParallelOptions | None = None,
    time_scale: float = 0.5,
    adam: AdamOptions = ADAM,
    **profiled: Any,
) -> tuple[EmulatedRun, CostModel]:
    data_parallel = data_parallel or DataParallelOptions(bucket_numel=BUCKET_NUMEL)
    costs = cost_model(
        described.model,
        [profile(described.model, **{"block_s": BLOCK_S, "update_s": 0.001, **profiled})],
        runtime=dataclasses.replace(
            HETERO,
            bucket_numel=data_parallel.bucket_numel,
            overlaps_gradient_sync=data_parallel.overlap_grad_reduce,
            overlaps_param_gather=data_parallel.overlap_param_gather,
        ),
    )
    answers = run_ranks(
        emulated_steps,
        described.world_size,
        described,
        cluster,
        costs,
        data_parallel,
        EmulationOptions(time_scale=time_scale, seq_length=16),
        adam,
        timeout_s=100,
    )
    steps, losses = zip(*answers, strict=True)
    return EmulatedRun(plan=described, time_scale=time_scale, ranks=steps, losses=tuple(losses[0])), costs


PLANS = {
    "one stage after the other": plan(MODEL, [replica(a100_stage(0, 3, 0), a100_stage(3, 6, 1), num_samples=4)]),
    "half a layer": plan(MODEL, [replica(a100_stage(0, 2.5, 0), a100_stage(2.5, 6, 1), num_samples=4)]),
    "a slow link and depth": plan(
        MODEL, [replica(a100_stage(0, 2, 0, depth=5), a100_stage(2, 6, 1, depth=1), num_samples=6)]
    ),
    "split backwards": plan(
        MODEL,
        [
            replica(a100_stage(0, 3, 0, delay=0), a100_stage(3, 6, 1, delay=1), num_samples=4),
            replica(a100_stage(0, 6, 2, delay=1), num_samples=2),
        ],
    ),
    "microbatches 1 and 2": plan(
        MODEL, [replica(a100_stage(0, 4, 0, 1, dp=2), a100_stage(4, 6, 2, mbs=2), num_samples=4)]
    ),
    "two replicas of unequal depth": plan(
        MODEL,
        [replica(a100_stage(0, 2, 0), a100_stage(2, 6, 1), num_samples=3), replica(a100_stage(0, 6, 2), num_samples=1)],
    ),
}


@pytest.mark.parametrize(
    "name", ["microbatches 1 and 2", *slow(*(name for name in PLANS if "1 and 2" not in name), rotates="plans")]
)
def test_a_step_takes_what_the_simulator_says(name: str) -> None:
    described = PLANS[name]
    cluster = nodes(described.world_size, gb_per_s=0.0002 if name.startswith("a slow") else 0.01)
    ran, costs = run(described, cluster)
    predicted = simulate(described, cluster, costs)
    assert ran.emulated_step_s == pytest.approx(predicted.step_s, rel=0.03)
    shown = executed(ran, costs)
    for key, times in predicted.stages.items():
        assert shown.stages[key].busy_s == pytest.approx(times.busy_s)
        assert shown.stages[key].update_s == pytest.approx(times.update_s)
    assert len(shown.spans) == len(predicted.spans), "every compute and every slice ran once"


SHARED = DataParallelOptions(bucket_numel=BUCKET_NUMEL, overlap_param_gather=True)


def on_hosts(described: Plan, *offloads: Offload) -> Plan:
    """With these of the stages of the first replica, and of the only stage of the second."""
    firsts, rest = offloads[: len(described.replicas[0].stages)], offloads[len(described.replicas[0].stages) :]
    made = sharded(described).with_replica(0, described.replicas[0].with_each_stage(offload=firsts))
    return made.with_replica(1, made.replicas[1].with_each_stage(offload=rest)) if rest else made


def all_of(plan: Plan) -> int:
    return sum(parameter.numel for parameter in parameters(plan.model))


def host_cases() -> Iterator[Any]:
    """Twelve plans, whose hosts update all parameters in so many seconds; copies are as slow as a fifth of that."""
    one = plan(MODEL, [replica(a100_stage(0, 6, 0, depth=1), num_samples=4)])
    two = PLANS["one stage after the other"]
    unlike = PLANS["two replicas of unequal depth"]
    wide = PLANS["microbatches 1 and 2"]
    end, all_, head = Offload(optimizer_from=3), Offload(optimizer_from=-1), Offload(optimizer_from=6)
    nothing = Offload()
    cases = {
        "one, its end": (one, (end,), 0.3),
        "one, all": (one, (all_,), 0.3),
        "one, all, slowly": (one, (all_,), 1.5),
        "one, the head": (one, (head,), 4.0),
        "two, the second": (two, (nothing, end), 0.25),
        "two, both": (two, (all_, Offload(optimizer_from=4.5)), 0.4),
        "unlike, some": (unlike, (nothing, Offload(optimizer_from=2), end), 0.3),
        "wide, the first": (wide, (Offload(optimizer_from=1.5), nothing), 0.4),
    }
    for name, (described, offloads, seconds) in cases.items():
        turns = [] if name == "one, all" else [pytest.mark.rotates("hosts", every=2, turn=0)]
        yield pytest.param(on_hosts(described, *offloads), seconds, id=name, marks=[pytest.mark.slow, *turns])
        if name in ("one, its end", "one, all", "two, both", "unlike, some"):
            previewed = [dataclasses.replace(o, speculate=o != nothing) for o in offloads]
            yield pytest.param(
                on_hosts(described, *previewed),
                seconds,
                id=f"{name}, previewed",
                marks=(pytest.mark.slow, pytest.mark.rotates("previews", every=2, turn=1)),
            )


def gradient_cases() -> Iterator[Any]:
    """Seven plans whose gradients add up on hosts, from copies that nobody waits for to such that backwards do; two of
    them as ZeRO-Offload and PatrickStar place state."""
    one = plan(MODEL, [replica(a100_stage(0, 6, 0, depth=1), num_samples=4)])
    all_, half = Offload(optimizer_from=-1, gradients_from=-1), Offload(optimizer_from=2, gradients_from=3)
    cases = {
        "zero-offload": (one, (dataclasses.replace(all_, overlap=False),), 0.5),
        "patrickstar": (one, (Offload(optimizer_from=2, gradients_from=2, overlap=False),), 0.5),
        "one, all": (one, (all_,), 0.3),
        "one, a half, previewed": (one, (dataclasses.replace(half, speculate=True),), 0.3),
        "one, all, slowly": (one, (all_,), 2.0),
        "unlike, some": (PLANS["two replicas of unequal depth"], (Offload(), half, half), 0.3),
        "wide, the first": (
            PLANS["microbatches 1 and 2"],
            (Offload(optimizer_from=1, gradients_from=1.5), Offload()),
            0.4,
        ),
    }
    for name, (described, offloads, seconds) in cases.items():
        marks = (pytest.mark.slow, pytest.mark.rotates("gradients", every=2, turn=0))
        yield pytest.param(on_hosts(described, *offloads), seconds, id=f"{name}, gradients", marks=marks)


def weight_cases() -> Iterator[Any]:
    """Plans whose weights live on hosts, from copies that nobody waits for to such that decide; one of them as
    StrongHold places state."""
    one = plan(MODEL, [replica(a100_stage(0, 6, 0, depth=1), num_samples=4)])
    all_ = Offload(optimizer_from=-1, gradients_from=-1, weights_from=-1)
    half = Offload(optimizer_from=2, gradients_from=3, weights_from=3.5)
    cuts = ((0, 2, 0), (2, 4, 1), (4, 5, 0), (5, 6, 1))
    turns = plan(MODEL, [replica(*(a100_stage(*cut, depth=2) for cut in cuts), num_samples=4)])
    first, last = (Offload(optimizer_from=p, gradients_from=p, weights_from=p) for p in (1, 4.5))
    cases = {
        "one, all": (one, (all_,), 0.3),
        "one, all, slowly": (one, (all_,), 1.5),
        "one, a half, previewed": (one, (dataclasses.replace(half, speculate=True),), 0.6),
        "stronghold": (one, (Offload(optimizer_from=2, gradients_from=2, weights_from=2, speculate=True),), 0.6),
        "unlike, some": (PLANS["two replicas of unequal depth"], (Offload(), half, half), 0.3),
        "in turns": (turns, (first, Offload(), last, Offload()), 0.8),
    }
    for name, (described, offloads, seconds) in cases.items():
        marks = (pytest.mark.slow, pytest.mark.rotates("weights", every=2, turn=1))
        yield pytest.param(on_hosts(described, *offloads), seconds, id=f"{name}, weights", marks=marks)


def link_cases() -> Iterator[Any]:
    """Plans whose activations, gradients, weights and updates wait for one another on the links to the hosts."""
    one = plan(MODEL, [replica(a100_stage(0, 6, 0, depth=2), num_samples=4)])
    some = Offload(optimizer_from=-1, gradients_from=1, weights_from=3, activations_until=5)
    all_ = Offload(optimizer_from=-1, gradients_from=-1, weights_from=-1, activations_until=6)
    end = Offload(optimizer_from=2, gradients_from=3, weights_from=4, activations_until=4)
    cases = {
        "one, some": (one, (some,), 3.0),
        "one, all, slowly": (one, (all_,), 2.0),
        "unlike, all": (PLANS["two replicas of unequal depth"], (Offload(activations_until=1), end, some), 1.5),
    }
    for name, (described, offloads, seconds) in cases.items():
        marks = (pytest.mark.slow, pytest.mark.rotates("links"))
        yield pytest.param(on_hosts(described, *offloads), seconds, id=f"{name}, everything", marks=marks)


def beside_hosts(described: Plan, seconds: float, *, gb_per_s: float = 0.01) -> ClusterSpec:
    """Nodes whose hosts update all parameters in so many seconds and copy them in a fifth of that."""
    numel = all_of(described)
    copy = Link(bandwidth_gb_per_s=4 * numel / (seconds / 5) / 1e9, latency_us=0.0)
    updates = (UpdateRate(threads=1, elements_per_s=numel / seconds),)
    host = HostProfile(source="a test", memory_gib=64, updates=updates, to_device=copy, to_host=copy)
    return nodes(described.world_size, gb_per_s=gb_per_s, host=host)


@pytest.mark.parametrize(("described", "seconds"), [*host_cases(), *gradient_cases(), *weight_cases(), *link_cases()])
def test_hosts_take_what_the_simulator_says(described: Plan, seconds: float) -> None:
    """And what they update is right."""
    cluster = beside_hosts(described, seconds)
    ran, costs = run(described, cluster, data_parallel=SHARED, time_scale=2.0, adam=NEVER_CLIPPED)
    # What was previewed in the first step, which is not emulated, was there at once.
    last, predicted = ran.ranks[0][-1], simulate(described, cluster, costs)
    assert last.end_s - last.start_s == pytest.approx(predicted.step_s, rel=0.05)
    shown = executed(ran, costs)
    for key, times in predicted.stages.items():
        assert shown.stages[key].busy_s == pytest.approx(times.busy_s), "without what computes wait for weights"
    alone = run_alone(
        train,
        one_process_plan(_small(described)),
        NUM_STEPS,
        SMALL_BUCKETS,
        None,
        None,
        "every step",
        "cpu",
        NEVER_CLIPPED,
    )
    assert list(ran.losses) == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.slow
def test_gradients_on_hosts_are_summed_while_the_backward_goes_on() -> None:
    """A thread launches these sums, mostly when the small backward that really runs is over."""
    all_ = Offload(optimizer_from=-1, gradients_from=-1)
    equal = plan(MODEL, [replica(a100_stage(0, 6, rank, depth=1), num_samples=1) for rank in (0, 1)])
    described = on_hosts(equal, all_, all_)
    cluster = beside_hosts(described, 0.05, gb_per_s=0.001)
    ran, costs = run(described, cluster, data_parallel=SHARED, time_scale=2.0, adam=NEVER_CLIPPED)
    last, predicted = ran.ranks[0][-1], simulate(described, cluster, costs)
    first_sum, backward = min(sync.start_s for sync in predicted.syncs), predicted.compute_end_s
    assert backward - first_sum > 0.2 * predicted.step_s, "most of the sums are beside the backward"
    assert last.end_s - last.start_s == pytest.approx(predicted.step_s, rel=0.05)


def activation_cases() -> Iterator[Any]:
    """Plans, and how long the copy of a layer's activations of one sample takes, where its forward takes 20 ms."""
    one = plan(MODEL, [replica(a100_stage(0, 6, 0, depth=1), num_samples=4)])
    deep = PLANS["a slow link and depth"]
    wide = PLANS["microbatches 1 and 2"]
    cuts = ((0, 2, 0), (2, 4, 1), (4, 5, 0), (5, 6, 1))
    turns = plan(MODEL, [replica(*(a100_stage(*cut, depth=2) for cut in cuts), num_samples=4)])
    head, all_, half = Offload(activations_until=6), Offload(activations_until=5), Offload(activations_until=2)
    nothing = Offload()
    cases = {
        "one, all": (one, (all_,), 0.015),
        "one, all, slowly": (one, (head,), 0.05),
        "one, a half": (one, (half,), 0.03),
        "deep, the first": (deep, (Offload(activations_until=1), nothing), 0.03),
        "deep, both, slowly": (deep, (Offload(activations_until=1), all_), 0.06),
        "wide, the first": (wide, (half, nothing), 0.02),
        "in turns": (turns, (Offload(activations_until=1), nothing, Offload(activations_until=4), all_), 0.03),
        "beside updates": (one, (Offload(activations_until=3, optimizer_from=5),), 0.03),
    }
    for name, (described, offloads, seconds) in cases.items():
        marks = (pytest.mark.slow, pytest.mark.rotates("activations", every=2, turn=0))
        yield pytest.param(on_hosts(described, *offloads), seconds, id=name, marks=marks)


@pytest.mark.parametrize(("described", "seconds"), list(activation_cases()))
def test_activations_come_back_when_the_simulator_says(described: Plan, seconds: float) -> None:
    """And a backward computes with what its forward has saved."""
    (block,) = {
        each.num_bytes / described.replicas[0].stages[0].micro_batch_size
        for each in blocks_on_host(described.replicas[0].stages[0], cost_model(MODEL, [])).values()
        if each.kind == "block"
    }
    copy = Link(bandwidth_gb_per_s=block / seconds / 1e9, latency_us=0.0)
    updates = (UpdateRate(threads=1, elements_per_s=all_of(described) / 0.1),)
    host = HostProfile(source="a test", memory_gib=64, updates=updates, to_device=copy, to_host=copy)
    cluster = nodes(described.world_size, gb_per_s=0.01, host=host)
    ran, costs = run(described, cluster, data_parallel=SHARED, time_scale=2.0, adam=NEVER_CLIPPED)
    last, predicted = ran.ranks[0][-1], simulate(described, cluster, costs)
    assert last.end_s - last.start_s == pytest.approx(predicted.step_s, rel=0.05)
    small = one_process_plan(_small(described))
    alone = run_alone(train, small, NUM_STEPS, SMALL_BUCKETS, None, None, "every step", "cpu", NEVER_CLIPPED)
    assert list(ran.losses) == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.rotates("optimizers")
@pytest.mark.parametrize("data_parallel", [None, SHARED], ids=["all-reduce", "distributed-optimizer"])
def test_losses_are_those_of_one_process(data_parallel: DataParallelOptions | None) -> None:
    """Under a plan of unequal replicas with tensor parallelism, in fp32."""
    described = plan(
        llama_model(),
        [
            replica(a100_stage(0, 2, 0, 1, tp=2, sp=True), a100_stage(2, 6, 2), num_samples=3),
            replica(a100_stage(0, 6, 3), num_samples=1),
        ],
    )
    described = sharded(described) if data_parallel is SHARED else described
    ran, _ = run(described, nodes(2, gpus_per_node=2), data_parallel=data_parallel, time_scale=3.0)
    small = dataclasses.replace(_small(described), precision="fp32")
    alone = one_process(small, NUM_STEPS)
    assert list(ran.losses) == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_everything_at_once_is_what_one_process_computes_and_takes_what_is_predicted() -> None:
    """A split backward, half a layer, hierarchical sums, and a distributed optimizer that gathers in the forward."""
    described = dataclasses.replace(
        plan(
            MODEL,
            [
                replica(a100_stage(0, 2.5, 0, delay=0), a100_stage(2.5, 6, 1, delay=1), num_samples=4),
                replica(a100_stage(0, 6, 2, 3, dp=2), num_samples=4),
            ],
        ),
        distributed_optimizer=True,
        gradient_sync=GradientSyncPlan(domains=((0, 1), (2, 3)), bucket_numel=10_000),
    )
    cluster = nodes(2, gpus_per_node=2, gb_per_s=0.05)
    ran, costs = run(described, cluster, data_parallel=SHARED, time_scale=3.0)
    alone = one_process(_small(described), NUM_STEPS)
    assert list(ran.losses) == pytest.approx(alone.losses, rel=1e-5)
    assert ran.emulated_step_s == pytest.approx(simulate(described, cluster, costs).step_s, rel=0.05)


@pytest.mark.slow
def test_tensor_parallel_ranks_compute_together() -> None:
    """Over one interface their inputs arrive one after the other; no rank begins before the last one has its own."""
    described = plan(MODEL, [replica(a100_stage(0, 3, 0), a100_stage(3, 6, 2, 3, tp=2), num_samples=4)], idle_ranks=[1])
    cluster = nodes(2, gpus_per_node=2, gb_per_s=0.0002)
    ran, costs = run(described, cluster, time_scale=2.0)
    starts = [[compute.start_s for compute in ran.ranks[rank][-1].computes] for rank in (2, 3)]
    assert starts[0] == pytest.approx(starts[1])
    assert ran.emulated_step_s == pytest.approx(simulate(described, cluster, costs).step_s, rel=0.03)


def _small(described: Plan) -> Plan:
    from hetero.emulation.shrunk_model import small_plan  # noqa: PLC0415

    return small_plan(described, vocab_size=VOCABULARY, seq_length=16)


def test_a_plan_that_does_not_fit_runs_out_of_memory() -> None:
    described = PLANS["one stage after the other"]
    with pytest.raises(AssertionError, match=r"DeviceMemoryError: rank \d.*out of memory in the forward of microbatch"):
        run(described, nodes(2, memory_gib=1))


def test_a_machine_that_cannot_keep_up_is_told() -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: emulation: the real work.*--hetero-emulate-time-scale"):
        run(PLANS["one stage after the other"], nodes(2), time_scale=0.001)
