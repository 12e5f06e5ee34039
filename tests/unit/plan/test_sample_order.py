"""Whatever the plan, each sample of the global batch is read once by each stage that it passes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.plan.ir import Placement, Plan, Replica, Stage
from hetero.plan.sample_order import microbatch_indices
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.strategies import legal_plans


@st.composite
def replicas(draw: st.DrawFn) -> Replica:
    """Stages of any dp and micro_batch_size whose microbatches divide the replica's samples."""
    num_samples = draw(st.integers(1, 24))
    divisors = [n for n in range(1, num_samples + 1) if num_samples % n == 0]
    stages: list[Stage] = []
    for s in range(draw(st.integers(1, 3))):
        samples = draw(st.sampled_from(divisors))
        dp = draw(st.sampled_from([n for n in range(1, samples + 1) if samples % n == 0]))
        tp = draw(st.sampled_from([1, 2]))
        stages.append(stage(layers=(s, s + 1), ranks=range(dp * tp), dp=dp, tp=tp, mbs=samples // dp, depth=1))
    return Replica(num_samples=num_samples, stages=tuple(stages))


plans = st.lists(replicas(), min_size=1, max_size=4).map(lambda several: plan(gpt2_model(), several))


def block(a_plan: Plan, r: int, s: int, *, step: int, tp_rank: int = 0) -> list[int]:
    """Indices of all data-parallel ranks of a stage, microbatch by microbatch and rank by rank."""
    of_ranks = [
        microbatch_indices(a_plan, Placement(r, s, d, tp_rank), first_sample=step * a_plan.global_batch_size)
        for d in range(a_plan.replicas[r].stages[s].dp)
    ]
    return [i for microbatch in zip(*of_ranks, strict=True) for of_rank in microbatch for i in of_rank]


@given(plans, st.integers(0, 5))
def test_each_stage_reads_its_replicas_block_in_order(a_plan: Plan, step: int) -> None:
    for r, s, each in a_plan.stages():
        first = step * a_plan.global_batch_size + a_plan.first_sample(r)
        expected = list(range(first, first + a_plan.replicas[r].num_samples))
        for tp_rank in range(each.tp):
            assert block(a_plan, r, s, step=step, tp_rank=tp_rank) == expected


@given(plans, st.integers(0, 5))
def test_replicas_together_read_the_global_batch_of_the_step(a_plan: Plan, step: int) -> None:
    read = [i for r in range(len(a_plan.replicas)) for i in block(a_plan, r, 0, step=step)]
    size = a_plan.global_batch_size
    assert read == list(range(step * size, (step + 1) * size))


@given(legal_plans(), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_rank_with_several_stages_reads_one_set_of_samples(legal: Plan, step: int) -> None:
    """Its last stage wants the labels of the tokens that its first stage had, or that another rank's had."""
    first = step * legal.global_batch_size
    for rank in legal.ranks():
        assert len({microbatch_indices(legal, place, first_sample=first) for place in legal.placements(rank)}) <= 1


def test_written_out() -> None:
    coarse = replica(
        stage(layers=(0, 4), ranks=(0, 1), dp=2, mbs=2), stage(layers=(4, 6), ranks=(2,), mbs=1), num_samples=8
    )
    fine = replica(stage(layers=(0, 6), ranks=(3,), mbs=2), num_samples=4)
    a_plan = plan(gpt2_model(), [coarse, fine])
    assert microbatch_indices(a_plan, Placement(0, 0, 0, 0), first_sample=0) == ((0, 1), (4, 5))
    assert microbatch_indices(a_plan, Placement(0, 0, 1, 0), first_sample=0) == ((2, 3), (6, 7))
    assert microbatch_indices(a_plan, Placement(0, 1, 0, 0), first_sample=0) == tuple((i,) for i in range(8))
    assert microbatch_indices(a_plan, Placement(1, 0, 0, 0), first_sample=0) == ((8, 9), (10, 11))
    assert microbatch_indices(a_plan, Placement(1, 0, 0, 0), first_sample=24) == ((32, 33), (34, 35))
