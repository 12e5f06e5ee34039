"""Megatron-LM as it is: its order, what its batched transfers cost, and what it cannot do."""

import dataclasses

import pytest

from hetero.cost.memory import plan_memory
from hetero.cost.other_runtimes.megatron_lm import MEGATRON_CORE, MEGATRON_LM, MEGATRON_LM_TORCH_DDP, megatron_rows
from hetero.cost.runtime_model import HETERO
from hetero.cost.simulation.blocking_replay import BatchedReplay
from hetero.cost.simulation.simulator import simulate
from hetero.errors import PlanError
from hetero.plan.ir import Replica
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.schedule.actions import COMPUTE, format_schedule
from hetero.schedule.orders import gpipe
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile
from tests.unit.cost.replays import cost, times
from tests.unit.cost.replays import pipeline as replayed
from tests.unit.cost.simulated import A100, MODEL, pipeline, run, split, unequal_microbatches

AS_PROFILED, OURS_AS_PROFILED = (dataclasses.replace(each, implementation=None) for each in (MEGATRON_LM, HETERO))
"""Layers as they were measured, so that seconds are those of the profile."""


def uniform(*, pp: int, stages_per_rank: int = 1, num_microbatches: int) -> Replica:
    layout = UniformLayout(
        model=gpt2_model(num_layers=pp * stages_per_rank),
        world_size=pp,
        pp=pp,
        stages_per_rank=stages_per_rank,
        micro_batch_size=1,
        global_batch_size=num_microbatches,
        seq_length=16,
        device=A100,
    )
    return uniform_plan(layout).replicas[0]


def test_plain_1f1b_is_as_its_schedules_have_it() -> None:
    """``send_forward_recv_backward`` behind a forward, ``send_backward_recv_forward`` behind a backward."""
    assert format_schedule(megatron_rows(uniform(pp=2, num_microbatches=3))).splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
    ]


def test_interleaved_pairs_exchange_together() -> None:
    """Nothing is sent or received between a forward and the backward behind it, but before and behind the two."""
    first, second = format_schedule(megatron_rows(uniform(pp=2, stages_per_rank=2, num_microbatches=4))).splitlines()
    assert " 2RECV_B0 0F2 2B0 0SEND_F2 2SEND_B0 2RECV_B1 0F3 2B1 " in first
    assert " 3F1 3B1 3SEND_B1 1RECV_F2 1RECV_B0 1F2 1B0 1SEND_F2 1SEND_B0 " in second


def test_one_round_of_microbatches_has_all_forwards_first() -> None:
    """Where there are as many microbatches as device groups."""
    for row in megatron_rows(uniform(pp=2, stages_per_rank=2, num_microbatches=2)):
        kinds = [action.kind.value for action in row if action.kind in COMPUTE]
        assert kinds == ["F"] * 4 + ["B"] * 4


@pytest.mark.parametrize(
    ("pp", "stages_per_rank", "num_microbatches"),
    [(2, 1, 1), (4, 1, 2), (4, 1, 9), (2, 2, 2), (2, 2, 8), (4, 3, 8), (4, 2, 4), (5, 3, 20)],
)
def test_every_transfer_meets_the_other_side(pp: int, stages_per_rank: int, num_microbatches: int) -> None:
    num_stages = pp * stages_per_rank
    rows = megatron_rows(uniform(pp=pp, stages_per_rank=stages_per_rank, num_microbatches=num_microbatches))
    spans = BatchedReplay(
        [
            replayed(
                rows,
                counts=(num_microbatches,) * num_stages,
                forward_s=(1.0,) * num_stages,
                backward_s=(2.0,) * num_stages,
                transfers=(cost(0.1),) * (num_stages - 1),
            )
        ]
    ).spans()
    assert len(spans) == 2 * num_microbatches * (2 * num_stages - 1)


