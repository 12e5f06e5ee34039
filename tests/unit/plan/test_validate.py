"""Each rule alone: a plan it allows, one it forbids, and what it says."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from hetero.errors import ConfigError, PlanError
from hetero.plan import communicators, device_rules, offload_rules
from hetero.plan import validate as rules
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.offload import Offload
from hetero.plan.validate import validate
from hetero.spec.devices import DeviceType
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import eight_unlike_replicas, plan, replica, stage, uneven_plan
from tests.helpers.strategies import legal_plans

Change = Callable[[Plan], Plan]


def in_plan(**fields: Any) -> Change:
    return lambda plan: dataclasses.replace(plan, **fields)


def in_model(**fields: Any) -> Change:
    return lambda plan: dataclasses.replace(plan, model=dataclasses.replace(plan.model, **fields))


def in_replica(r: int, **fields: Any) -> Change:
    return lambda plan: plan.with_replica(r, dataclasses.replace(plan.replicas[r], **fields))


def in_stage(r: int, s: int, **fields: Any) -> Change:
    return lambda plan: plan.with_replica(r, plan.replicas[r].with_stage(s, **fields))


def in_sync(*domains: tuple[int, ...], bucket_numel: int | None = None) -> Change:
    return in_plan(gradient_sync=GradientSyncPlan(domains=domains, bucket_numel=bucket_numel))


def on_host(r: int, s: int, **fields: Any) -> Change:
    return lambda plan: in_plan(distributed_optimizer=True)(in_stage(r, s, offload=Offload(**fields))(plan))


def in_offload(r: int, s: int, **fields: Any) -> Change:
    return in_stage(r, s, offload=Offload(**fields))


def half_speculating() -> Plan:
    turns = [stage(layers=(s, s + 1), ranks=(s % 2,)) for s in range(4)]
    offloads = [Offload(optimizer_from=s, speculate=s == 2) for s in range(4)]
    made = replica(*turns).with_each_stage(offload=offloads)
    return dataclasses.replace(
        plan(gpt2_model(num_layers=4, tied_embeddings=False), [made]), distributed_optimizer=True
    )


def cut_inside(layer: float) -> Change:
    """Replica 1, whose first stage ends at ``layer``: 2.5 is between the attention and the MLP of layer 2."""
    cut = replica(stage(layers=(0, layer), ranks=(5,)), stage(layers=(layer, 6), ranks=(6,)), num_samples=4)
    return in_replica(1, stages=cut.stages)


def only(first: float, end: float) -> Change:
    """Replica 1 of three stages, the middle one with no more than ``[first, end)``."""
    edges = ((0, first), (first, end), (end, 6))
    stages = (stage(layers=held, ranks=(rank,)) for held, rank in zip(edges, (5, 6, 7), strict=True))
    cut = replica(*stages, num_samples=4)
    return lambda plan: in_plan(idle_ranks=())(in_replica(1, stages=cut.stages)(plan))


def interleaved(*depths: int, ranks: Sequence[int] = (5, 6, 5, 6), cuts: Sequence[int] = (1, 3, 4)) -> Change:
    """Replica 1 of one stage after the other on ``ranks``, which may repeat."""
    held = pairwise((0, *cuts, 6))
    stages = (
        stage(layers=layers, ranks=(rank,), depth=depth)
        for layers, rank, depth in zip(held, ranks, depths, strict=True)
    )
    return in_replica(1, stages=tuple(stages))


def both(*changes: Change) -> Change:
    """One change after the other."""
    return lambda plan: reduce(lambda changed, change: change(changed), changes, plan)


ALLOWED: list[tuple[Callable[[Plan], None], str, Change]] = [
    (rules.check_numbers_are_positive, "one of everything", in_plan(seq_length=1)),
    (rules.check_each_replica_covers_all_layers, "another cut in each replica", in_plan()),
    (rules.check_each_replica_covers_all_layers, "half a layer", cut_inside(2.5)),
    (rules.check_each_replica_covers_all_layers, "an attention alone", only(2, 2.5)),
    (rules.check_each_replica_covers_all_layers, "an MLP alone", only(2.5, 3)),
    (rules.check_halves_meet, "whole layers", in_plan()),
    (rules.check_halves_meet, "half a layer", cut_inside(2.5)),
    (rules.check_halves_meet, "the MLP of one and the attention of the next layer", only(2.5, 3.5)),
    (rules.check_ranks_fill_each_stage, "tp 4 instead of 2 x 2", in_stage(0, 0, tp=4, dp=1)),
    (rules.check_tp_groups_ascend, "groups in any order", in_stage(0, 0, ranks=(2, 3, 0, 1))),
    (rules.check_device_groups, "a stage per group", in_plan()),
    (rules.check_device_groups, "two stages per group", interleaved(2, 2, 2, 2)),
    (
        rules.check_device_groups,
        "one stage more in one group",
        interleaved(*[2] * 5, ranks=(4, 5, 6, 4, 5), cuts=(1, 2, 3, 5)),
    ),
    (
        rules.check_device_groups,
        "unlike in depth, recomputation and delay",
        both(interleaved(2, 3, 4, 5), in_stage(1, 2, recompute="full"), in_stage(1, 3, wgrad_delay=1)),
    ),
    (
        rules.check_device_groups,
        "untied embeddings on the same ranks",
        both(interleaved(2, 2, 2, ranks=(5, 6, 5), cuts=(1, 3)), in_model(tied_embeddings=False)),
    ),
    (rules.check_schedule, "another order", in_replica(1, schedule="gpipe")),
    (rules.check_each_rank_has_one_place, "ranks in any order", in_stage(0, 0, ranks=(3, 0, 2, 1))),
    (rules.check_each_rank_has_one_place, "ranks of several stages", interleaved(2, 2, 2, 2)),
    (rules.check_samples_add_up, "unequal shares", in_plan()),
    (rules.check_microbatches_divide, "2 samples before 8", in_stage(0, 1, micro_batch_size=8)),
    (
        rules.check_microbatches_can_be_listed,
        "a huge batch in large microbatches",
        lambda plan: in_replica(0, num_samples=400_000)(
            in_stage(0, 0, micro_batch_size=4)(in_stage(0, 1, micro_batch_size=8)(plan))
        ),
    ),
    (rules.check_in_flight_is_deep_enough, "deeper than the batch", in_stage(0, 0, in_flight=99)),
    (rules.check_in_flight_is_deep_enough, "two stages per group", interleaved(2, 2, 2, 2)),
    (rules.check_in_flight_is_deep_enough, "all at one stage of a group", interleaved(3, 3, 1, 1)),
    (
        rules.check_in_flight_is_deep_enough,
        "GPipe asks for none",
        both(in_replica(0, schedule="gpipe"), in_stage(0, 0, in_flight=1)),
    ),
    (rules.check_tp_divides, "tp 4 divides all", in_stage(0, 0, tp=4, dp=1)),
    (
        rules.check_sequence_divides,
        "odd sequence without sequence parallelism",
        in_stage(0, 0, sequence_parallel=False),
    ),
    (rules.check_dropout, "the launch's own", in_plan()),
    (rules.check_dropout, "none and some", in_plan(hidden_dropout=0.0, attention_dropout=0.9)),
    (rules.check_sequence_fits_positions, "as many as there are", in_plan(seq_length=64)),
    (rules.check_moe_uses_sequence_parallel, "a dense model needs none", in_stage(0, 0, sequence_parallel=False)),
    (rules.check_recompute, "some layers", in_stage(0, 0, recompute="full", recompute_num_layers=3)),
    (
        rules.check_recompute,
        "a half as one layer",
        lambda plan: in_stage(1, 0, recompute="full", recompute_num_layers=3)(cut_inside(2.5)(plan)),
    ),
    (rules.check_recompute, "all layers", in_stage(0, 0, recompute="selective")),
    (rules.check_wgrad_delay, "none", in_stage(0, 0, wgrad_delay=0)),
    (rules.check_wgrad_delay, "selective", in_stage(0, 0, wgrad_delay=3, recompute="selective")),
    (device_rules.check_devices_are_known, "shipped and described", in_plan(devices=(DeviceType(name="mine"),))),
    (device_rules.check_devices_can_do_the_precision, "fp16 on V100", in_stage(0, 0, device="V100-16")),
    (device_rules.check_fp8, "none", in_plan()),
    (offload_rules.check_offload, "none", in_plan()),
    (offload_rules.check_offload, "from the embedding on", on_host(0, 0, optimizer_from=-1)),
    (offload_rules.check_offload, "from the MLP of a layer on", on_host(0, 1, optimizer_from=4.5, speculate=True)),
    (offload_rules.check_offload, "the head", on_host(0, 1, optimizer_from=6)),
    (offload_rules.check_offload, "gradients too", on_host(0, 0, optimizer_from=-1, gradients_from=0.5)),
    (
        offload_rules.check_offload,
        "and weights",
        on_host(0, 0, optimizer_from=-1, gradients_from=0.5, weights_from=0.5),
    ),
    (offload_rules.check_offload, "activations of the embedding", in_offload(0, 0, activations_until=-1)),
    (offload_rules.check_offload, "activations of the head", in_offload(0, 1, activations_until=6)),
    (
        offload_rules.check_offload,
        "activations of half a layer",
        lambda plan: in_offload(1, 1, activations_until=2.5)(cut_inside(2.5)(plan)),
    ),
    (communicators.check_communicators, "few", in_plan()),
    (rules.check_gradient_domains, "none", in_sync()),
    (rules.check_gradient_domains, "in any order, without the idle rank", in_sync((5, 4), (6,), (3, 0, 1, 2))),
    (rules.check_gradient_domains, "with it", in_sync((0, 1, 2, 3, 4, 5, 6, 7))),
    (rules.check_gradient_buckets, "one gradient at a time", in_sync(bucket_numel=1)),
]

FORBIDDEN: list[tuple[Callable[[Plan], None], str, Change]] = [
    (
        rules.check_tp_groups_ascend,
        r"replica 0 stage 0: the ranks of a tp group must ascend, got \[3, 0\]; list it as \[0, 3\]",
        in_stage(0, 0, ranks=(3, 0, 1, 2)),
    ),
    (rules.check_numbers_are_positive, "plan: seq_length is 0, must be at least 1", in_plan(seq_length=0)),
    (rules.check_numbers_are_positive, "plan: global_batch_size is -4, must", in_plan(global_batch_size=-4)),
    (rules.check_numbers_are_positive, "plan: no replicas", in_plan(replicas=())),
    (rules.check_numbers_are_positive, "replica 1: num_samples is 0, .* remove", in_replica(1, num_samples=0)),
    (rules.check_numbers_are_positive, "replica 1: no stages", in_replica(1, stages=())),
    (rules.check_numbers_are_positive, "replica 0 stage 1: tp is 0", in_stage(0, 1, tp=0)),
    (rules.check_numbers_are_positive, "replica 0 stage 1: dp is -1", in_stage(0, 1, dp=-1)),
    (rules.check_numbers_are_positive, "replica 0 stage 1: micro_batch_size is 0", in_stage(0, 1, micro_batch_size=0)),
    (rules.check_numbers_are_positive, "replica 0 stage 1: in_flight is 0", in_stage(0, 1, in_flight=0)),
    (
        rules.check_each_replica_covers_all_layers,
        r"replica 0 stage 1: layers \[3, 4\) are in no stage; it starts at 4, set first_layer to 3",
        in_stage(0, 1, first_layer=4),
    ),
    (
        rules.check_each_replica_covers_all_layers,
        r"replica 0 stage 1: layers \[2, 3\) overlap with stage 0; set first_layer to 3",
        in_stage(0, 1, first_layer=2),
    ),
    (
        rules.check_each_replica_covers_all_layers,
        r"replica 0 stage 0: first_layer is -2, layers count from 0",
        in_stage(0, 0, first_layer=-2),
    ),
    (
        rules.check_each_replica_covers_all_layers,
        r"replica 1 stage 1: holds no layers, \[2, 2\)",
        in_stage(1, 1, end_layer=2),
    ),
    (
        rules.check_each_replica_covers_all_layers,
        "replica 1: its stages end at layer 5, the model has 6; set end_layer of stage 1 to 6",
        in_stage(1, 1, end_layer=5),
    ),
    (
        rules.check_each_replica_covers_all_layers,
        r"replica 1 stage 1: holds no layers, \[2½, 2½\); give it at least half of one",
        lambda plan: in_stage(1, 1, ends_with_attention=True, end_layer=2)(cut_inside(2.5)(plan)),
    ),
    (
        rules.check_each_replica_covers_all_layers,
        r"replica 1 stage 1: holds no layers, \[2½, 2\)",
        lambda plan: in_stage(1, 1, end_layer=2)(cut_inside(2.5)(plan)),
    ),
    (
        rules.check_halves_meet,
        "replica 1 stage 0: starts_with_mlp is true, but no stage before it has the attention of layer 0",
        in_stage(1, 0, starts_with_mlp=True),
    ),
    (
        rules.check_halves_meet,
        "replica 1 stage 1: ends_with_attention is true, but no stage behind it has the MLP of layer 6",
        in_stage(1, 1, ends_with_attention=True),
    ),
    (
        rules.check_halves_meet,
        "replica 1 stage 0 and stage 1 both hold the attention of layer 2: set starts_with_mlp of stage 1 to true",
        in_stage(1, 0, ends_with_attention=True),
    ),
    (
        rules.check_halves_meet,
        "replica 1 stage 0 and stage 1: the attention of layer 2 is in neither; set ends_with_attention of stage 0",
        in_stage(1, 1, starts_with_mlp=True),
    ),
    (
        rules.check_ranks_fill_each_stage,
        r"replica 0 stage 0: 3 ranks \[0, 1, 2\], but tp 2 x dp 2 needs 4",
        in_stage(0, 0, ranks=(0, 1, 2)),
    ),
    (
        rules.check_device_groups,
        r"replica 1 stage 0 and stage 1 follow one another on the same ranks \[5\]; make them one stage",
        in_stage(1, 1, ranks=(5,)),
    ),
    *(
        (
            rules.check_device_groups,
            f"replica 1 stage 2: {name} is {value}, but stage 0 on the same ranks has {other}; make them equal",
            both(interleaved(2, 2, 2, 2), in_stage(1, 2, **{name: value})),
        )
        for name, value, other in (
            ("device", "V100-16", "cpu"),
            ("tp", 2, 1),
            ("dp", 2, 1),
            ("sequence_parallel", True, False),
            ("micro_batch_size", 2, 1),
            ("optimizer_share", 3, 1),
        )
    ),
    (
        rules.check_device_groups,
        r"replica 1 stage 2: the head shares its weight with the embedding, which stage 0 has on the same ranks "
        r"\[5\]; end the replica on other ranks, or untie the embedding",
        interleaved(2, 2, 2, ranks=(5, 6, 5), cuts=(1, 3)),
    ),
    (
        rules.check_schedule,
        "replica 1: there is no schedule 'zb-v'; choose one of 1f1b, gpipe",
        in_replica(1, schedule="zb-v"),
    ),
    (
        rules.check_each_rank_has_one_place,
        r"ranks \[5\] are named more than once; .* or in several stages of one replica that list the same ranks",
        in_stage(1, 1, ranks=(5, 6), dp=2),
    ),
    (rules.check_each_rank_has_one_place, r"ranks \[4\] are named more than once", in_stage(1, 1, ranks=(4,))),
    (rules.check_each_rank_has_one_place, r"ranks \[6\] are named more than once", in_plan(idle_ranks=(7, 6))),
    (rules.check_each_rank_has_one_place, r"names 8 ranks up to 9, but not \[7\]", in_plan(idle_ranks=(9,))),
    (
        rules.check_samples_add_up,
        r"num_samples of the replicas \[8, 5\] add up to 13, global_batch_size is 12",
        in_replica(1, num_samples=5),
    ),
    (
        rules.check_microbatches_divide,
        "replica 0 stage 0: micro_batch_size 3 x dp 2 = 6 samples does not divide the replica's num_samples 8",
        in_stage(0, 0, micro_batch_size=3),
    ),
    (
        rules.check_microbatches_divide,
        "replica 0 stage 0 and stage 1: microbatches of 2 and 3 samples; one must be a multiple",
        lambda plan: in_replica(0, num_samples=12)(in_stage(0, 1, micro_batch_size=3)(plan)),
    ),
    (
        rules.check_microbatches_can_be_listed,
        "replica 0 stage 0: 500,000,000,000 microbatches in a step, at most 100,000 are; raise micro_batch_size",
        in_replica(0, num_samples=10**12),
    ),
    (
        rules.check_in_flight_is_deep_enough,
        r"replica 0 stage 0: in_flight 1 would deadlock: .* must send 4 microbatches .* set it to 4",
        in_stage(0, 0, in_flight=1),
    ),
    (
        rules.check_in_flight_is_deep_enough,
        r"replica 1: in_flight \[1, 1, 1, 1\] of its interleaved stages would deadlock; set it to \[2, 2, 2, 2\]",
        interleaved(1, 1, 1, 1),
    ),
    (
        rules.check_in_flight_is_deep_enough,
        r"replica 1: in_flight \[1, 2, 1\] of its interleaved stages would deadlock; set it to \[2, 3, 2\]",
        both(in_model(tied_embeddings=False), interleaved(1, 2, 1, ranks=(5, 6, 5), cuts=(1, 3))),
    ),
    (
        rules.check_in_flight_is_deep_enough,
        r"replica 1: in_flight \[1, 9, 1, 1\] of its interleaved stages would deadlock; set it to \[4, 9, 4, 4\]",
        interleaved(1, 9, 1, 1),
    ),
    (
        rules.check_tp_divides,
        "replica 0 stage 0: tp 2 does not divide num_query_groups 1",
        in_model(num_query_groups=1),
    ),
    (
        rules.check_tp_divides,
        "replica 0 stage 0: tp 2 does not divide ffn_hidden_size 63",
        in_model(ffn_hidden_size=63),
    ),
    (
        rules.check_tp_divides,
        "replica 0 stage 0: tp 2 does not divide padded_vocab_size 61",
        in_model(padded_vocab_size=61),
    ),
    (
        rules.check_sequence_divides,
        "replica 0 stage 0: sequence_parallel with tp 4 does not divide seq_length 18",
        lambda plan: in_plan(seq_length=18)(in_stage(0, 0, tp=4, dp=1)(plan)),
    ),
    (
        rules.check_dropout,
        "hidden_dropout is 1, must be at least 0 and below 1",
        in_plan(hidden_dropout=1.0),
    ),
    (
        rules.check_dropout,
        "attention_dropout is -0.5, must be at least 0 and below 1",
        in_plan(attention_dropout=-0.5),
    ),
    (
        rules.check_sequence_fits_positions,
        "seq_length 65 exceeds the model's max_position_embeddings 64",
        in_plan(seq_length=65),
    ),
    (
        rules.check_recompute,
        "replica 1 stage 0: recompute_num_layers 1 needs recompute full, got selective",
        in_stage(1, 0, recompute="selective", recompute_num_layers=1),
    ),
    (
        rules.check_recompute,
        "replica 1 stage 0: recompute_num_layers 3 of a stage with 2 layers",
        in_stage(1, 0, recompute="full", recompute_num_layers=3),
    ),
    (
        rules.check_recompute,
        "replica 1 stage 0: recompute_num_layers 0 of a stage with 2 layers",
        in_stage(1, 0, recompute="full", recompute_num_layers=0),
    ),
    (
        rules.check_recompute,
        "replica 1 stage 0: recompute_num_layers 4 of a stage with 3 layers, halves counted as whole",
        lambda plan: in_stage(1, 0, recompute="full", recompute_num_layers=4)(cut_inside(2.5)(plan)),
    ),
    (
        rules.check_wgrad_delay,
        "replica 1 stage 0: wgrad_delay is -1, must be at least 0, or null for a backward in one",
        in_stage(1, 0, wgrad_delay=-1),
    ),
    (
        rules.check_wgrad_delay,
        "replica 0 stage 1: wgrad_delay 2 needs recompute none or selective, got full; "
        "set wgrad_delay to null or choose another recompute",
        in_stage(0, 1, wgrad_delay=2, recompute="full"),
    ),
    (
        device_rules.check_devices_are_known,
        "plan: devices: it describes 'mine' more than once; keep one of them",
        in_plan(devices=(DeviceType(name="mine"), DeviceType(name="mine", memory_gib=2))),
    ),
    (
        device_rules.check_fp8,
        r"replica 0 stage 0: fp8 is true, but device cpu has no CUDA, fp8 begins with 8\.9; set it to false",
        in_stage(0, 0, fp8=True),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.optimizer_from is 2, but the plan has no distributed_optimizer; set",
        in_stage(0, 0, offload=Offload(optimizer_from=2)),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 1: offload.optimizer_from is 2, but the stage holds positions 3 to 6, halves",
        on_host(0, 1, optimizer_from=2),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.optimizer_from is 3, but the stage holds positions -1 to 2½, halves",
        on_host(0, 0, optimizer_from=3),
    ),
    (offload_rules.check_offload, r"optimizer_from is -0.5, but the stage holds", on_host(0, 0, optimizer_from=-0.5)),
    (offload_rules.check_offload, r"optimizer_from is 1.2, but the stage holds", on_host(0, 0, optimizer_from=1.2)),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.speculate is true, but no optimizer is on the host; set optimizer_from or",
        on_host(0, 0, speculate=True),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.overlap is false, but no optimizer is on the host; set optimizer_from or leave",
        on_host(0, 0, overlap=False),
    ),
    (
        offload_rules.check_offload,
        r"plan: offload.overlap is true for some stages and false for others; make them equal",
        lambda plan: on_host(0, 1, optimizer_from=4)(on_host(0, 0, optimizer_from=1, overlap=False)(plan)),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 1: offload.activations_until is 2, but the stage has blocks at positions 3, 4, 5, 6; choose",
        in_offload(0, 1, activations_until=2),
    ),
    (
        offload_rules.check_offload,
        r"activations_until is 1.5, but the stage has blocks at positions -1, 0, 1, 2; choose",
        in_offload(0, 0, activations_until=1.5),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.activations_until is 1, and wgrad_delay is 2, beside which activations stay on",
        in_stage(0, 0, wgrad_delay=2, offload=Offload(activations_until=1)),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.gradients_from is 1, and optimizer_from is 2: gradients add up where hosts "
        "update; set optimizer_from to 1 or less",
        on_host(0, 0, optimizer_from=2, gradients_from=1),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.gradients_from is 1, and optimizer_from is missing: gradients add up",
        on_host(0, 0, gradients_from=1),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 1: offload.gradients_from is 7, but the stage holds positions 3 to 6, halves",
        on_host(0, 1, optimizer_from=3, gradients_from=7),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.weights_from is 1, and gradients_from is 2: gradients on the host free twice the "
        "bytes of weights for half the copies; set gradients_from to 1 or less",
        on_host(0, 0, optimizer_from=1, gradients_from=2, weights_from=1),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.weights_from is 1, and gradients_from is missing",
        on_host(0, 0, optimizer_from=1, weights_from=1),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 1: offload.weights_from is 7, but the stage holds positions 3 to 6, halves",
        on_host(0, 1, optimizer_from=3, gradients_from=3, weights_from=7),
    ),
    (
        offload_rules.check_offload,
        r"replica 0 stage 0: offload.gradients_from is 1, and wgrad_delay is 2, beside which gradients stay on the",
        lambda plan: in_plan(distributed_optimizer=True)(
            in_stage(0, 0, wgrad_delay=2, offload=Offload(optimizer_from=1, gradients_from=1))(plan)
        ),
    ),
    (
        offload_rules.check_offload,
        r"replica 0: stages \[0, 2\] are on the same ranks, and offload.speculate is true for some of them only",
        lambda _: half_speculating(),
    ),
    (
        device_rules.check_devices_can_do_the_precision,
        "replica 0 stage 1: device V100-16 has no bf16; choose fp16 for the whole plan, which every device has, or "
        "leave its ranks idle",
        lambda plan: in_plan(precision="bf16")(in_stage(0, 1, device="V100-16")(plan)),
    ),
    (
        rules.check_gradient_domains,
        "gradient_sync: domain 1 has no ranks; remove it",
        in_sync((0, 1, 2, 3, 4, 5, 6), ()),
    ),
    (
        rules.check_gradient_domains,
        r"gradient_sync: domain 1 names ranks \[8, 9\], the plan has 0 to 7; remove them",
        in_sync((0, 1, 2, 3), (4, 5, 6, 9, 8)),
    ),
    (
        rules.check_gradient_domains,
        r"gradient_sync: ranks \[3\] are named more than once",
        in_sync((0, 1, 2, 3), (3, 4, 5, 6)),
    ),
    (
        rules.check_gradient_domains,
        r"gradient_sync: ranks \[4, 6\] work and are in none of the 2 domains; put each",
        in_sync((0, 1, 2, 3), (5,)),
    ),
    (rules.check_gradient_buckets, "bucket_numel is 0, must be at least 1; leave it out", in_sync(bucket_numel=0)),
    (
        communicators.check_communicators,
        r"replica 5 stage 1: rank 42 would be in 61 communicators, at most 28 .* replica 4 \(cuts at 18, 23, 27, 34;",
        lambda _: eight_unlike_replicas(),
    ),
]


def test_no_rule_is_forgotten() -> None:
    """Every check is in CHECKS, which is what ``validate`` runs, and has an example of either kind below."""
    written = [
        rule
        for module in (rules, device_rules, offload_rules, communicators)
        for name, rule in vars(module).items()
        if name.startswith("check_") and rule.__module__ == module.__name__
    ]
    assert Counter(rules.CHECKS) == Counter(written)
    assert {rule for rule, _, _ in ALLOWED} == set(written)
    assert {rule for rule, _, _ in FORBIDDEN} | {rules.check_moe_uses_sequence_parallel} == set(written)


@pytest.mark.parametrize(("rule", "what", "change"), ALLOWED, ids=[f"{r.__name__}: {w}" for r, w, _ in ALLOWED])
def test_allowed(rule: Callable[[Plan], None], what: str, change: Change) -> None:
    rule(change(uneven_plan()))


@pytest.mark.parametrize(("rule", "message", "change"), FORBIDDEN, ids=[f"{r.__name__}: {m}" for r, m, _ in FORBIDDEN])
def test_forbidden(rule: Callable[[Plan], None], message: str, change: Change) -> None:
    with pytest.raises(PlanError, match=message):
        rule(change(uneven_plan()))


@pytest.mark.parametrize(("rule", "message", "change"), FORBIDDEN, ids=[f"{r.__name__}: {m}" for r, m, _ in FORBIDDEN])
def test_validate_forbids_it_too(rule: Callable[[Plan], None], message: str, change: Change) -> None:
    """Some plans break several rules; whichever comes first refuses them, and no rule trips over the mistake."""
    with pytest.raises(PlanError):
        validate(change(uneven_plan()))


@pytest.mark.parametrize("model", [gpt2_model(), llama_model()], ids=["learned", "rotary"])
def test_positions_end_whatever_they_are_embedded_by(model: ModelSpec) -> None:
    at_most = in_plan(seq_length=model.max_position_embeddings)(uneven_plan(model))
    rules.check_sequence_fits_positions(at_most)
    one_more = in_plan(seq_length=model.max_position_embeddings + 1)(at_most)
    with pytest.raises(PlanError, match=r"seq_length 65 exceeds the model's max_position_embeddings 64: its .*shorten"):
        rules.check_sequence_fits_positions(one_more)


def test_experts_need_sequence_parallelism() -> None:
    rules.check_moe_uses_sequence_parallel(uneven_plan(moe_model()))
    with pytest.raises(PlanError, match="replica 0 stage 0: experts with tp 2 need sequence_parallel true, or tp 1"):
        rules.check_moe_uses_sequence_parallel(in_stage(0, 0, sequence_parallel=False)(uneven_plan(moe_model())))


def test_experts_are_cut_along_their_own_size() -> None:
    with pytest.raises(PlanError, match="tp 2 does not divide moe_ffn_hidden_size 47"):
        rules.check_tp_divides(uneven_plan(moe_model(moe_ffn_hidden_size=47)))


def test_a_gated_mlp_is_cut_in_its_halves() -> None:
    """2 x 62 rows would divide by 4, the gate's 62 alone do not."""
    wide = in_stage(0, 0, tp=4, dp=1)(uneven_plan(llama_model(ffn_hidden_size=62)))
    with pytest.raises(PlanError, match="tp 4 does not divide ffn_hidden_size 62"):
        rules.check_tp_divides(wide)


def test_the_vocabulary_matters_only_where_it_is_held() -> None:
    model = gpt2_model(padded_vocab_size=63)
    middle = [
        stage(layers=(0, 2), ranks=(0,)),
        stage(layers=(2, 4), ranks=(1, 2), tp=2),
        stage(layers=(4, 6), ranks=(3,)),
    ]
    rules.check_tp_divides(plan(model, [replica(*middle)]))


def test_an_unknown_device_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"unknown device type 'V100' \(did you mean 'V100-16'"):
        validate(in_stage(0, 0, device="V100")(uneven_plan()))


@given(legal_plans())
@settings(max_examples=50, deadline=None)
def test_legal_plans_are_legal(random_plan: Plan) -> None:
    validate(random_plan)
