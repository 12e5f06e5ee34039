"""Whatever the plan: loss, gradients, gradient norm and updated weights are those of one process.

In float64, to 1e-9 relative to the largest element of each tensor, over three clipped AdamW steps.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero.distributed.process_groups import gradient_groups
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.runtime.options import DataParallelOptions
from hetero.spec.parameters import parameters
from tests.helpers.comparison import assert_same_training
from tests.helpers.layouts import layouts
from tests.helpers.plans import sharded
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Trace, one_process_plan, train

pytestmark = pytest.mark.dist

NUM_STEPS = 3
AT_THE_END = DataParallelOptions(bucket_numel=3000, overlap_grad_reduce=False)
SHARDED = DataParallelOptions(bucket_numel=3000, overlap_param_gather=True)
TOLERANCE = 1e-9
LAYOUTS = list(layouts())
ALWAYS = ("tp-1|2|4-sp", "micro-batch-2|4|1", "everything", "moe")
"""Layouts whose unequal shares are tested in every style."""

FAST = (
    ("tp-1|2|4-sp", "gpt2-tied"),
    ("micro-batch-2|4|1", "llama-gqa"),
    ("everything", "llama-tied"),
    ("half-cuts", "moe"),
    ("half-cut-and-whole", "llama-gqa"),
)
"""Layouts and styles that the fast run of the tests keeps."""


def _cases() -> Iterator[Any]:
    for name, style, plan in LAYOUTS:
        marks = () if (name, style) in FAST else pytest.mark.slow
        yield pytest.param(style, plan, id=f"{name}-{style}", marks=marks)


@functools.cache
def oracle(plan: Plan) -> Trace:
    """The same training in one process."""
    (trace,) = run_ranks(train, 1, plan, NUM_STEPS)
    return trace


@pytest.mark.parametrize(("style", "plan"), _cases())
def test_layout_equals_one_process(style: str, plan: Plan) -> None:
    validate(plan)
    traces = run_ranks(train, plan.world_size, plan, NUM_STEPS)
    assert_same_training(plan, traces, oracle(one_process_plan(plan)), tolerance=TOLERANCE)


def _sharded_cases() -> Iterator[Any]:
    """Every layout that has something to share. In every other style, shares are unequal where stages share."""
    for name, style, plan in LAYOUTS:
        groups = gradient_groups(plan)
        marks = () if (name, style) == ("everything", "llama-gqa") else pytest.mark.slow
        if groups and style != "gpt2-tied":
            yield pytest.param(style, plan, id=f"{name}-{style}-equal", marks=marks)
        spans_stages = any(not any(set(ranks) <= set(stage.ranks) for _, _, stage in plan.stages()) for ranks in groups)
        if spans_stages and (style != "llama-gqa" or name in ALWAYS):
            yield pytest.param(style, with_unequal_shares(plan), id=f"{name}-{style}-unequal", marks=pytest.mark.slow)


def with_unequal_shares(plan: Plan) -> Plan:
    """Each device group takes another share of what it has in common with others."""
    groups = dict.fromkeys(stage.ranks for _, _, stage in plan.stages())
    shares = dict(zip(groups, itertools.count(1), strict=False))
    replicas = [
        dataclasses.replace(
            each,
            stages=tuple(dataclasses.replace(stage, optimizer_share=shares[stage.ranks]) for stage in each.stages),
        )
        for each in plan.replicas
    ]
    return dataclasses.replace(plan, replicas=tuple(replicas))


@pytest.mark.parametrize(("style", "plan"), _sharded_cases())
def test_distributed_optimizer_equals_one_process(style: str, plan: Plan) -> None:
    """Sharded moments, gradients reduced beside the backward and weights gathered beside the forward."""
    validate(plan)
    traces = run_ranks(train, plan.world_size, sharded(plan), NUM_STEPS, SHARDED)
    assert_same_training(plan, traces, oracle(one_process_plan(plan)), tolerance=TOLERANCE)


@pytest.mark.slow
def test_the_state_of_the_optimizer_is_held_once() -> None:
    """Over all ranks the shards add up to the state of one process, but for the padding between segments."""
    _, _, plan = next(row for row in LAYOUTS if row[:2] == ("everything", "llama-gqa"))
    (alone,) = run_ranks(train, 1, one_process_plan(plan), 1)
    shared = [trace for trace in run_ranks(train, plan.world_size, sharded(plan), 1, SHARDED) if trace is not None]
    whole = [trace for trace in run_ranks(train, plan.world_size, plan, 1) if trace is not None]
    total = sum(trace.optimizer_bytes for trace in shared)
    assert alone.optimizer_bytes <= total < 1.15 * alone.optimizer_bytes
    assert sum(trace.optimizer_bytes for trace in whole) > 2 * total


def test_every_rank_of_a_segment_ends_with_the_same_bits() -> None:
    """Replicated weights never drift apart: what two ranks both hold is equal bit for bit."""
    _, _, plan = next(row for row in LAYOUTS if row[:2] == ("everything", "gpt2-tied"))
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
def test_overlap_changes_nothing() -> None:
    """Reducing buckets beside the backward gives the bits that reducing them after it gives."""
    _, _, plan = next(row for row in LAYOUTS if row[:2] == ("everything", "llama-gqa"))
    with_overlap = run_ranks(train, plan.world_size, plan, NUM_STEPS)
    without = run_ranks(train, plan.world_size, plan, NUM_STEPS, AT_THE_END)
    for ours, theirs in zip(with_overlap, without, strict=True):
        if ours is not None:
            assert ours.grad_norms == theirs.grad_norms
            for name, weight in ours.weights[-1].items():
                np.testing.assert_array_equal(weight, theirs.weights[-1][name])
