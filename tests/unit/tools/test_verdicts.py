"""Whether plans agree: what is no number agrees with nothing, wherever it stands among those that do."""

import math
from types import SimpleNamespace

import pytest
import torch

from hetero.runtime.optimizer import StepResult
from hetero.spec.parameters import parameters
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tools import race_plans, verify_plan
from tools.verify_plan import Shards

MODEL = gpt2_model(num_layers=1)
PLAN = plan(MODEL, [replica(stage(layers=(0, 1), ranks=(0,)))], precision="fp64")
FIRST, *_, LAST = (parameter.name for parameter in parameters(MODEL) if not parameter.name.endswith("bias"))


def weights(**changed: float) -> dict[str, torch.Tensor]:
    """All 0.5, but biases, which are 0, and the last element of those that are ``changed``."""
    made = {}
    for parameter in parameters(MODEL):
        made[parameter.name] = torch.full(
            parameter.shape, 0.0 if parameter.name.endswith("bias") else 0.5, dtype=torch.float64
        )
        if parameter.name in changed:
            made[parameter.name].view(-1)[-1] = changed[parameter.name]
    return made


def results(*losses: float) -> list[StepResult]:
    return [StepResult(loss, num_tokens=1, grad_norm=1.0, skipped=False) for loss in losses]


@pytest.mark.parametrize(
    ("ours", "theirs", "losses", "agrees"),
    [
        ({}, {}, (2.0, 1.0), True),
        ({LAST: 0.5 + 1e-12}, {}, (2.0, 1.0 + 1e-12), True),
        ({LAST: 0.5 + 1e-6}, {}, (2.0, 1.0), False),
        ({}, {}, (2.0 + 1e-6, 1.0), False),
        ({FIRST: math.nan}, {}, (2.0, 1.0), False),
        ({LAST: math.nan}, {}, (2.0, 1.0), False),
        ({LAST: math.nan}, {LAST: math.nan}, (2.0, 1.0), False),
        ({LAST: math.inf}, {}, (2.0, 1.0), False),
        ({}, {}, (2.0, math.nan), False),
        ({}, {}, (math.nan, 1.0), False),
    ],
)
def test_verdict_on_a_plan(
    ours: dict[str, float],
    theirs: dict[str, float],
    losses: tuple[float, ...],
    agrees: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = [Shards(1, 0, weights(**ours))]
    assert verify_plan._report(PLAN, results(*losses), results(2.0, 1.0), held, weights(**theirs)) is agrees
    said = capsys.readouterr().out
    assert ("THEY DO NOT AGREE" in said) is not agrees
    for name, value in ours.items():
        assert f"of the largest in {name} " in said or agrees or not math.isnan(value)


@pytest.mark.parametrize(
    ("losses", "agrees"),
    [
        ([(2.0, 1.0), (2.0, 1.0 + 1e-6)], True),
        ([(2.0, 1.0), (2.0, 1.1)], False),
        ([(2.0, 1.0), (2.0, math.nan)], False),
        ([(2.0, 1.0), (2.0, 1.0), (math.nan, 1.0)], False),
        ([(2.0, math.nan), (2.0, 1.0)], False),
        ([(2.0, math.nan), (2.0, math.nan)], False),
        ([(2.0, 1.0)], True),
        ([(2.0, math.nan)], False),
    ],
)
def test_verdict_on_a_race(losses: list[tuple[float, ...]], agrees: bool, capsys: pytest.CaptureFixture[str]) -> None:
    step = SimpleNamespace(step_s=1.0)
    racers = [SimpleNamespace(name=str(i), predicted=step, executed=step, losses=each) for i, each in enumerate(losses)]
    assert race_plans._print(racers, 0.0) is agrees
    assert ("are NOT the same" in capsys.readouterr().out) is not agrees


def test_steps_of_all_trainings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(verify_plan.WorkProgress, "show", lambda _, done, text: told.append((done, text)))
    with verify_plan._Steps(2) as steps:
        steps.count("under the plan")
        steps.count("in one process")
    assert told == [(1, "step 1 of 2, under the plan"), (2, "step 2 of 2, in one process")]
