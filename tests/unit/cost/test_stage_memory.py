"""What a device holds of one stage, by what it is for."""

import dataclasses
from typing import Any

import pytest

from hetero.cost.cost_model import CostModel, StageConfig
from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.cost.runtime_model import HETERO
from hetero.cost.stage_memory import StageMemory, stage_memory
from hetero.data import shipped_profiles
from hetero.schedule.activation_residency import HeldMicrobatches
from hetero.spec.model import ModelSpec
from hetero.spec.profile import LAYER_KINDS, LayerImplementation, LayerMemory, Profile
from hetero.units import GIB, MIB
from tests.helpers.models import gpt2_model, moe_model
from tests.helpers.published_runs.opt350m import published_model
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model()
COSTS = cost_model(MODEL, [profile(MODEL)])
KEEPS_SCORES = dataclasses.replace(HETERO, implementation=LayerImplementation(attention="unfused"))
DROPS, DROPS_SCORES = (each.with_dropout(hidden=0.1, attention=0.0) for each in (HETERO, KEEPS_SCORES))
WITH_SCORES = cost_model(MODEL, [profile(MODEL)], runtime=KEEPS_SCORES)
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


def memory_with(costs: CostModel = COSTS, **changes: Any) -> StageMemory:
    """The memory of ``STAGE`` with these changes of its configuration, or of what is beside it."""
    fields = {**STAGE, **changes}
    config = StageConfig(**{name: fields.pop(name) for name in StageConfig._fields if name in fields})
    return stage_memory(costs, config, **fields)


def test_weights_gradients_and_adam_are_four_copies() -> None:
    parts = memory_with(COSTS).at(1)
    assert parts.gradients == parts.weights == 4 * COSTS.parameter_counts.of_layers(first_layer=2, end_layer=4, tp=1)
    assert parts.optimizer == 2 * parts.weights


def test_a_block_saves_what_the_formula_counts() -> None:
    """e b s (4 h + 2 q + 2 kv + 2 f + a s), with q = kv = h = 32, f = 64, a = 4; without scores, no a s."""
    tokens = 2 * (4 * 2 * 16)
    assert memory_with(COSTS).at(1).activations == tokens * (4 * 32 + 4 * 32 + 2 * 64)
    assert memory_with(WITH_SCORES).at(1).activations == tokens * (4 * 32 + 4 * 32 + 2 * 64 + 4 * 16)


def test_activations_grow_with_the_depth_and_nothing_else_but_slack_does() -> None:
    one, three = memory_with(COSTS).at(1), memory_with(COSTS).at(3)
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
    parts = memory_with(COSTS, **changes).at(1, deferred=3)
    assert parts.deferred == 3 * rows * ROW


@pytest.mark.parametrize(("device", "rows"), [("A100-40", 4 + 2 + 2), ("V100-16", 3 + 2 + 2)])
def test_transformer_engine_keeps_whole_inputs_where_the_sequence_is_cut(device: str, rows: int) -> None:
    """Where it may run, in half precision: of 4 h, none is cut."""
    costs = cost_model(MODEL, [profile(MODEL, device=device)], precision="fp16")
    parts = memory_with(costs, device=device, tp=2, sequence_parallel=True).at(1, deferred=3)
    assert parts.deferred == 3 * 2 * rows * ROW // 2


def test_the_peak_is_before_a_backward_or_behind_it() -> None:
    memory = memory_with(COSTS)
    few = dataclasses.replace(memory, activations_per_microbatch=2**30, deferred_per_microbatch=2**20)
    assert few.peak(in_flight=3, wgrad_delay=None, num_microbatches=8) == few.at(3)
    assert few.peak(in_flight=3, wgrad_delay=0, num_microbatches=8) == few.at(3)
    assert few.peak(in_flight=3, wgrad_delay=2, num_microbatches=8) == few.at(3, deferred=2)
    assert few.peak(in_flight=3, wgrad_delay=2, num_microbatches=4) == few.at(3, deferred=1), "there are no more"
    much = dataclasses.replace(memory, activations_per_microbatch=2**20, deferred_per_microbatch=2**30)
    assert much.peak(in_flight=3, wgrad_delay=2, num_microbatches=8) == much.at(2, deferred=3)
    assert much.peak(in_flight=3, wgrad_delay=9, num_microbatches=8) == much.at(0, deferred=8)


