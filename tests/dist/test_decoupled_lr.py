"""A learning rate of their own for word embedding and output layer: who has it, and that plans do not change it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from hetero.plan.ir import Plan
from hetero.runtime.optimizer import AdamOptions, DecoupledRate
from hetero.spec.parameters import EMBEDDING, OUTPUT
from tests.helpers.comparison import assert_same_training
from tests.helpers.host_training import left_to_hosts, train_on_host
from tests.helpers.layouts import layout
from tests.helpers.plans import sharded
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import ADAM, SMALL_BUCKETS, Trace, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

NUM_STEPS = 3
RATE = 3e-3
DECOUPLED = dataclasses.replace(ADAM, decoupled=DecoupledRate(lr=RATE, min_lr=0.0))
TIED, UNTIED = layout("depths-1+2+3", "gpt2-tied"), layout("everything", "llama-gqa")


def alone(plan: Plan, adam: AdamOptions) -> Trace:
    trace: Trace = run_alone(
        train, one_process_plan(plan), NUM_STEPS, SMALL_BUCKETS, None, None, "every step", "cpu", adam
    )
    return trace


@pytest.mark.slow
@pytest.mark.rotates("embeddings", every=2, turn=0)
@pytest.mark.parametrize(("plan", "own"), [(TIED, {EMBEDDING}), (UNTIED, {EMBEDDING, OUTPUT})], ids=["tied", "untied"])
def test_who_has_a_rate_of_its_own(plan: Plan, own: set[str]) -> None:
    """Of AdamW's first step every change is in proportion to the rate; all others are the same bit for bit."""
    start, plain, apart = (
        alone(plan, adam).weights[0] for adam in (dataclasses.replace(ADAM, lr=0.0), ADAM, DECOUPLED)
    )
    assert own <= start.keys()
    for name, first in start.items():
        if name in own:
            expected = (plain[name] - first) / ADAM.lr
            assert np.abs(expected).max() > 0.5
            np.testing.assert_allclose((apart[name] - first) / RATE, expected, rtol=0, atol=1e-9)
        else:
            np.testing.assert_array_equal(apart[name], plain[name])


@pytest.mark.rotates("layouts", every=2, turn=1)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(TIED, id="tied", marks=pytest.mark.slow),
        pytest.param(sharded(TIED), id="tied-shared-optimizer", marks=pytest.mark.slow),
        pytest.param(sharded(UNTIED), id="untied-shared-optimizer", marks=pytest.mark.slow),
        pytest.param(left_to_hosts(TIED, speculate=True), id="tied-previewed-on-hosts", marks=pytest.mark.slow),
        pytest.param(left_to_hosts(UNTIED, speculate=False), id="untied-on-hosts", marks=pytest.mark.slow),
    ],
)
def test_a_layout_trains_like_one_process(plan: Plan) -> None:
    arguments: tuple[Any, ...] = (plan, NUM_STEPS, SMALL_BUCKETS, DECOUPLED, True, 0.0)
    traces = run_ranks(train_on_host, plan.world_size, *arguments, timeout_s=120)
    assert_same_training(plan, traces, alone(plan, DECOUPLED), tolerance=1e-9)
