"""What goes to the host: CP-SAT's choice against every choice there is."""

import inspect
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero.cost.offload.blocks import OffloadChoice
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.offload import constraints
from hetero.planner.offload.choose import OffloadAnswer, choose_offload
from hetero.units import US_PER_S
from tests.unit.planner.offload_stages import (
    Question,
    any_below,
    arrays_of,
    costs,
    every_choice,
    least_step,
    least_step_of_host,
    random_question,
    step,
)


def asked(question: Question, *, freely: bool = True) -> OffloadAnswer:
    return choose_offload(
        question.described(), Deadline(600, CountedWork()), shape="free" if freely else "positions", seed=1
    )


def step_us(question: Question, answer: OffloadAnswer) -> int:
    """Of the answer's choices, as the arrays have it; they have to fit."""
    found = [costs(question, index, *each) for index, each in enumerate(arrays_of(answer.choices))]
    steps, host = step(question, found)
    assert int(host[0]) <= question.memory
    for stage, of_stage in zip(question.stages, found, strict=True):
        assert int(of_stage.device[0]) <= stage.capacity
    return int(steps[0])


def check_answer(question: Question, answer: OffloadAnswer) -> int | None:
    """Whether the answer is what it says; its microseconds, ``None`` if nothing fits."""
    if answer.verdict == "none":
        return None
    assert answer.proven
    assert answer.step is not None
    assert answer.step.fits(question.described())
    shortest = round(answer.rounded_step_s * US_PER_S)
    assert shortest == round(answer.bound_s * US_PER_S) == step_us(question, answer)
    # Several threads divide an update into parts of a microsecond.
    assert shortest - 1 <= answer.step.step_s * US_PER_S <= shortest + 1e-3
    return shortest


def test_no_constraint_is_forgotten() -> None:
    """Each function of the module that constrains a model is in the list, but for the one that is asked for."""
    defined = {
        name
        for name, value in vars(constraints).items()
        if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["model", "host", "question"]
    }
    listed = {each.__name__ for each in constraints.CONSTRAINTS}
    assert defined - listed == {constraints.choices_are_positions.__name__}


def test_the_choice_is_the_best_of_every_choice() -> None:
    """20736 choices of four blocks, with previews and without."""
    draw = random.Random(0)
    found = []
    for _ in range(30):
        question = random_question(draw, [draw.randint(1, 4)])
        shortest = check_answer(question, asked(question))
        assert shortest == least_step(question)
        found.append(shortest)
    assert 0 < found.count(None) < 15, "memory is to bind, and mostly not to refuse"


def test_what_is_left_out_of_the_search_for_a_better_choice_is_none() -> None:
    """The search that the larger stages go through finds the best choice, and none that is better."""
    draw = random.Random(1)
    for _ in range(12):
        question = random_question(draw, [draw.randint(1, 4)])
        shortest = least_step(question)
        if shortest is None:
            assert not any_below(question, 10**12)
        else:
            assert any_below(question, shortest + 1)
            assert not any_below(question, shortest)


def rotating(count: int, row: str) -> list[Any]:
    """Numbers of parts, of which a run takes one."""
    return [pytest.param(part, marks=(pytest.mark.slow, pytest.mark.rotates(row, every=2))) for part in range(count)]


@pytest.mark.timeout(900)  # Of part 5 one stage takes 210 seconds of a core to be proven.
@pytest.mark.parametrize("part", rotating(20, "large stages"))
def test_no_choice_is_better_for_200_stages_of_up_to_eight_blocks(part: int) -> None:
    draw = random.Random(100 + part)
    for _ in range(10):
        question = random_question(draw, [draw.randint(1, 8)])
        shortest = check_answer(question, asked(question))
        assert not any_below(question, 10**12 if shortest is None else shortest)


@pytest.mark.parametrize("most_blocks", [(3, 3), (2, 2, 2)], ids=["two stages", "three stages"])
def test_stages_of_one_host_are_chosen_together(most_blocks: tuple[int, ...]) -> None:
    """They share its memory, its threads, and the links of its switches."""
    draw = random.Random(2)
    for _ in range(8):
        question = random_question(draw, [draw.randint(1, most) for most in most_blocks])
        assert check_answer(question, asked(question)) == least_step_of_host(question)