def test_the_total_is_the_sum_of_the_named_parts() -> None:
    parts = memory_with(COSTS).at(2)
    assert parts.total == sum(parts.named().values())
    assert "communicators" in parts.named()


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({"recompute": "full"}, 2 * ROW),
        ({"recompute": "full", "recompute_num_layers": 1}, ROW + ROW * 12),
        ({"recompute": "selective"}, 2 * 12 * ROW),
        ({"sequence_parallel": True, "tp": 2}, 2 * 6 * ROW),
        ({"tp": 2}, 2 * 8 * ROW),
    ],
)
def test_what_is_kept_under_recomputation_and_parallelism(changes: dict[str, Any], saved: int) -> None:
    """A block of this model keeps 12 activations: 4 of rows and 8 of projections. Scores it has none to leave out."""
    assert memory_with(COSTS, **changes).at(1).activations == saved


@pytest.mark.parametrize(
    ("layers", "changes", "saved"),
    [
        ((2, 3.5), {}, 12 + 6),
        ((2.5, 4), {}, 6 + 12),
        ((2, 2.5), {}, 6),
        ((2.5, 3), {}, 6),
        ((2.5, 3.5), {}, 12),
        ((2, 3.5), {"recompute": "selective"}, 12 + 6),
        ((2.5, 4), {"recompute": "selective"}, 6 + 12),
        ((2.5, 4), {"recompute": "full"}, 1 + 1),
        ((2.5, 4), {"recompute": "full", "recompute_num_layers": 1}, 1 + 12),
        ((2, 3.5), {"sequence_parallel": True, "tp": 2}, 6 + 3),
        ((2.5, 4), {"tp": 2}, 4 + 8),
    ],
)
def test_half_a_block_keeps_its_part(layers: tuple[float, float], changes: dict[str, Any], saved: int) -> None:
    """Of the 12 activations the attention keeps 6: 2 of rows, 4 of projections; the MLP 2 and 4."""
    changes = {"first_layer": layers[0], "end_layer": layers[1], **changes}
    assert memory_with(COSTS, **changes).at(1).activations == saved * ROW


def test_two_stages_that_share_a_layer_hold_it_once() -> None:
    parts = [memory_with(COSTS, first_layer=first, end_layer=end).at(1) for first, end in ((2, 4), (2, 2.5), (2.5, 4))]
    for name in ("weights", "gradients", "optimizer", "activations"):
        whole, front, back = (getattr(each, name) for each in parts)
        assert front + back == whole, name
    assert parts[1].working == parts[0].working - 4 * 2 * 16 * (2 * 32 + 64), "the attention has no rows of the MLP"


def test_an_mlp_alone_has_no_scores_to_work_on() -> None:
    held = {"first_layer": 2.5, "end_layer": 3}
    assert memory_with(COSTS, **held).at(1).working == 4 * 2 * 16 * (2 * 32 + 64)
    again = memory_with(COSTS, **{**held}, recompute="full").at(1)
    assert again.working == 4 * 2 * 16 * (2 * 32 + 64) + 6 * ROW


def test_halves_of_a_runtime_with_profiled_layers_are_by_the_formula() -> None:
    published = next(p for p in shipped_profiles() if p.model == "OPT-350M" and p.memory)
    theirs = cost_model(model_of(published), [published], seq_length=2048, runtime=DEEPSPEED)
    held = {"device": published.device, "tp": 1}
    whole = theirs.parameters_per_rank(**held, first_layer=2, end_layer=4)
    halves = [theirs.parameters_per_rank(**held, first_layer=a, end_layer=b) for a, b in ((2, 2.5), (2.5, 4))]
    assert sum(halves) == pytest.approx(whole, rel=0.01)


def test_full_recomputation_needs_one_block_while_it_works() -> None:
    full, none = memory_with(COSTS, recompute="full"), memory_with(COSTS)
    assert full.fixed.working - none.fixed.working == 12 * ROW


def test_attention_keeps_scores_in_other_runtimes_alone() -> None:
    """Two activations of scores per block; selective recomputation leaves them out as well."""
    assert memory_with(WITH_SCORES).at(1).activations == memory_with(COSTS).at(1).activations + 2 * 2 * ROW
    assert memory_with(WITH_SCORES, recompute="selective").at(1).activations == memory_with(COSTS).at(1).activations
    assert memory_with(WITH_SCORES).fixed.working > memory_with(COSTS).fixed.working


LAST = {"first_layer": 4, "end_layer": 6}
LOGITS = 2 * 16 * 64
"""Of 2 samples, 16 tokens, 64 words."""


