"""What is due after which step of a run."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.pretrain.training_loop import TrainingLoop
from tests.helpers.flags import parse


def evaluated_steps(flags: str, *, last: int) -> list[int]:
    """The steps after which a run of ``last`` steps evaluates."""
    steps: list[int] = []
    detector = SimpleNamespace(doing="")
    evaluation = SimpleNamespace(split="valid", loss=lambda *_: steps.append(int(detector.doing.split()[-1])))
    loop = TrainingLoop(
        config=parse(flags),
        context=cast(Any, None),
        session=cast(Any, SimpleNamespace(trainer=None)),
        evaluations=[cast(Any, evaluation)],
        saver=cast(Any, None),
        stop=cast(Any, None),
        metrics=None,
        figures=cast(Any, None),
        detector=cast(Any, detector),
        elastic=cast(Any, None),
    )
    for step in range(1, last + 1):
        loop._evaluate(step, last=step == last)
    return steps


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--eval-iters 1 --eval-interval 3", [3, 6, 9, 10]),
        # As in Megatron-LM, where a run evaluates after a step that is a multiple of the interval and not below this.
        ("--eval-iters 1 --eval-interval 3 --start-eval-at-iter 6", [6, 9, 10]),
        ("--eval-iters 1 --eval-interval 3 --start-eval-at-iter 7", [9, 10]),
        ("--eval-iters 1 --eval-interval 3 --start-eval-at-iter 100", [10]),
    ],
)
def test_a_run_evaluates_from_a_step_on_and_at_its_end(flags: str, steps: list[int]) -> None:
    assert evaluated_steps(flags, last=10) == steps
