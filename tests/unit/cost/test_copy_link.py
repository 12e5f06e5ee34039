"""Copies of all kinds share a link each way, and wait for one another there."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.cost.simulation.activation_copies import ActivationCopies, BlockCopy, LaneCopies
from hetero.cost.simulation.copy_link import KEPT, CopyLink
from hetero.cost.simulation.simulator import simulate
from hetero.plan.ir import GradientSyncPlan
from hetero.plan.offload import Offload
from hetero.schedule.actions import Action, ActionKind
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link
from hetero.spec.parameters import stage_parameters
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

MODEL = gpt2_model(tied_embeddings=False)
COSTS = cost_model(MODEL, [profile(MODEL)])


def test_a_copy_goes_into_the_first_gap_that_has_room() -> None:
    link = CopyLink([(5.0, 6.0)])
    assert link.copy(1.0, 3.0) == 4.0
    assert link.copy(0.0, 2.0) == 8.0, "one second is free before, and one between"
    assert link.copy(0.0, 1.0) == 1.0
    assert link.copy(4.5, 0.5) == 5.0
    assert link.busy == ((0.0, 4.0), (4.5, 8.0))
    assert link.moved(-8.0).busy == ((-8.0, -4.0), (-3.5, 0.0))


def test_the_latest_intervals_are_remembered() -> None:
    link = CopyLink((2.0 * i, 2.0 * i + 1) for i in range(KEPT + 10))
    assert len(link.busy) == KEPT
    assert link.busy[-1] == (2.0 * (KEPT + 9), 2.0 * (KEPT + 9) + 1)
    assert link.copy(2.0 * (KEPT + 9), 1.0) == 2.0 * (KEPT + 10)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=30))
def test_no_two_copies_are_under_way_at_a_time(asked: list[tuple[int, int]]) -> None:
    link, taken = CopyLink(), []
    for after_s, seconds in asked:
        end_s = link.copy(after_s, seconds)
        assert end_s - seconds >= after_s
        if seconds:
            taken.append((end_s - seconds, end_s))
    assert all(end <= start for (_, end), (start, _) in pairwise(sorted(taken)))
    assert sum(end - start for start, end in link.busy) == sum(seconds for _, seconds in asked)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=30))
def test_those_that_come_in_order_are_a_queue(asked: list[tuple[int, int]]) -> None:
    link, free_s = CopyLink(), 0.0
    for after_s, seconds in sorted(asked):
        free_s = max(free_s, float(after_s)) + seconds
        assert link.copy(after_s, seconds) == free_s


F0, B0, F1, B1 = (Action(0, kind, number) for number in (0, 1) for kind in (ActionKind.F, ActionKind.B))


def test_activations_go_out_behind_gradients() -> None:
    """One block, a second each way. Its activations take 3 s out and none back, its gradients 3 s and one to add.

    0 F0 1                  4 B0 5 F1 6                11 B1 12
           1 activations 4       5 gradients 8 activations 11  12 gradients 15 added 16
    """
    block = BlockCopy(0.0, (0.0, 1.0), (0.0, 1.0), out_s=3.0, in_s=0.0, add_s=4.0, sum_s=1.0)
    copies = ActivationCopies(LaneCopies(((0, (block,)),)), [F0, B0, F1, B1])
    at_s, ends_s = 0.0, []
    for action in (F0, B0, F1, B1):
        at_s = copies.end_s(action, at_s + 1.0, seconds=1.0)
        ends_s.append(at_s)
    assert ends_s == [1.0, 5.0, 6.0, 12.0]
    assert copies.added_s == {(0, 0.0): 16.0}
    assert copies.out.busy == ((1.0, 4.0), (5.0, 11.0), (12.0, 15.0))


def test_weights_come_behind_what_an_update_brings() -> None:
    block = BlockCopy(0.0, (0.0, 1.0), (0.0, 1.0), None, None, add_s=0.0, fetch_s=2.0)
    copies = ActivationCopies(LaneCopies(((0, (block,)),), in_busy=((1.0, 5.0),)), [F0, B0])
    assert copies.end_s(F0, 1.0, seconds=1.0) == 8.0


@pytest.mark.parametrize("layer_s", [1.0, 4.0, 8.0])
def test_a_step_begins_with_weights_of_an_update_and_with_fetches_on_one_link(layer_s: float) -> None:
    """Layer 5 is updated and comes back, needed after 5 forwards of a second; the head, needed after 6, is fetched
    behind it."""
    offload = Offload(optimizer_from=5, gradients_from=6, weights_from=6)
    held = dataclasses.replace(stage(layers=(0, 6), ranks=(0,), device="A100-40", depth=1), offload=offload)
    made = sharded(plan(MODEL, [replica(held, num_samples=4)]))
    made = dataclasses.replace(made, gradient_sync=GradientSyncPlan(bucket_numel=10**9))
    every = stage_parameters(MODEL, first_layer=0, end_layer=6)
    layer, head = (sum(p.numel for p in every if low <= p.position < low + 1) for low in (5, 6))
    copy = Link(bandwidth_gb_per_s=4 * layer / layer_s / 1e9, latency_us=0.0)
    rates = (UpdateRate(threads=1, elements_per_s=1e15),)
    host = HostProfile(source="a test", memory_gib=64, updates=rates, to_device=copy, to_host=copy)
    found = simulate(made, nodes(1, gb_per_s=1000.0, host=host), COSTS)
    head_s = layer_s * head / layer
    exposed_s = found.step_s - 4 * 6 * (1.0 + 2.0)
    assert exposed_s == pytest.approx(max(0.0, layer_s - 5, layer_s + head_s - 6), abs=1e-6)
