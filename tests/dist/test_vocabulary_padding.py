"""Padding rows of the vocabulary, which a tensor-parallel rank may have some of, none, or nothing else."""

import dataclasses

import pytest

from hetero.plan.ir import Plan
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import one_process, train

pytestmark = pytest.mark.dist

NUM_STEPS = 2
MOSTLY_PADDING = {"num_layers": 2, "vocab_size": 21, "padded_vocab_size": 64}
"""Of four ranks the first has no padding, the second some, and the last two have no word."""


def four_ranks(tied: bool) -> Plan:
    model = (gpt2_model if tied else llama_model)(**MOSTLY_PADDING)
    stages = stage(layers=(0, 1), ranks=(0,)), stage(layers=(1, 2), ranks=range(1, 5), tp=4, sp=True)
    return dataclasses.replace(plan(model, [replica(*stages, num_samples=4)]), precision="fp64")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_padding_on_several_ranks_takes_no_part_in_the_loss(tied: bool) -> None:
    made = four_ranks(tied)
    ranks = run_ranks(train, made.world_size, made, NUM_STEPS)
    assert_same_training(made, ranks, one_process(made, NUM_STEPS), tolerance=1e-9)