@pytest.mark.parametrize(("precision", "element"), [("fp32", 4), ("bf16", 2), ("fp64", 8)])
def test_the_head_keeps_the_softmax_in_fp32_at_least(precision: str, element: int) -> None:
    """And in half precision, while it computes, the logits or their gradient."""
    costs = cost_model(MODEL, [profile(MODEL)], precision=precision)
    assert memory_with(costs, **LAST).at(1).logits == 2 * element * 2 * 16 * 32 + max(element, 4) * LOGITS
    large = cost_model(gpt2_model(padded_vocab_size=2**16), [], precision=precision)
    words = 2 * 16 * 2**16
    assert memory_with(large, **LAST).fixed.working == (2 * words if element == 2 else 0)


def test_some_losses_work_on_copies_of_the_logits() -> None:
    two = cost_model(MODEL, [profile(MODEL)], runtime=dataclasses.replace(HETERO, loss_copies=2))
    assert memory_with(two, **LAST).fixed.working == max(2 * 4 * LOGITS, memory_with(**LAST).fixed.working)
    assert memory_with(two).fixed.working == memory_with().fixed.working


def test_when_the_layers_begin_the_backward_the_head_has_ended_its_own() -> None:
    assert memory_with(**LAST).fixed.working == memory_with().fixed.working - memory_with(**LAST).at(1).logits


@pytest.mark.parametrize(
    ("changes", "masks"),
    [({}, 2), ({"tp": 2}, 2), ({"tp": 2, "sequence_parallel": True}, 1), ({"recompute": "full"}, 0)],
)
def test_dropout_keeps_a_byte_per_element_behind_attention_and_mlp(changes: dict[str, Any], masks: int) -> None:
    with_dropout = cost_model(MODEL, [profile(MODEL)], runtime=DROPS)
    more = memory_with(with_dropout, **changes).at(1).activations - memory_with(COSTS, **changes).at(1).activations
    assert more == 2 * masks * ROW // 4
    first = {"first_layer": 0, "end_layer": 0.5}
    more = memory_with(with_dropout, **first).at(1).activations - memory_with(COSTS, **first).at(1).activations
    assert more == 2 * ROW // 4, "one of the embedding, one of the attention"


def test_dropout_of_scores_keeps_what_is_left_of_them_and_a_mask() -> None:
    """2205.05198: 2 of softmax, 2 of what is left, 1 of the mask in half precision. No scores, no dropout of them."""
    for precision, element in (("fp32", 4), ("bf16", 2)):
        kept, dropped, dropped_but_scores = (
            memory_with(cost_model(MODEL, [], precision=precision, runtime=runtime)).at(1).activations
            for runtime in (KEEPS_SCORES, DROPS_SCORES, DROPS)
        )
        scores = 2 * 2 * 4 * 16 * 16
        assert dropped - dropped_but_scores == (2 * element + 1) * scores
        assert dropped - kept == (element + 1) * scores + 2 * 2 * 2 * 16 * 32


@pytest.mark.parametrize(("hidden", "attention"), [(0.1, 0.0), (0.0, 0.1), (0.2, 0.3)])
def test_any_dropout_counts(hidden: float, attention: float) -> None:
    """Of one of the two as of both: half of the masks too many, at most, in models that nobody trains."""
    assert HETERO.with_dropout(hidden=hidden, attention=attention) == DROPS
    assert DROPS.with_dropout(hidden=0.0, attention=0.0) == HETERO
    assert DEEPSPEED.with_dropout(hidden=hidden, attention=attention) == DEEPSPEED, "profiled layers drop what they did"


def test_a_block_of_the_paper_keeps_what_the_paper_says() -> None:
    """arXiv 2205.05198, section 4: 34 s b h + 5 a s^2 b bytes, and 10 s b h + (24 s b h + 5 a s^2 b) / t with tp t."""
    costs = cost_model(gpt2_model(ffn_hidden_size=128), [], precision="fp16", runtime=DROPS_SCORES)
    tokens, scores = 2 * 16 * 32, 2 * 4 * 16 * 16
    for tp in (1, 2):
        saved = costs.saved_bytes("block", costs.microbatch(tp=tp, micro_batch_size=2), device="A100-40")
        assert saved == 10 * tokens + (24 * tokens + 5 * scores) // tp


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [({}, 0), ({"tp": 2}, 2 * 2), ({"tp": 2, "sequence_parallel": True}, 2 * 6), ({"tp": 2, "end_layer": 2.5}, 1)],
)
def test_collectives_hold_what_they_have_worked_on(changes: dict[str, Any], tensors: int) -> None:
    """One tensor of rows per half of a block, three with sequence parallelism; not what a stage needs to run."""
    holds = cost_model(MODEL, [], runtime=dataclasses.replace(HETERO, holds_collective_tensors=True))
    parts = memory_with(holds, **changes).at(1)
    assert parts.held_by_collectives == tensors * ROW
    assert parts.required == parts.total - parts.held_by_collectives == memory_with(**changes).at(1).total