def test_a_batch_holds_both_sides_until_its_last_transfer_has_ended() -> None:
    rows = megatron_rows(uniform(pp=2, num_microbatches=2))
    spans = BatchedReplay(
        [replayed(rows, counts=(2, 2), forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), transfers=(cost(0.5),))]
    ).spans()
    found = times(spans)
    assert found["0SEND_F0"] == (1.0, 1.5)
    assert found["0F1"] == (1.5, 2.5), "not beside the transfer"
    assert found["1B0"] == (2.5, 4.5)
    assert found["0SEND_F1"] == found["1SEND_B0"] == (4.5, 5.0), "both ways at once"
    assert found["0B0"] == (5.0, 7.0)


def test_each_compute_waits_for_an_exchange() -> None:
    """Of three stages of 6 s a microbatch the middle one exchanges twice, 3 s each; ours shows two thirds of that."""
    cluster = nodes(3, gb_per_s=4 * 16 * 32 / 1e9 / 3.0)
    described = pipeline(3, num_samples=60)
    theirs, ours = (run(described, cluster, runtime=each).step_s for each in (AS_PROFILED, OURS_AS_PROFILED))
    assert theirs == pytest.approx(60 * 12, rel=0.05)
    assert ours == pytest.approx(60 * 10, rel=0.05)


def test_torch_sums_beside_the_backward() -> None:
    """Its own data parallelism sums behind the last backward."""
    described = plan(
        MODEL, [replica(stage(layers=(0, 6), ranks=(r,), device=A100, mbs=1, depth=1), num_samples=1) for r in (0, 1)]
    )
    links = nodes(2, gb_per_s=1e-6)
    local, torch = (
        run(described, links, runtime=dataclasses.replace(each, bucket_numel=1_000))
        for each in (MEGATRON_LM, MEGATRON_LM_TORCH_DDP)
    )
    assert min(sync.start_s for sync in local.syncs) >= local.compute_end_s
    assert min(sync.start_s for sync in torch.syncs) < torch.compute_end_s


def test_half_precision_gradients_are_half_the_bytes() -> None:
    """Old Megatron-LM sums fp16 gradients as they are; master weights and moments are fp32 all the same."""
    described = plan(
        MODEL, [replica(stage(layers=(0, 6), ranks=(r,), device=A100, mbs=1, depth=1), num_samples=1) for r in (0, 1)]
    ).with_precision("fp16")
    old, new = (
        cost_model(MODEL, [profile(MODEL)], precision="fp16", runtime=each) for each in (MEGATRON_LM, MEGATRON_CORE)
    )
    (held_old, held_new) = (plan_memory(described, costs)[0, 0] for costs in (old, new))
    assert 2 * held_old.gradients == held_new.gradients
    assert held_old.optimizer == held_new.optimizer
    links = nodes(2, gb_per_s=1e-3)
    summed = [sum(s.end_s - s.start_s for s in simulate(described, links, costs).syncs) for costs in (old, new)]
    assert 2 * summed[0] == pytest.approx(summed[1])


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(PlanError, match=r"megatron-lm: stages count \[2, 4\] microbatches"):
        run(unequal_microbatches(), runtime=MEGATRON_LM)
    with pytest.raises(PlanError, match=r"megatron-lm: this runtime does not split backwards; set wgrad_delay"):
        run(split(pipeline(2, num_samples=2), [0, None]), runtime=MEGATRON_LM)
    with pytest.raises(PlanError, match=r"megatron-lm: in_flight \[4, 1\], this runtime keeps \[2, 1\]"):
        run(pipeline(2, num_samples=8, depths=[4, 1]), runtime=MEGATRON_LM)
    whole = pipeline(2, num_samples=2)
    other = whole.with_replica(0, dataclasses.replace(whole.replicas[0], schedule=gpipe.__name__))
    with pytest.raises(PlanError, match=r"megatron-lm: this runtime has no schedule 'gpipe'; set it to 1f1b"):
        run(other, runtime=MEGATRON_LM)
