"""The plan that Megatron-LM's flags describe."""

from typing import Any

import pytest

from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.plan.offload import Offload, place_of, updates_on_host
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.plan.validate import validate
from hetero.spec.parameters import stage_parameters
from tests.helpers.models import llama_model


def uniform(**changes: Any) -> Plan:
    flags: dict[str, Any] = {
        "model": llama_model(),
        "world_size": 8,
        "tp": 2,
        "pp": 2,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "seq_length": 16,
        "device": "cpu",
    }
    return uniform_plan(UniformLayout(**{**flags, **changes}))


def test_ranks_are_laid_out_as_megatron_does() -> None:
    """Tensor parallelism varies fastest, then data, then pipeline."""
    ranks = [[stage.ranks for stage in replica.stages] for replica in uniform().replicas]
    assert ranks == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]


def test_layers_and_samples_are_shared_evenly() -> None:
    plan = uniform()
    assert [(stage.first_layer, stage.end_layer) for stage in plan.replicas[0].stages] == [(0, 3), (3, 6)]
    assert [replica.num_samples for replica in plan.replicas] == [4, 4]


def test_1f1b_keeps_as_many_as_stages_remain_and_no_more_than_it_has() -> None:
    def depths(**changes: Any) -> list[int]:
        return [stage.in_flight for stage in uniform(tp=1, pp=3, world_size=3, **changes).replicas[0].stages]

    assert depths(global_batch_size=8) == [3, 2, 1]
    assert depths(global_batch_size=2) == [2, 2, 1]
    assert depths(global_batch_size=8, schedule="gpipe") == [8, 8, 8]


def test_stages_of_a_rank_are_pp_apart() -> None:
    """As Megatron-LM deals its model chunks, each of as many layers."""
    plan = uniform(stages_per_rank=3, model=llama_model(num_layers=12))
    for replica, ranks in zip(plan.replicas, ([(0, 1), (4, 5)], [(2, 3), (6, 7)]), strict=True):
        assert [stage.ranks for stage in replica.stages] == ranks * 3
        assert [(stage.first_layer, stage.end_layer) for stage in replica.stages] == [
            (s, s + 2) for s in range(0, 12, 2)
        ]
        assert replica.device_groups == ((0, 2, 4), (1, 3, 5))
    validate(plan)


def test_the_depths_of_interleaved_stages_are_the_warm_up() -> None:
    """2 (pp - p - 1) + (v - 1) pp + 1 microbatches of whichever stage, for pipeline position p, of v stages there."""

    def warm_ups(**changes: Any) -> list[int]:
        plan = uniform(tp=1, pp=3, world_size=3, stages_per_rank=2, **changes)
        validate(plan)
        (replica,) = plan.replicas
        return [sum(replica.stages[s].in_flight for s in group) for group in replica.device_groups]

    assert warm_ups(global_batch_size=9) == [4 + 3 + 1, 2 + 3 + 1, 3 + 1]
    assert warm_ups(global_batch_size=2) == [4, 4, 4], "no more than there are"
    assert warm_ups(global_batch_size=9, schedule="gpipe") == [18, 18, 18]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (1, 6), (2, 3)])
