"""Is it the plan of this launch? Ranks, model, sequence length and batch are compared with the flags."""

import dataclasses
from typing import Any

import pytest

from hetero.errors import PlanError
from hetero.plan.validate import validate_launch
from tests.helpers.models import gpt2_model
from tests.helpers.plans import uneven_plan


def launch(**changes: Any) -> None:
    launched: dict[str, Any] = {"world_size": 8, "model": gpt2_model(), "seq_length": 16, "global_batch_size": 12}
    validate_launch(uneven_plan(), **{**launched, **changes})


def test_the_plan_of_this_launch_is_accepted() -> None:
    launch()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 7}, r"it is for 8 ranks \(1 of them idle\), but 7 were launched"),
        ({"model": gpt2_model(num_layers=8)}, "it has num_layers 6, not 8 as given by the flags"),
        ({"seq_length": 32}, "seq_length is 16, but --seq-length is 32"),
        ({"global_batch_size": 24}, "global_batch_size is 12, but --global-batch-size is 24"),
    ],
)
def test_the_plan_of_another_launch_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        launch(**changes)


def test_an_illegal_plan_is_refused_before_it_is_compared() -> None:
    illegal = dataclasses.replace(uneven_plan(), idle_ranks=(9,))
    with pytest.raises(PlanError, match=r"but not \[7\]"):
        validate_launch(illegal, world_size=4, model=gpt2_model(), seq_length=16, global_batch_size=12)