@pytest.mark.parametrize("most_blocks", [(3, 3), (2, 2, 2)], ids=["two stages", "three stages"])
@pytest.mark.parametrize("part", rotating(6, "many hosts"))
def test_many_stages_of_one_host_are_chosen_together(part: int, most_blocks: tuple[int, ...]) -> None:
    draw = random.Random(200 + part)
    for _ in range(10):
        question = random_question(draw, [draw.randint(1, most) for most in most_blocks])
        assert check_answer(question, asked(question)) == least_step_of_host(question)


def by_position(question: Question) -> int | None:
    """The shortest step of one stage by positions, by pricing all of them."""
    stage = question.stages[0]
    choices, speculate = every_choice(stage)
    o, g, w, a, r = np.moveaxis(choices, -1, 0)
    allowed = np.ones(len(choices), dtype=bool)
    for held in (o, g, w):
        allowed &= (np.diff(held, axis=-1) >= 0).all(-1)
    allowed &= (a[:, 1:] <= np.maximum(a, r)[:, :-1]).all(-1)
    layers = [j for j, block in enumerate(stage.blocks) if block.again is not None]
    allowed &= (np.diff(r[:, layers], axis=-1) <= 0).all(-1)
    found = costs(question, 0, choices[allowed], speculate[allowed], question.threads // sum(stage.cards))
    steps, host = step(question, [found])
    fits = (found.device <= stage.capacity) & (host <= question.memory)
    return int(steps[fits].min()) if fits.any() else None


def test_a_plan_says_it_by_position() -> None:
    draw = random.Random(4)
    longer = 0
    for _ in range(25):
        question = random_question(draw, [draw.randint(2, 4)])
        shortest = check_answer(question, asked(question, freely=False))
        assert shortest == by_position(question)
        longer += shortest != least_step(question)
    assert longer > 0, "then the docs need not say how much longer"


def test_nothing_leaves_a_device_that_has_room() -> None:
    """Nothing is to be gained where the host updates slower than the device and no forward waits for the device."""
    question = random_question(random.Random(5), [4])
    stage = question.stages[0]
    roomy = replace(
        question,
        stages=(replace(stage, capacity=10**6, blocks=tuple(replace(each, update=0) for each in stage.blocks)),),
    )
    assert asked(roomy).choices == (
        OffloadChoice(
            blocks=OffloadChoice.nothing(roomy.described().stages[0]).blocks, threads=roomy.threads // sum(stage.cards)
        ),
    )


def test_previews_are_left_out_where_they_are_not_allowed() -> None:
    draw = random.Random(6)
    questions = [random_question(draw, [3]) for _ in range(12)]
    previewed = [each for each in questions if any(choice.speculate for choice in asked(each).choices)]
    assert previewed
    for question in previewed:
        answer = choose_offload(replace(question.described(), may_speculate=False), Deadline(60), shape="free")
        assert not any(choice.speculate for choice in answer.choices)
        assert answer.verdict == "none" or answer.rounded_step_s >= asked(question).rounded_step_s


def test_rounding_is_against_the_choice() -> None:
    """In bytes and seconds that are not whole, a choice fits, and takes no longer than the model says."""
    draw = random.Random(7)
    for _ in range(10):
        described = random_question(draw, [draw.randint(1, 4)]).described()
        stage = described.stages[0]
        uneven = replace(
            described,
            stages=(
                replace(
                    stage,
                    blocks=tuple(
                        replace(
                            each,
                            parameters=each.parameters - 12345,
                            largest=each.largest - 1234,
                            saved_bytes=each.saved_bytes - 6789 * (each.saved_bytes > 0),
                            forward_s=each.forward_s * 0.987654321,
                            backward_s=each.backward_s * 1.0123456789,
                        )
                        for each in stage.blocks
                    ),
                    fill_s=stage.fill_s * 0.77777777,
                ),
            ),
        )
        answer = choose_offload(uneven, Deadline(60), shape="free")
        if answer.step is not None:
            assert answer.step.fits(uneven)
            # Some ten terms of each block, for each microbatch.
            most = 10 * len(stage.blocks) * (uneven.num_microbatches + 2) / US_PER_S
            assert 0 <= answer.rounded_step_s - answer.step.step_s + 1e-9 <= most


def test_the_same_is_chosen_every_time() -> None:
    question = random_question(random.Random(8), [3, 3])
    assert asked(question) == asked(question)