@pytest.mark.parametrize("global_batch_size", [2, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_it_is_legal(tp: int, pp: int, global_batch_size: int, schedule: str) -> None:
    plan = uniform(world_size=2 * tp * pp, tp=tp, pp=pp, global_batch_size=global_batch_size, schedule=schedule)
    validate(plan)


@pytest.mark.parametrize(("pp", "stages_per_rank"), [(2, 2), (2, 3), (3, 2), (4, 3)])
@pytest.mark.parametrize("global_batch_size", [2, 6, 10, 16])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_it_is_legal_interleaved(pp: int, stages_per_rank: int, global_batch_size: int, schedule: str) -> None:
    """Also with microbatches that make no full round."""
    plan = uniform(
        world_size=2 * pp,
        tp=1,
        pp=pp,
        stages_per_rank=stages_per_rank,
        global_batch_size=global_batch_size,
        schedule=schedule,
        model=llama_model(num_layers=12),
    )
    validate(plan)


def test_the_other_flags_arrive() -> None:
    flags = {"sequence_parallel": True, "precision": "bf16", "recompute": "full", "distributed_optimizer": True}
    plan = uniform(device="H100", hidden_dropout=0.1, attention_dropout=0.2, **flags)
    for _, _, stage in plan.stages():
        assert (stage.sequence_parallel, stage.recompute, stage.device) == (True, "full", "H100")
    assert (plan.precision, plan.seq_length, plan.global_batch_size) == ("bf16", 16, 8)
    assert plan.distributed_optimizer
    assert (plan.hidden_dropout, plan.attention_dropout) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 6}, "6 ranks are no multiple of --tensor-model-parallel-size 2 x --pipeline.* 2"),
        ({"pp": 4}, "--pipeline-model-parallel-size 4 does not divide --num-layers 6; .*--hetero-plan"),
        (
            {"stages_per_rank": 2},
            "--pipeline-model-parallel-size 2 x 2 stages per rank does not divide --num-layers 6; .*--hetero-plan",
        ),
        ({"stages_per_rank": 0}, "--num-virtual-stages-per-pipeline-rank is 0, must be at least 1"),
        ({"pp": 1, "stages_per_rank": 2}, "2 stages per rank need --pipeline-model-parallel-size 2 or more, got 1"),
        (
            {"pp": 2, "tp": 1, "world_size": 2, "stages_per_rank": 3, "model": llama_model(num_layers=7)},
            "does not divide --num-layers 7",
        ),
        ({"global_batch_size": 9}, "--global-batch-size 9 is no multiple of --micro-batch-size 1 x 2"),
        ({"micro_batch_size": 3}, "--global-batch-size 8 is no multiple of --micro-batch-size 3 x 2"),
        ({"tp": 0}, "--tensor-model-parallel-size is 0, must be at least 1"),
        ({"pp": -1}, "--pipeline-model-parallel-size is -1, must be at least 1"),
        ({"micro_batch_size": 0}, "--micro-batch-size is 0, must be at least 1"),
        ({"global_batch_size": 0}, "--global-batch-size is 0, must be at least 1"),
        ({"activation_offload_num_layers": 8}, "--cpu-offloading-num-layers is 8, must be below --num-layers"),
        ({"activation_offload_num_layers": 2, "pp": 2}, "--pipeline-model-parallel-size is 2; leave one of them out"),
        (
            {"activation_offload_num_layers": 2, "pp": 1, "recompute": "selective"},
            "--recompute-granularity is selective, which keeps little",
        ),
    ],
)
def test_degrees_that_do_not_divide_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        uniform(**changes)


def test_fp8_is_that_of_all_stages() -> None:
    assert all(stage.fp8 for _, _, stage in uniform(precision="bf16", fp8=True).stages())
    assert not any(stage.fp8 for _, _, stage in uniform(precision="bf16").stages())


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("share", [1e-3, 0.2, 0.5, 0.9, 1.0])
def test_a_share_of_each_stage_is_left_to_hosts(share: float, pp: int, tied: bool) -> None:
    """At least that share, and with one layer less it would be less."""
    model = llama_model(tied_embeddings=tied)
    plan = uniform(model=model, pp=pp, distributed_optimizer=True, optimizer_offload_fraction=share)
    validate(plan)
    for stage in plan.replicas[0].stages:
        held = stage_parameters(model, first_layer=stage.start, end_layer=stage.end)
        here = [(updates_on_host(p.position, [stage]), int(place_of(p.position, [stage])[1]), p.numel) for p in held]
        wanted = share * sum(numel for *_, numel in here)
        least = min(position for on_host, position, _ in here if on_host)
        assert sum(numel for on_host, _, numel in here if on_host) >= wanted
        assert sum(numel for on_host, position, numel in here if on_host and position != least) < wanted


def test_everything_or_nothing_is_left_to_hosts() -> None:
    for share, first in ((0.0, [None, None]), (1.0, [-1.0, 3.0])):
        plan = uniform(distributed_optimizer=True, optimizer_offload_fraction=share)
        assert [stage.offload.optimizer_from for stage in plan.replicas[0].stages] == first


def test_activations_of_the_first_layers_wait_on_hosts() -> None:
    plan = uniform(pp=1, activation_offload_num_layers=2)
    validate(plan)
    for replica in plan.replicas:
        assert [stage.offload for stage in replica.stages] == [Offload(activations_until=1.0)]
