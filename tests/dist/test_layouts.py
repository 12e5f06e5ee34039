"""Whatever the plan: loss, gradients, gradient norm and updated weights are those of one process.

With whole and with split backwards, and with the optimizer shared: all ways in which a layout trains in one visit.

In float64, to 1e-9 relative to the largest element of each tensor, over clipped AdamW steps: two of a case that
rotates, three of the others.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero.plan.communicators import PlanCommunicators
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.runtime.options import DataParallelOptions
from hetero.spec.parameters import parameters
from tests.helpers.comparison import assert_same_training
from tests.helpers.layouts import in_turns, layout, layouts, with_delays
from tests.helpers.plans import sharded, with_unequal_shares
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Training, one_process, train, trained

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

NUM_STEPS = 3
AT_THE_END = DataParallelOptions(bucket_numel=3000, overlap_grad_reduce=False)
SHARDED = DataParallelOptions(bucket_numel=3000, overlap_param_gather=True)
TOLERANCE = 1e-9
LAYOUTS = list(layouts())
ALWAYS_UNEQUAL = ("tp-1|2|4-sp", "micro-batch-2|4|1", "everything", "moe")
"""Layouts whose unequal shares are tested in every style."""

DELAYS: dict[str, tuple[int | None, ...]] = {"as-zb-h1": (0, 1, 2, 3), "unlike": (2, None, 0, 9)}
"""Of the weights' gradients, by the index of a stage in its replica."""

SPLIT_AND_SHARDED = (
    ("everything", "gpt2-tied"),
    ("everything", "llama-gqa"),
    ("same-layer-tp-2+4", "llama-gqa"),
    ("depths-1+2+3", "gpt2-tied"),
)

ALWAYS = (
    ("tp-2|1", "gpt2-tied"),
    ("micro-batch-2|4|1", "llama-gqa"),
    ("everything", "llama-tied"),
    ("half-cuts", "moe"),
)
"""Layouts and styles that every run has."""

FAST = ("micro-batch-2|4|1", "tp-2|1")
"""Of these, the layouts that the fast one has, too."""


def _cases() -> Iterator[Any]:
    """Every layout in one style each sixth run, with either delays in turn."""
    for (name, style, plan), delays in zip(LAYOUTS, itertools.cycle(DELAYS), strict=False):
        beside = any(name == always for always, _ in ALWAYS)
        turns = pytest.mark.rotates("beside the fast ones") if beside else in_turns(name, every=6)
        marks = [] if (name, style) in ALWAYS else [turns]
        if marks or name not in FAST:
            marks.append(pytest.mark.slow)
        yield pytest.param(trainings_of(name, style, plan, delays), id=f"{name}-{style}", marks=marks)


def trainings_of(name: str, style: str, plan: Plan, delays: str) -> dict[str, Training]:
    """The layout with whole and with split backwards, and with a shared optimizer if ranks have parameters in
    common: gradients are then reduced beside the backward and weights gathered beside the forward, for which nobody may
    look at them before the end."""
    trainings = {"whole": Training(plan), f"split, {delays}": Training(with_delays(plan, DELAYS[delays]))}
    groups = PlanCommunicators(plan).gradients
    if groups and style != "gpt2-tied":
        trainings["equal shares"] = Training(sharded(plan), SHARDED, weights_at="the end")
    spans_stages = any(not any(set(ranks) <= set(stage.ranks) for _, _, stage in plan.stages()) for ranks in groups)
    if spans_stages and (style != "llama-gqa" or name in ALWAYS_UNEQUAL):
        trainings["unequal shares"] = Training(sharded(with_unequal_shares(plan)), SHARDED, weights_at="the end")
    if (name, style) in SPLIT_AND_SHARDED:
        trainings["split, equal shares"] = Training(
            sharded(with_delays(plan, DELAYS["as-zb-h1"])), SHARDED, weights_at="the end"
        )
    return trainings


@pytest.mark.parametrize("trainings", list(_cases()))
def test_a_layout_trains_like_one_process(
    trainings: dict[str, Training], num_steps: int, subtests: pytest.Subtests
) -> None:
    for training in trainings.values():
        validate(training.plan)
    for name, traces in trained(trainings, num_steps).items():
        with subtests.test(name):
            plan = trainings[name].plan
            assert_same_training(plan, traces, one_process(plan, num_steps), tolerance=TOLERANCE)


def test_every_layout_has_its_turn() -> None:
    """One of its styles, or a case that does not rotate."""
    always, rows = set(), set()
    for case in _cases():
        layout = next(name for name, style, _ in LAYOUTS if case.id == f"{name}-{style}")
        row = next((mark.args[0] for mark in case.marks if mark.name == "rotates"), None)
        if row is None:
            always.add(layout)
        else:
            rows.add(row)
    assert {name for name, _, _ in LAYOUTS} - always <= rows
    assert always == {name for name, _ in ALWAYS}


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_the_state_of_the_optimizer_is_held_once() -> None:
    """Over all ranks the shards add up to the state of one process, but for the padding between segments."""
    plan = layout("everything", "llama-gqa")
    alone = one_process(plan, 1).optimizer_bytes
    traces = trained({"shared": Training(sharded(plan), SHARDED), "whole": Training(plan)}, 1)
    held = {name: sum(trace.optimizer_bytes for trace in of if trace is not None) for name, of in traces.items()}
    assert alone <= held["shared"] < 1.15 * alone
    assert held["whole"] > 2 * alone


@pytest.mark.slow
def test_every_rank_of_a_segment_ends_with_the_same_bits() -> None:
    """Replicated weights never drift apart: what two ranks both hold is equal bit for bit."""
    plan = layout("everything", "gpt2-tied")
    seen: dict[str, np.ndarray] = {}
    for trace in run_ranks(train, plan.world_size, plan, NUM_STEPS):
        if trace is None:
            continue
        for parameter in parameters(plan.model):
            if parameter.shard_dim is None and parameter.name in trace.weights[-1]:
                weight = trace.weights[-1][parameter.name]
                np.testing.assert_array_equal(weight, seen.setdefault(parameter.name, weight))
    assert seen


@pytest.mark.slow
@pytest.mark.rotates("backwards")
@pytest.mark.parametrize("delays", [(None,), DELAYS["unlike"]], ids=["whole", "split"])
def test_overlap_changes_nothing(delays: tuple[int | None, ...]) -> None:
    """Reducing buckets beside the backward, or the last W, gives the bits that reducing them after it gives."""
    plan = with_delays(layout("everything", "llama-gqa" if delays == (None,) else "gpt2-tied"), delays)
    traces = trained({"beside": Training(plan), "after": Training(plan, AT_THE_END)}, NUM_STEPS)
    for ours, theirs in zip(traces["beside"], traces["after"], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.grad_norms == theirs.grad_norms
            for name, weight in ours.weights[-1].items():
                np.testing.assert_array_equal(weight, theirs.weights[-1][name])
