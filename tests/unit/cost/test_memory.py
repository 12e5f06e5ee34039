"""Peak memory, part by part."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings

from hetero.cost import memory as memory_model
from hetero.cost.memory import (
    MemoryParts,
    device_memory,
    memory_of_stage,
    plan_memory,
    saved_bytes,
    stage_memory,
)
from hetero.cost.runtime_model import DEEPSPEED, HETERO
from hetero.data import shipped_profiles
from hetero.plan.ir import Plan
from hetero.plan.uniform import uniform_plan
from hetero.plan.validate import validate
from hetero.schedule.activation_residency import HeldMicrobatches
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import parameters
from hetero.spec.profile import LAYER_KINDS, LayerMemory, Profile
from hetero.units import GIB
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.published_runs import published_model
from tests.helpers.strategies import split_legal_plans
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model()
COSTS = cost_model(MODEL, [profile(MODEL)])
STAGE: dict[str, Any] = {
    "device": "A100-40",
    "first_layer": 2,
    "end_layer": 4,
    "tp": 1,
    "micro_batch_size": 2,
    "num_neighbours": 2,
}
ROW = 4 * 2 * 16 * 32
"""Bytes of one activation: fp32, 2 samples, 16 tokens, hidden size 32."""


def test_weights_gradients_and_adam_are_four_copies() -> None:
    parts = stage_memory(COSTS, **STAGE).at(1)
    assert parts.gradients == parts.weights == 4 * COSTS.sizes.held(first_layer=2, end_layer=4, tp=1)
    assert parts.optimizer == 2 * parts.weights


def test_a_block_saves_what_the_formula_counts() -> None:
    """e b s (4 h + 2 q + 2 kv + 2 f + a s), with q = kv = h = 32, f = 64, a = 4."""
    parts = stage_memory(COSTS, **STAGE).at(1)
    assert parts.activations == 2 * (4 * 2 * 16) * (4 * 32 + 4 * 32 + 2 * 64 + 4 * 16)


def test_activations_grow_with_the_depth_and_nothing_else_but_slack_does() -> None:
    one, three = stage_memory(COSTS, **STAGE).at(1), stage_memory(COSTS, **STAGE).at(3)
    assert three.activations == 3 * one.activations
    assert dataclasses.replace(three, activations=0, slack=0) == dataclasses.replace(one, activations=0, slack=0)
    assert three.slack > one.slack


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 2 * (4 + 4 + 4)),
        ({"tp": 2}, 2 * (4 + 2 + 2)),
        ({"tp": 2, "sequence_parallel": True}, 2 * (3 + 2 + 2)),
        ({"recompute": "selective"}, 2 * (4 + 4 + 4)),
    ],
)
def test_what_waits_for_its_weights_gradients(changes: dict[str, Any], rows: int) -> None:
    """Inputs and output gradients: 4 h, of which sequence parallelism cuts two, 2 q + 2 kv, and 2 f of 64."""
    parts = stage_memory(COSTS, **{**STAGE, **changes}).at(1, deferred=3)
    assert parts.deferred == 3 * rows * ROW


def test_the_peak_is_before_a_backward_or_behind_it() -> None:
    memory = stage_memory(COSTS, **STAGE)
    few = dataclasses.replace(memory, activations_per_microbatch=2**30, deferred_per_microbatch=2**20)
    assert few.peak(in_flight=3, wgrad_delay=None, num_microbatches=8) == few.at(3)
    assert few.peak(in_flight=3, wgrad_delay=0, num_microbatches=8) == few.at(3)
    assert few.peak(in_flight=3, wgrad_delay=2, num_microbatches=8) == few.at(3, deferred=2)
    assert few.peak(in_flight=3, wgrad_delay=2, num_microbatches=4) == few.at(3, deferred=1), "there are no more"
    much = dataclasses.replace(memory, activations_per_microbatch=2**20, deferred_per_microbatch=2**30)
    assert much.peak(in_flight=3, wgrad_delay=2, num_microbatches=8) == much.at(2, deferred=3)
    assert much.peak(in_flight=3, wgrad_delay=9, num_microbatches=8) == much.at(0, deferred=8)


def test_a_plan_counts_what_its_delays_keep() -> None:
    stages = [stage(layers=(s, s + 3), ranks=(s // 3,), device="A100-40", depth=2 - s // 3, delay=s) for s in (0, 3)]
    made = plan(gpt2_model(tied_embeddings=False), [replica(*stages, num_samples=6)])
    parts = plan_memory(made, COSTS)
    assert parts[0, 0].deferred == 0
    assert parts[0, 1].deferred == 3 * 3 * 12 * ROW // 2


def test_the_total_is_the_sum_of_the_named_parts() -> None:
    parts = stage_memory(COSTS, **STAGE).at(2)
    assert parts.total == sum(parts.named().values())
    assert "communicators" in parts.named()


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({"recompute": "full"}, 2 * ROW),
        ({"recompute": "full", "recompute_num_layers": 1}, ROW + ROW * 14),
        ({"recompute": "selective"}, 2 * 12 * ROW),
        ({"sequence_parallel": True, "tp": 2}, 2 * 7 * ROW),
        ({"tp": 2}, 2 * 9 * ROW),
    ],
)
def test_what_is_kept_under_recomputation_and_parallelism(changes: dict[str, Any], saved: int) -> None:
    """A block of this model keeps 14 activations: 4 of rows, 8 of projections and 2 of scores."""
    assert stage_memory(COSTS, **{**STAGE, **changes}).at(1).activations == saved


@pytest.mark.parametrize(
    ("layers", "changes", "saved"),
    [
        ((2, 3.5), {}, 14 + 8),
        ((2.5, 4), {}, 6 + 14),
        ((2, 2.5), {}, 8),
        ((2.5, 3), {}, 6),
        ((2.5, 3.5), {}, 14),
        ((2, 3.5), {"recompute": "selective"}, 12 + 6),
        ((2.5, 4), {"recompute": "selective"}, 6 + 12),
        ((2.5, 4), {"recompute": "full"}, 1 + 1),
        ((2.5, 4), {"recompute": "full", "recompute_num_layers": 1}, 1 + 14),
        ((2, 3.5), {"sequence_parallel": True, "tp": 2}, 7 + 4),
        ((2.5, 4), {"tp": 2}, 4 + 9),
    ],
)
def test_half_a_block_keeps_its_part(layers: tuple[float, float], changes: dict[str, Any], saved: int) -> None:
    """Of the 14 activations the attention keeps 8: 2 of rows, 4 of projections, 2 of scores; the MLP 2 and 4."""
    changes = {"first_layer": layers[0], "end_layer": layers[1], **changes}
    assert stage_memory(COSTS, **{**STAGE, **changes}).at(1).activations == saved * ROW


def test_two_stages_that_share_a_layer_hold_it_once() -> None:
    parts = [
        stage_memory(COSTS, **{**STAGE, "first_layer": first, "end_layer": end}).at(1)
        for first, end in ((2, 4), (2, 2.5), (2.5, 4))
    ]
    for name in ("weights", "gradients", "optimizer", "activations"):
        whole, front, back = (getattr(each, name) for each in parts)
        assert front + back == whole, name
    assert parts[1].working == parts[0].working - 4 * 2 * 16 * (2 * 32 + 64), "the attention has no rows of the MLP"


def test_an_mlp_alone_has_no_scores_to_work_on() -> None:
    held = {"first_layer": 2.5, "end_layer": 3}
    assert stage_memory(COSTS, **{**STAGE, **held}).at(1).working == 4 * 2 * 16 * (2 * 32 + 64)
    again = stage_memory(COSTS, **{**STAGE, **held}, recompute="full").at(1)
    assert again.working == 4 * 2 * 16 * (2 * 32 + 64) + 6 * ROW


def test_halves_of_a_runtime_with_profiled_layers_are_by_the_formula() -> None:
    published = next(p for p in shipped_profiles() if p.model == "OPT-350M" and p.memory)
    theirs = cost_model(model_of(published), [published], seq_length=2048, runtime=DEEPSPEED)
    held = {"device": published.device, "tp": 1}
    whole = theirs.held_parameters(**held, first_layer=2, end_layer=4)
    halves = [theirs.held_parameters(**held, first_layer=a, end_layer=b) for a, b in ((2, 2.5), (2.5, 4))]
    assert sum(halves) == pytest.approx(whole, rel=0.01)


def test_full_recomputation_needs_one_block_while_it_works() -> None:
    full, none = stage_memory(COSTS, **STAGE, recompute="full"), stage_memory(COSTS, **STAGE)
    assert full.fixed.working - none.fixed.working == 14 * ROW


def test_flash_attention_keeps_no_scores() -> None:
    flash = cost_model(MODEL, [profile(MODEL)], runtime=dataclasses.replace(HETERO, flash_attention=True))
    assert stage_memory(flash, **STAGE).at(1).activations == 2 * 12 * ROW
    assert stage_memory(flash, **STAGE).fixed.working < stage_memory(COSTS, **STAGE).fixed.working


def test_the_head_keeps_logits_and_their_softmax() -> None:
    parts = stage_memory(COSTS, **{**STAGE, "first_layer": 4, "end_layer": 6}).at(1)
    assert parts.logits == 2 * ROW + 2 * (4 * 2 * 16 * 64)


def test_a_neighbour_is_a_slice_in_and_a_slice_out() -> None:
    two = stage_memory(COSTS, **STAGE).fixed.boundary_buffers
    assert two == 4 * ROW
    assert stage_memory(COSTS, **{**STAGE, "num_neighbours": 0}).fixed.boundary_buffers == 0


def test_only_some_runtimes_copy_gradients_to_reduce_them() -> None:
    theirs = cost_model(MODEL, [profile(MODEL)], runtime=DEEPSPEED)
    assert stage_memory(COSTS, **STAGE).fixed.sync_buffers == 0
    assert stage_memory(theirs, **STAGE).fixed.sync_buffers == stage_memory(theirs, **STAGE).fixed.gradients
    assert stage_memory(theirs, **STAGE, shares_gradients=False).fixed.sync_buffers == 0


def test_the_context_depends_on_the_device() -> None:
    assert stage_memory(COSTS, **{**STAGE, "device": "GH200"}).fixed.context == int(3.9 * GIB)
    assert stage_memory(COSTS, **STAGE).fixed.context == GIB


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


@pytest.mark.parametrize("published", list(shipped_profiles()), ids=lambda p: f"{p.model} {p.device}")
def test_the_formula_differs_from_what_others_saved_by_what_their_layers_do_otherwise(published: Profile) -> None:
    """OPT's ReLU keeps its output alone, 4 / t activations less, and its blocks count their input as the previous
    block's output, 1 less; GPT-Neo's dropout keeps two masks of one byte per element, 0.5 more."""
    model = model_of(published)
    ours = cost_model(model, [published], seq_length=2048)
    row = 4 * 2048 * model.hidden_size
    for memory in published.memory:
        if memory.kind == "block":
            more = -0.5 if published.model == "GPT-Neo-2.7B" else 1 + 4 / memory.tp
            assert saved(ours, memory, published.device) == pytest.approx(memory.saved_bytes + more * row, rel=0.015)


@pytest.mark.parametrize("published", list(shipped_profiles()), ids=lambda p: f"{p.model} {p.device}")
def test_a_runtime_with_the_profiles_layers_saves_what_they_saved(published: Profile) -> None:
    theirs = cost_model(model_of(published), [published], seq_length=2048, runtime=DEEPSPEED)
    for memory in published.memory:
        assert saved(theirs, memory, published.device) == memory.saved_bytes
    for tp in published.tps("block"):
        if len(held := [memory.parameters for memory in published.memory if memory.tp == tp]) == len(LAYER_KINDS):
            whole = theirs.held_parameters(
                device=published.device, first_layer=0, end_layer=theirs.model.num_layers, tp=tp
            )
            block = published.memory_of("block", tp=tp)
            assert block is not None
            assert whole == sum(held) + (theirs.model.num_layers - 1) * block.parameters
    assert {memory.kind for memory in published.memory} == set(LAYER_KINDS)


def saved(costs: Any, memory: LayerMemory, device: str) -> int:
    return saved_bytes(
        costs, memory.kind, device=device, tp=memory.tp, micro_batch_size=1, sequence_ways=1, recompute="none"
    )


def model_of(published: Profile) -> ModelSpec:
    return published_model({"OPT-350M": "OPT-350", "GPT-Neo-2.7B": "GPT-Neo-2.7", "OPT-30B": "OPT-30"}[published.model])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_keeps_gradients_masters_and_moments_in_fp32(precision: str) -> None:
    """2 + 4 + 12 bytes per parameter, as Megatron-LM's table for bf16 with fp32 gradients has it."""
    half = stage_memory(cost_model(MODEL, [profile(MODEL)], precision=precision), **STAGE).at(1)
    held = COSTS.sizes.held(first_layer=2, end_layer=4, tp=1)
    assert (half.weights, half.gradients, half.optimizer) == (2 * held, 4 * held, 12 * held)


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
    assert beside[1, 0].weights == 4 * costs.sizes.held(first_layer=0, end_layer=6, tp=2), (
        "its shards are whole segments"
    )


