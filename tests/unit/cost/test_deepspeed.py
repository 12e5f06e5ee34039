"""DeepSpeed's pipeline engine: its order, what its blocking transfers cost, and what it cannot do."""

import dataclasses

import pytest

from hetero.cost.other_runtimes.deepspeed import deepspeed_1f1b
from hetero.errors import PlanError
from hetero.schedule.actions import format_schedule
from hetero.spec.link import Link
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import nodes
from tests.unit.cost.simulated import A100, DEEPSPEED_FAST_HOST, MODEL, pipeline, run, split, unequal_microbatches


def test_deepspeed_1f1b_is_its_train_schedule() -> None:
    """A forward's output leaves in the next slot, after which the stage turns to its other neighbour."""
    assert format_schedule(deepspeed_1f1b(num_stages=2, num_microbatches=2)).splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_blocking_transfers_cost_what_ours_hide() -> None:
    """Per microbatch the last stage takes 2 transfers more, here as long as its computing."""
    cluster = nodes(2, gb_per_s=4 * 16 * 32 / 1e9 / 4.5)
    described = pipeline(2, num_samples=20, depths=[4, 1])
    theirs, ours = run(described, cluster, runtime=DEEPSPEED_FAST_HOST), run(described, cluster)
    assert theirs.step_s == pytest.approx(20 * (9.0 + 2 * 4.5) + 9.0, rel=0.05)
    assert ours.step_s == pytest.approx(20 * 9.0 + 9.0 + 2 * 4.5, rel=0.05)


def test_each_rank_sends_its_share_and_the_receivers_gather() -> None:
    """4 s for a boundary between nodes, 2 s for half of it, and inside, ten times as fast, half a ring of all of it. A
    runtime with copies sends two of them at once. 2 forwards of 1.5 s, 2 backwards of 3 s, one boundary each way."""
    whole_s, boundary = 4.0, 4 * 16 * 32
    gb_per_s = boundary / 1e9 / whole_s
    inside = Link(bandwidth_gb_per_s=10 * gb_per_s, latency_us=0.0)
    cluster = nodes(2, gpus_per_node=2, nics_per_node=2, gb_per_s=gb_per_s, inside_node=inside)
    stages = [
        stage(layers=(3 * s, 3 * s + 3), ranks=(2 * s, 2 * s + 1), tp=2, device=A100, depth=1, sp=False) for s in (0, 1)
    ]
    described = plan(MODEL, [replica(*stages, num_samples=1)])
    assert DEEPSPEED_FAST_HOST.partitions_transfers
    parts = run(described, cluster, runtime=DEEPSPEED_FAST_HOST)
    copies = run(described, cluster, runtime=dataclasses.replace(DEEPSPEED_FAST_HOST, partitions_transfers=False))
    assert copies.compute_end_s == pytest.approx(9.0 + 2 * whole_s)
    assert parts.compute_end_s == pytest.approx(9.0 + 2 * (whole_s / 2 + whole_s / 10 / 2))


def test_stages_of_other_degrees_get_copies() -> None:
    cluster = nodes(3, gb_per_s=4 * 16 * 32 / 1e9 / 4.0)
    stages = [
        stage(layers=(0, 3), ranks=(0,), device=A100, depth=1),
        stage(layers=(3, 6), ranks=(1, 2), tp=2, device=A100, depth=1),
    ]
    described = plan(MODEL, [replica(*stages, num_samples=1)])
    ours = dataclasses.replace(DEEPSPEED_FAST_HOST, partitions_transfers=False)
    assert run(described, cluster, runtime=DEEPSPEED_FAST_HOST) == run(described, cluster, runtime=ours)


def test_the_host_waits_for_the_device_around_each_transfer() -> None:
    """One microbatch there and back: 3 layers each, and twice as long for a backward."""
    waits = dataclasses.replace(DEEPSPEED_FAST_HOST, transfer_host_s=0.5)
    described = pipeline(2, num_samples=1)
    without, with_host = (run(described, runtime=each) for each in (DEEPSPEED_FAST_HOST, waits))
    assert without.compute_end_s == pytest.approx(18.0)
    assert with_host.compute_end_s == pytest.approx(18.0 + 2 * 0.5)


def test_stages_count_the_same_microbatches() -> None:
    with pytest.raises(PlanError, match=r"deepspeed-1f1b: stages count \[2, 4\] microbatches"):
        run(unequal_microbatches(), runtime=DEEPSPEED_FAST_HOST)


def test_blocking_transfers_have_no_split_backwards() -> None:
    with pytest.raises(PlanError, match=r"deepspeed-1f1b: this runtime does not split backwards; set wgrad_delay"):
        run(split(pipeline(2, num_samples=2), [0, None]), runtime=DEEPSPEED_FAST_HOST)
