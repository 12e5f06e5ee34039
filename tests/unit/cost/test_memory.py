"""The peak of a device: of one stage or several, with what other holders share and cut."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings

from hetero.cost import memory as memory_model
from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.stage_memory import MemoryBreakdown, memory_of_stage
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.plan.validate import validate
from hetero.spec.parameters import parameters
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.strategies import split_legal_plans
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model()
COSTS = cost_model(MODEL, [profile(MODEL)])
ROW = 4 * 2 * 16 * 32
"""Bytes of one activation: fp32, 2 samples, 16 tokens, hidden size 32."""


def test_a_plan_counts_what_its_delays_keep() -> None:
    stages = [stage(layers=(s, s + 3), ranks=(s // 3,), device="A100-40", depth=2 - s // 3, delay=s) for s in (0, 3)]
    made = plan(gpt2_model(tied_embeddings=False), [replica(*stages, num_samples=6)])
    parts = plan_memory(made, COSTS)
    assert parts[0, 0].deferred == 0
    assert parts[0, 1].deferred == 3 * 3 * 12 * ROW // 2


def test_every_stage_of_a_plan_has_its_own_peak() -> None:
    two = plan(
        MODEL,
        [
            replica(
                stage(layers=(0, 4), ranks=(0,), device="A100-40", depth=3),
                stage(layers=(4, 6), ranks=(1,), device="A100-40", depth=1),
                num_samples=8,
            )
        ],
    )
    parts = plan_memory(two, COSTS)
    first = memory_of_stage(two.replicas[0].stages[0], COSTS, num_neighbours=1, num_gradient_groups=1)
    assert parts[0, 0] == first.at(3), "the tied embedding is shared with the last stage"
    assert parts[0, 1].logits > 0 == parts[0, 0].logits


def test_no_more_microbatches_are_held_than_there_are() -> None:
    deep = plan(MODEL, [replica(stage(layers=(0, 6), ranks=(0,), device="A100-40", depth=9), num_samples=2)])
    shallow = plan(MODEL, [replica(stage(layers=(0, 6), ranks=(0,), device="A100-40", depth=2), num_samples=2)])
    assert plan_memory(deep, COSTS) == plan_memory(shallow, COSTS)


def test_a_distributed_optimizer_is_shared_among_all_holders() -> None:
    """Two replicas of one stage, one of two: the state of a layer is divided by its holders, in their proportion."""
    model = gpt2_model(tied_embeddings=False)
    costs = cost_model(model, [profile(model)])
    stages = (stage(layers=(0, 3), ranks=(1,)), stage(layers=(3, 6), ranks=(2, 3), dp=2))
    made = plan(model, [replica(stage(layers=(0, 6), ranks=(0,))), replica(*stages)])
    whole, parts = plan_memory(made, costs), plan_memory(sharded(made), costs)
    assert parts[1, 0].optimizer == whole[1, 0].optimizer // 2
    assert parts[1, 1].optimizer == whole[1, 1].optimizer // 3
    everything = parts[0, 0].optimizer + parts[1, 0].optimizer + 2 * parts[1, 1].optimizer
    assert everything == pytest.approx(whole[0, 0].optimizer, abs=4)
    assert {k: p.weights + p.gradients for k, p in parts.items()} == {
        k: p.weights + p.gradients for k, p in whole.items()
    }


def test_weights_that_other_holders_cut_are_held_twice() -> None:
    """Beside a replica of tp 2, a rank without tp keeps its matrices in buffers and in its own order."""
    model = gpt2_model(tied_embeddings=False)
    costs = cost_model(model, [profile(model)])
    whole = stage(layers=(0, 6), ranks=(0,))
    alone = plan_memory(plan(model, [replica(whole)]), costs)[0, 0]
    beside = plan_memory(plan(model, [replica(whole), replica(stage(layers=(0, 6), ranks=(1, 2), tp=2))]), costs)
    cut = 4 * sum(p.numel for p in parameters(model) if p.shard_dim is not None)
    assert beside[0, 0].weights == alone.weights + cut
    assert beside[0, 0].gradients == alone.gradients + cut
    assert beside[1, 0].weights == 4 * costs.parameter_counts.of_layers(first_layer=0, end_layer=6, tp=2), (
        "its shards are whole segments"
    )


def interleaved(*, layers: int = 8, v: int = 2, batch: int = 8, **options: Any) -> Plan:
    """Two device groups of one rank with ``v`` stages each; the untied head is on the second."""
    given: dict[str, Any] = {"world_size": 2, "pp": 2, "stages_per_rank": v, "micro_batch_size": 1, **options}
    model = gpt2_model(num_layers=layers, tied_embeddings=False)
    made = uniform_plan(UniformLayout(model=model, global_batch_size=batch, seq_length=16, device="A100-40", **given))
    validate(made)
    return made


def costs_of(described: Plan) -> Any:
    return cost_model(described.model, [profile(described.model)])


def test_a_device_with_two_stages_holds_their_layers_and_one_context() -> None:
    """Two groups of four layers, in one stage each or in two: but for boundaries and depths they hold the same."""
    made, whole = interleaved(), interleaved(v=1)
    parts, alone = plan_memory(made, costs_of(made)), plan_memory(whole, costs_of(whole))
    devices = device_memory(made, parts)
    assert set(parts) == {(0, s) for s in range(4)}
    assert set(devices) == {(0, 0), (0, 1)}
    for g in (0, 1):
        assert devices[0, g] == MemoryBreakdown.sum_of([parts[0, g], parts[0, g + 2]])
        assert devices[0, g].total == parts[0, g].total + parts[0, g + 2].total
        for name in ("weights", "gradients", "optimizer", "context"):
            assert getattr(devices[0, g], name) == getattr(alone[0, g], name), name
    assert devices[0, 0].working == alone[0, 0].working
    assert devices[0, 1].working == alone[0, 1].working + alone[0, 1].logits, (
        "layers of the stage without the head compute their backward beside logits of the other one"
    )
    assert parts[0, 2].context == parts[0, 2].working == 0, "they stand with the first stage"


def test_communicators_of_a_device_are_those_of_its_boundaries_and_one_set_of_the_others() -> None:
    """World and losses, and two for each neighbour: 1 and 2 of stages 0 and 2, 2 and 1 of stages 1 and 3."""
    made = interleaved()
    devices = device_memory(made, plan_memory(made, costs_of(made)))
    each = costs_of(made).runtime.communicator_bytes
    assert [devices[0, g].communicators for g in (0, 1)] == [(2 + 2 * 3) * each] * 2


def test_a_device_with_two_stages_holds_what_its_row_holds_at_its_worst() -> None:
    """The warm-up 2 (p - r - 1) + (v - 1) p + 1, of whichever stage: five forwards and three, of two layers each."""
    made = interleaved()
    parts = plan_memory(made, costs_of(made))
    block = 12 * ROW // 2
    (replica,) = made.replicas
    warm_up = [sum(replica.stages[s].in_flight for s in (g, g + 2)) for g in (0, 1)]
    assert warm_up == [5, 3]
    held = {s: parts[0, s].activations // (2 * block) for s in range(4)}
    assert [held[0] + held[2], held[1] + held[3]] == warm_up
    assert parts[0, 3].logits == held[3] * (2 * ROW + 4 * 2 * 16 * 64) // 2


def test_of_unlike_stages_the_costlier_one_decides_the_worst_moment() -> None:
    """Where the moments of a row trade microbatches of one stage for those of another."""
    made = interleaved(batch=4)
    (replica,) = made.replicas
    for s in (0, 2):
        costly = replica.with_stage(s ^ 2, recompute="full")
        plan_of = made.with_replica(0, costly)
        costs = costs_of(made)
        each = {k: memory_of_stage(costly.stages[k], costs, num_neighbours=1, begins_device=False) for k in (0, 2)}
        found = device_memory(plan_of, plan_memory(plan_of, costs))[0, 0]
        row = memory_model.step_rows(plan_of.replicas[0])[0]
        moments = memory_model.worst_moments(row)
        expected = max(sum(each[k].holding(moment[k]).activations for k in (0, 2)) for moment in moments)
        assert found.activations == expected


def test_optimizer_states_of_a_shared_device_count_once() -> None:
    """Two interleaved replicas share the optimizer of every layer: half of it on either, whatever the stages."""
    made = interleaved(world_size=4, batch=8)
    whole, shared = plan_memory(made, costs_of(made)), plan_memory(sharded(made), costs_of(made))
    for key in whole:
        assert shared[key].optimizer == pytest.approx(whole[key].optimizer / 2, abs=2)


def test_gpipe_keeps_every_microbatch_whatever_the_depths_say() -> None:
    made = interleaved(v=1, batch=8)
    (replica,) = made.replicas
    all_first = made.with_replica(0, dataclasses.replace(replica, schedule="gpipe"))
    costs = costs_of(made)
    assert plan_memory(made, costs)[0, 1].activations == 4 * 6 * ROW
    assert plan_memory(all_first, costs)[0, 1].activations == 8 * 4 * 6 * ROW


@given(split_legal_plans())
@settings(max_examples=40, deadline=None)
def test_the_closed_form_of_1f1b_is_what_the_rows_say(legal: Plan) -> None:
    costs = cost_model(legal.model, [profile(legal.model)])
    closed = plan_memory(legal, costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_model, "BY_DEPTHS", "none")
        assert plan_memory(legal, costs) == closed