def interleaved(*, layers: int = 8, v: int = 2, batch: int = 8, **options: Any) -> Plan:
    """Two device groups of one rank with ``v`` stages each; the untied head is on the second."""
    given: dict[str, Any] = {"world_size": 2, "pp": 2, "stages_per_rank": v, "micro_batch_size": 1, **options}
    model = gpt2_model(num_layers=layers, tied_embeddings=False)
    made = uniform_plan(model=model, global_batch_size=batch, seq_length=16, device="A100-40", **given)
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
        assert devices[0, g] == MemoryParts.sum_of([parts[0, g], parts[0, g + 2]])
        assert devices[0, g].total == parts[0, g].total + parts[0, g + 2].total
        for name in ("weights", "gradients", "optimizer", "context", "working"):
            assert getattr(devices[0, g], name) == getattr(alone[0, g], name), name
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
    block = 14 * ROW // 2
    (replica,) = made.replicas
    warm_up = [sum(replica.stages[s].in_flight for s in (g, g + 2)) for g in (0, 1)]
    assert warm_up == [5, 3]
    held = {s: parts[0, s].activations // (2 * block) for s in range(4)}
    assert [held[0] + held[2], held[1] + held[3]] == warm_up
    assert parts[0, 3].logits == held[3] * (2 * ROW + 2 * (4 * 2 * 16 * 64)) // 2


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
    assert plan_memory(made, costs)[0, 1].activations == 4 * 7 * ROW
    assert plan_memory(all_first, costs)[0, 1].activations == 8 * 4 * 7 * ROW


def test_a_microbatch_that_is_run_again_keeps_its_input_until_then() -> None:
    memory = stage_memory(COSTS, **STAGE)
    kept = memory.holding(HeldMicrobatches(in_flight=1, inputs=3))
    assert kept.activations == memory.at(1).activations + 3 * ROW
    assert kept.logits == memory.at(1).logits
    first = stage_memory(COSTS, **{**STAGE, "first_layer": 0})
    assert first.input_per_microbatch == 8 * 2 * 16, "of tokens, 8 bytes each"


@given(split_legal_plans())
@settings(max_examples=40, deadline=None)
def test_the_closed_form_of_1f1b_is_what_the_rows_say(legal: Plan) -> None:
    costs = cost_model(legal.model, [profile(legal.model)])
    closed = plan_memory(legal, costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_model, "BY_DEPTHS", "none")
        assert plan_memory(legal, costs) == closed