def test_a_neighbour_is_a_slice_in_and_a_slice_out() -> None:
    two = memory_with(COSTS).fixed.boundary_buffers
    assert two == 4 * ROW
    assert memory_with(COSTS, num_neighbours=0).fixed.boundary_buffers == 0


def test_only_some_runtimes_copy_gradients_to_reduce_them() -> None:
    theirs = cost_model(MODEL, [profile(MODEL)], runtime=DEEPSPEED)
    assert memory_with(COSTS).fixed.sync_buffers == 0
    assert memory_with(theirs).fixed.sync_buffers == memory_with(theirs).fixed.gradients
    assert memory_with(theirs, shares_gradients=False).fixed.sync_buffers == 0


@pytest.mark.parametrize(
    ("device", "kernels_mib"), [("V100-16", 1310), ("A100-40", 1430), ("H100", 2180), ("B200", 2560), ("cpu", 0)]
)
def test_experts_have_all_kernels_loaded_at_the_start(device: str, kernels_mib: int) -> None:
    """As pretrain_gpt.py has CUDA do it; other runtimes leave it to CUDA, which loads what is called."""
    model = moe_model()
    profiles = [profile(each, device=device) for each in (model, MODEL)]
    experts, dense = (cost_model(each, profiles, data_sheets=True) for each in (model, MODEL))
    contexts = [memory_with(costs, device=device).fixed.context for costs in (experts, dense)]
    assert contexts[0] - contexts[1] == kernels_mib * MIB
    elsewhere = cost_model(model, profiles, data_sheets=True, runtime=DEEPSPEED)
    assert memory_with(elsewhere, device=device).fixed.context == contexts[1]


def test_the_context_depends_on_the_device() -> None:
    assert memory_with(COSTS, device="GH200").fixed.context == int(3.9 * GIB)
    assert memory_with(COSTS).fixed.context == GIB
    assert memory_with(COSTS, device="Titan-RTX").fixed.context == int(0.3 * GIB)


@pytest.mark.parametrize("published", list(shipped_profiles()), ids=lambda p: f"{p.model} {p.device}")
def test_the_formula_differs_from_what_others_saved_by_what_their_layers_do_otherwise(published: Profile) -> None:
    """OPT's ReLU keeps its output alone, 4 / t activations less, and its blocks count their input as the previous
    block's output, 1 less; GPT-Neo's dropout keeps two masks of one byte per element, 0.5 more. Theirs keep scores."""
    model = model_of(published)
    ours = cost_model(model, [published], seq_length=2048, runtime=KEEPS_SCORES)
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
            whole = theirs.parameters_per_rank(
                device=published.device, first_layer=0, end_layer=theirs.model.num_layers, tp=tp
            )
            block = published.memory_of("block", tp=tp)
            assert block is not None
            assert whole == sum(held) + (theirs.model.num_layers - 1) * block.parameters
    assert {memory.kind for memory in published.memory} == set(LAYER_KINDS)


def saved(costs: Any, memory: LayerMemory, device: str) -> int:
    return int(costs.saved_bytes(memory.kind, costs.microbatch(tp=memory.tp, micro_batch_size=1), device=device))


def model_of(published: Profile) -> ModelSpec:
    return published_model({"OPT-350M": "OPT-350", "GPT-Neo-2.7B": "GPT-Neo-2.7", "OPT-30B": "OPT-30"}[published.model])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_keeps_gradients_masters_and_moments_in_fp32(precision: str) -> None:
    """2 + 4 + 12 bytes per parameter, as Megatron-LM's table for bf16 with fp32 gradients has it."""
    half = memory_with(cost_model(MODEL, [profile(MODEL)], precision=precision)).at(1)
    held = COSTS.parameter_counts.of_layers(first_layer=2, end_layer=4, tp=1)
    assert (half.weights, half.gradients, half.optimizer) == (2 * held, 4 * held, 12 * held)


def test_a_microbatch_that_is_run_again_keeps_its_input_until_then() -> None:
    memory = memory_with(COSTS)
    kept = memory.holding(HeldMicrobatches(in_flight=1, inputs=3))
    assert kept.activations == memory.at(1).activations + 3 * ROW
    assert kept.logits == memory.at(1).logits
    first = memory_with(COSTS, first_layer=0)
    assert first.input_per_microbatch == 8 * 2 * 16, "of tokens, 8 bytes each"
