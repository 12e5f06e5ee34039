"""The plan as data: who sits where, and how many of what."""

import dataclasses
import re

import pytest
from hypothesis import given, settings

from hetero.plan.ir import Placement, Plan
from hetero.serialization import from_json, to_json
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.strategies import legal_plans

PLAN = plan(
    gpt2_model(),
    [
        replica(
            stage(layers=(0, 4), ranks=(5, 1, 0, 4), tp=2, dp=2, mbs=3, sp=True),
            stage(layers=(4, 6), ranks=(2,), mbs=2),
            num_samples=12,
        ),
        replica(stage(layers=(0, 6), ranks=(3,)), num_samples=4),
    ],
    idle_ranks=(6,),
)


def test_ranks_are_data_parallel_major() -> None:
    assert PLAN.replicas[0].stages[0].tp_groups == ((5, 1), (0, 4))


@pytest.mark.parametrize(
    ("rank", "placement"),
    [
        (5, Placement(replica=0, stage=0, dp_rank=0, tp_rank=0)),
        (1, Placement(replica=0, stage=0, dp_rank=0, tp_rank=1)),
        (4, Placement(replica=0, stage=0, dp_rank=1, tp_rank=1)),
        (2, Placement(replica=0, stage=1, dp_rank=0, tp_rank=0)),
        (3, Placement(replica=1, stage=0, dp_rank=0, tp_rank=0)),
        (6, None),
    ],
)
def test_placement(rank: int, placement: Placement | None) -> None:
    assert PLAN.placement(rank) == placement


def test_each_stage_counts_its_own_microbatches() -> None:
    first, last = PLAN.replicas[0].stages
    assert (first.samples_per_microbatch, last.samples_per_microbatch) == (6, 2)
    assert [PLAN.replicas[0].num_microbatches(s) for s in (0, 1)] == [2, 6]


def test_replicas_take_consecutive_samples() -> None:
    assert [PLAN.first_sample(r) for r in (0, 1)] == [0, 12]


def test_a_plan_file_of_before_is_in_the_order_of_before() -> None:
    text = to_json(PLAN)
    before = re.sub(r',\s*"schedule": "1f1b"', "", text)
    assert before != text
    assert from_json(Plan, before, source="plan") == PLAN


def test_a_plan_file_of_before_shares_no_optimizer_state() -> None:
    """The field is younger than the format: who has not got it means what it meant then."""
    text = to_json(PLAN)
    assert '"distributed_optimizer": false' in text
    assert from_json(Plan, text.replace('"distributed_optimizer": false,', ""), source="old.json") == PLAN
    assert from_json(Plan, to_json(sharded(PLAN)), source="new.json").distributed_optimizer


def test_idle_ranks_belong_to_the_world() -> None:
    assert PLAN.ranks() == (5, 1, 0, 4, 2, 3, 6)
    assert PLAN.world_size == 7


def test_sequence_parallelism_splits_only_over_several_ranks() -> None:
    split = PLAN.replicas[0].stages[0]
    assert split.splits_sequence
    assert not dataclasses.replace(split, tp=1, dp=4).splits_sequence
    assert not dataclasses.replace(split, sequence_parallel=False).splits_sequence


@pytest.mark.parametrize(
    ("layers", "num_layers", "numbers"),
    [
        ((0, 4), 4, [0, 1, 2, 3]),
        ((0, 2.5), 2.5, [0, 1, 2]),
        ((2.5, 4), 1.5, [2, 3]),
        ((2.5, 3.5), 1, [2, 3]),
        ((2, 2.5), 0.5, [2]),
        ((2.5, 3), 0.5, [2]),
    ],
)
def test_a_stage_may_begin_and_end_between_attention_and_mlp(
    layers: tuple[float, float], num_layers: float, numbers: list[int]
) -> None:
    cut = stage(layers=layers, ranks=(0,))
    assert (cut.start, cut.end) == layers
    assert cut.num_layers == num_layers
    assert list(cut.layer_numbers) == numbers, "those of which it has at least a half"


def test_plans_compare_by_value_and_are_frozen() -> None:
    same = dataclasses.replace(PLAN)
    assert same is not PLAN
    assert same == PLAN
    assert hash(same) == hash(PLAN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.seq_length = 32  # type: ignore[misc]


@given(legal_plans())
@settings(max_examples=30, deadline=None)
def test_every_rank_finds_itself(random_plan: Plan) -> None:
    assert sorted(random_plan.ranks()) == list(range(random_plan.world_size))
    for rank in random_plan.ranks():
        placements = random_plan.placements(rank)
        assert random_plan.placement(rank) == (placements[0] if placements else None)
        assert (rank in random_plan.idle_ranks) == (not placements)
        for place in placements:
            found = random_plan.replicas[place.replica].stages[place.stage]
            assert found.tp_groups[place.dp_rank][place.tp_rank] == rank
            assert dataclasses.replace(place, stage=0) == dataclasses.replace(placements[0], stage=0)
        if placements:
            group = random_plan.replicas[placements[0].replica].group_of(placements[0].stage)
            assert tuple(place.stage for place in placements) == group


def test_stages_on_the_same_ranks_are_one_device_group() -> None:
    turns = (stage(layers=(s, s + 1), ranks=ranks, depth=9) for s, ranks in enumerate([(2,), (0,), (1,)] * 2))
    made = plan(gpt2_model(), [replica(*turns, num_samples=4)], idle_ranks=(3,))
    (held,) = made.replicas
    assert held.is_interleaved
    assert held.device_groups == ((0, 3), (1, 4), (2, 5))
    assert [held.group_of(s) for s in (0, 4, 5)] == [(0, 3), (1, 4), (2, 5)]
    assert made.ranks() == (2, 0, 1, 3)
    assert made.placements(0) == (Placement(0, 1, 0, 0), Placement(0, 4, 0, 0))
    assert made.placement(0) == Placement(0, 1, 0, 0)
    assert made.placements(3) == ()
    assert not PLAN.replicas[0].is_interleaved
