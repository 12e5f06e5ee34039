"""The table of layouts that every distributed feature is held against one process on.

Each entry is a plan builder for a model of 6 layers; ``layouts()`` yields (name, style, plan). Small numbers, odd
shapes: unequal layers, tp, dp, microbatches, depths and shares, each for the model styles where it applies.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any

import pytest

from hetero.plan.ir import Plan, Replica, Stage
from hetero.spec.model import ModelSpec, RotaryScaling
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, sharded, stage, with_every_replica

STRETCHED = RotaryScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
)
"""Llama 3.2's kind, whose small models tie their embeddings as well. Of two wavelengths, 6 lies between what is kept
(below 2) and what is divided (above 8), and 628 is divided."""

STYLES: dict[str, Callable[[], ModelSpec]] = {
    "gpt2-tied": gpt2_model,
    "llama-gqa": llama_model,
    "gpt2-untied": lambda: gpt2_model(tied_embeddings=False),
    "llama-tied": lambda: llama_model(tied_embeddings=True, rotary_scaling=STRETCHED),
    "llama-qk-norm": lambda: llama_model(qk_layernorm=True),
    "moe": moe_model,
}
BOTH = ("gpt2-tied", "llama-gqa")

Group = Mapping[str, Any]
"""What :func:`stage` takes of the stages that the same ranks hold."""


def _one_stage(model: ModelSpec) -> Plan:
    return plan(model, [replica(stage(layers=(0, 6), ranks=(0,), mbs=2), num_samples=4)])


def _one_stage_tp4(model: ModelSpec) -> Plan:
    return plan(model, [replica(stage(layers=(0, 6), ranks=range(4), tp=4, sp=True), num_samples=4)])


def _uneven_layers(model: ModelSpec) -> Plan:
    return plan(model, [replica(stage(layers=(0, 5), ranks=(0,)), stage(layers=(5, 6), ranks=(1,)), num_samples=4)])


def _four_stages(model: ModelSpec) -> Plan:
    cuts = ((0, 1), (1, 3), (3, 5), (5, 6))
    return plan(model, [replica(*(stage(layers=c, ranks=(r,)) for r, c in enumerate(cuts)), num_samples=6)])


def _tp_2_1(model: ModelSpec) -> Plan:
    first = stage(layers=(0, 4), ranks=(0, 1), tp=2)
    return plan(model, [replica(first, stage(layers=(4, 6), ranks=(2,)), num_samples=4)])


def _tp_1_2_4(model: ModelSpec, *, sp: bool = False) -> Plan:
    stages = (
        stage(layers=(0, 1), ranks=(0,), sp=sp),
        stage(layers=(1, 4), ranks=(1, 2), tp=2, sp=sp),
        stage(layers=(4, 6), ranks=(3, 4, 5, 6), tp=4, sp=sp),
    )
    return plan(model, [replica(*stages, num_samples=4)])


def _tp_4_2_1_mixed_sp(model: ModelSpec) -> Plan:
    stages = (
        stage(layers=(0, 2), ranks=(0, 1, 2, 3), tp=4, sp=True),
        stage(layers=(2, 4), ranks=(4, 5), tp=2),
        stage(layers=(4, 6), ranks=(6,)),
    )
    return plan(model, [replica(*stages, num_samples=4)])


def _tp2dp1_tp2dp2_tp1dp2(model: ModelSpec) -> Plan:
    stages = (
        stage(layers=(0, 2), ranks=(0, 1), tp=2, mbs=2),
        stage(layers=(2, 4), ranks=(2, 3, 4, 5), tp=2, dp=2, sp=True),
        stage(layers=(4, 6), ranks=(6, 7), dp=2),
    )
    return plan(model, [replica(*stages, num_samples=8)])


def _dp_2_4(model: ModelSpec) -> Plan:
    first = stage(layers=(0, 3), ranks=(0, 1), dp=2, mbs=2)
    return plan(model, [replica(first, stage(layers=(3, 6), ranks=(2, 3, 4, 5), dp=4), num_samples=8)])


def _tp_2_4_2(model: ModelSpec) -> Plan:
    stages = (
        stage(layers=(0, 2), ranks=(0, 1), tp=2, sp=True),
        stage(layers=(2, 5), ranks=(2, 3, 4, 5), tp=4, sp=True),
        stage(layers=(5, 6), ranks=(6, 7), tp=2, sp=True),
    )
    return plan(model, [replica(*stages, num_samples=4)])


def _micro_batches(*sizes: int) -> Callable[[ModelSpec], Plan]:
    def build(model: ModelSpec) -> Plan:
        cuts = ((0, 4), (4, 6)) if len(sizes) == 2 else ((0, 1), (1, 4), (4, 6))
        stages = (stage(layers=c, ranks=(r,), mbs=m) for r, (c, m) in enumerate(zip(cuts, sizes, strict=True)))
        return plan(model, [replica(*stages, num_samples=8)])

    return build


def _micro_batches_dp_tp(model: ModelSpec) -> Plan:
    """A coarse stage whose data-parallel ranks feed a finer one with tensor and sequence parallelism."""
    stages = (
        stage(layers=(0, 3), ranks=(0, 1), dp=2, mbs=2),
        stage(layers=(3, 5), ranks=(2, 3, 4, 5), tp=4, sp=True),
        stage(layers=(5, 6), ranks=(6, 7), dp=2, mbs=4),
    )
    return plan(model, [replica(*stages, num_samples=8)])


def _depths_1_2_3(model: ModelSpec) -> Plan:
    return plan(
        model,
        [
            replica(stage(layers=(0, 6), ranks=(0,)), num_samples=2),
            replica(stage(layers=(0, 4), ranks=(1,)), stage(layers=(4, 6), ranks=(2,)), num_samples=3),
            replica(
                stage(layers=(0, 1), ranks=(3,)),
                stage(layers=(1, 3), ranks=(4,)),
                stage(layers=(3, 6), ranks=(5,)),
                num_samples=4,
            ),
        ],
    )


def _same_layer_tp_2_and_4(model: ModelSpec) -> Plan:
    return plan(
        model,
        [
            replica(stage(layers=(0, 6), ranks=(0, 1), tp=2, sp=True), num_samples=3),
            replica(stage(layers=(0, 6), ranks=(2, 3, 4, 5), tp=4), num_samples=5),
        ],
    )


def _shares_5_3_1(model: ModelSpec) -> Plan:
    shares = (5, 3, 1)
    return plan(model, [replica(stage(layers=(0, 6), ranks=(r,)), num_samples=n) for r, n in enumerate(shares)])


def _idle_ranks(model: ModelSpec) -> Plan:
    first = replica(stage(layers=(0, 2), ranks=(4,)), stage(layers=(2, 6), ranks=(1, 3), tp=2), num_samples=4)
    second = replica(stage(layers=(0, 6), ranks=(0,), mbs=2), num_samples=2)
    return plan(model, [first, second], idle_ranks=(2, 5))


def _everything(model: ModelSpec) -> Plan:
    first = replica(
        stage(layers=(0, 3), ranks=(0, 1), tp=2, mbs=2, sp=True),
        stage(layers=(3, 6), ranks=(2,), mbs=1),
        num_samples=4,
    )
    second = replica(
        stage(layers=(0, 1), ranks=(3,), mbs=1),
        stage(layers=(1, 4), ranks=(4, 5), dp=2, mbs=1),
        stage(layers=(4, 6), ranks=(6,), mbs=2),
        num_samples=6,
    )
    return plan(model, [first, second], idle_ranks=(7,))


def _recompute(model: ModelSpec) -> Plan:
    first = stage(layers=(0, 4), ranks=(0, 1), tp=2, sp=True, recompute="full", recompute_num_layers=3)
    return plan(model, [replica(first, stage(layers=(4, 6), ranks=(2,), recompute="selective"), num_samples=4)])


def _half_cuts(model: ModelSpec) -> Plan:
    """An MLP alone, an attention alone, a stage of an MLP and the attention behind it, and halves at the ends."""
    cuts = ((0, 0.5), (0.5, 2.5), (2.5, 3), (3, 3.5), (3.5, 4.5), (4.5, 6))
    return plan(model, [replica(*(stage(layers=c, ranks=(r,)) for r, c in enumerate(cuts)), num_samples=6)])


def _half_cut_at_the_last_mlp(model: ModelSpec) -> Plan:
    first = stage(layers=(0, 5.5), ranks=(0, 1), dp=2)
    return plan(model, [replica(first, stage(layers=(5.5, 6), ranks=(2,), mbs=2), num_samples=4)])


def _half_cuts_tp(model: ModelSpec, *, sp: bool) -> Plan:
    """Cuts between attention and MLP where tensor parallelism begins, changes and ends."""
    stages = (
        stage(layers=(0, 1.5), ranks=(0,)),
        stage(layers=(1.5, 4), ranks=(1, 2), tp=2, sp=sp),
        stage(layers=(4, 4.5), ranks=(3, 4), tp=2, sp=sp),
        stage(layers=(4.5, 6), ranks=(5, 6, 7, 8), tp=4, sp=sp),
    )
    return plan(model, [replica(*stages, num_samples=4)])


def _half_cut_beside_whole_layers(model: ModelSpec) -> Plan:
    """Of two replicas one cuts layers in half; the other has them whole, elsewhere and with other shards."""
    halves = replica(
        stage(layers=(0, 2.5), ranks=(0,), mbs=2),
        stage(layers=(2.5, 4), ranks=(1, 2), dp=2),
        stage(layers=(4, 6), ranks=(3,)),
        num_samples=4,
    )
    whole = replica(
        stage(layers=(0, 3), ranks=(4, 5), tp=2, sp=True),
        stage(layers=(3, 6), ranks=(6,)),
        num_samples=3,
    )
    return plan(model, [halves, whole])


def _half_cuts_recompute(model: ModelSpec) -> Plan:
    """Full recomputation of some layers and of all, halves counted as layers, and selective of a half."""
    stages = (
        stage(layers=(0, 1.5), ranks=(0, 1), tp=2, sp=True, recompute="full"),
        stage(layers=(1.5, 3.5), ranks=(2,), recompute="full", recompute_num_layers=2),
        stage(layers=(3.5, 4), ranks=(3,), recompute="selective"),
        stage(layers=(4, 4.5), ranks=(4,), recompute="full"),
        stage(layers=(4.5, 6), ranks=(5,), recompute="selective"),
    )
    return plan(model, [replica(*stages, num_samples=4)])


def _moe_tp(model: ModelSpec) -> Plan:
    first = stage(layers=(0, 4), ranks=(0, 1), tp=2, sp=True)
    return plan(
        model,
        [
            replica(first, stage(layers=(4, 6), ranks=(2,)), num_samples=4),
            replica(stage(layers=(0, 6), ranks=(3, 4, 5, 6), tp=4, sp=True), num_samples=2),
        ],
    )


def _in_turns(*groups: Group, cuts: Sequence[float]) -> Iterator[Stage]:
    """Stages that end at ``cuts`` and at the last layer, on one of ``groups`` after the other, over and over."""
    for held, group in zip(pairwise((0, *cuts, 6)), cycle(groups), strict=False):
        yield stage(layers=held, **group)


def _interleaved(*groups: Group, cuts: Sequence[float], num_samples: int = 4) -> Callable[[ModelSpec], Plan]:
    return lambda model: plan(model, [replica(*_in_turns(*groups, cuts=cuts), num_samples=num_samples)])


def _interleaved_beside_plain(model: ModelSpec) -> Plan:
    """Of two replicas one interleaves; the other holds every layer elsewhere and with other shards."""
    first, second = {"ranks": (0, 1), "tp": 2, "sp": True, "mbs": 2}, {"ranks": (2,)}
    turns = replica(*_in_turns(first, second, cuts=(1, 3, 5)), num_samples=4)
    plain = replica(
        stage(layers=(0, 2), ranks=(3,)), stage(layers=(2, 6), ranks=(4, 5, 6, 7), tp=4, sp=True), num_samples=3
    )
    return plan(model, [turns, plain])


def _interleaved_delays(model: ModelSpec) -> Plan:
    """Stages with whole and with split backwards on the same ranks, deeper than they need be."""
    stages = _in_turns({"ranks": (0,), "mbs": 2}, {"ranks": (1, 2), "tp": 2}, cuts=(1, 2.5, 4))
    delays, depths = (1, None, 0, 2), (2, 3, 2, 3)
    split = (
        dataclasses.replace(each, wgrad_delay=delay, in_flight=depth)
        for each, delay, depth in zip(stages, delays, depths, strict=True)
    )
    return plan(model, [replica(*split, num_samples=6)])


def _interleaved_shares(model: ModelSpec) -> Plan:
    """Two interleaved replicas, unlike in cuts and turns, that share optimizer state unevenly; one rank idles."""
    two = list(_in_turns({"ranks": (0,)}, {"ranks": (3, 4), "dp": 2, "mbs": 2}, cuts=(2, 3, 5)))
    heavy = [dataclasses.replace(each, optimizer_share=3 if s % 2 else 1) for s, each in enumerate(two)]
    three = _in_turns({"ranks": (1,)}, {"ranks": (6,)}, {"ranks": (2,), "mbs": 2}, cuts=(1, 2, 3, 4))
    replicas = [replica(*heavy, num_samples=8), replica(*three, num_samples=6)]
    return sharded(plan(model, replicas, idle_ranks=(5,)))


def _interleaved_gpipe(model: ModelSpec) -> Plan:
    stages = _in_turns({"ranks": (0,), "depth": 4}, {"ranks": (1,), "depth": 4}, cuts=(1, 2, 4))
    beside = replica(stage(layers=(0, 6), ranks=(2,)), num_samples=2)
    return plan(model, [replica(*stages, num_samples=4, schedule="gpipe"), beside])


_TABLE: tuple[tuple[str, Callable[[ModelSpec], Plan], tuple[str, ...]], ...] = (
    ("one-stage", _one_stage, BOTH),
    ("one-stage-tp4-sp", _one_stage_tp4, BOTH),
    ("uneven-layers", _uneven_layers, (*BOTH, "gpt2-untied", "llama-tied")),
    ("four-stages", _four_stages, BOTH),
    ("tp-2|1", _tp_2_1, (*BOTH, "llama-qk-norm")),
    ("tp-1|2|4", _tp_1_2_4, BOTH),
    ("tp-1|2|4-sp", lambda model: _tp_1_2_4(model, sp=True), BOTH),
    ("tp-4sp|2|1", _tp_4_2_1_mixed_sp, BOTH),
    ("tp2dp1|tp2dp2sp|tp1dp2", _tp2dp1_tp2dp2_tp1dp2, BOTH),
    ("dp-2|4", _dp_2_4, (*BOTH, "llama-tied")),
    ("tp-2|4|2-sp", _tp_2_4_2, (*BOTH, "llama-qk-norm")),
    ("micro-batch-4|1", _micro_batches(4, 1), BOTH),
    ("micro-batch-1|4", _micro_batches(1, 4), BOTH),
    ("micro-batch-2|4|1", _micro_batches(2, 4, 1), BOTH),
    ("micro-batch-dp2x2|tp4x1|dp2x4", _micro_batches_dp_tp, BOTH),
    ("depths-1+2+3", _depths_1_2_3, BOTH),
    ("same-layer-tp-2+4", _same_layer_tp_2_and_4, (*BOTH, "llama-qk-norm")),
    ("shares-5:3:1", _shares_5_3_1, BOTH),
    ("idle-ranks", _idle_ranks, BOTH),
    ("everything", _everything, (*BOTH, "gpt2-untied", "llama-tied")),
    ("recompute", _recompute, BOTH),
    ("moe", _moe_tp, ("moe",)),
    ("half-cuts", _half_cuts, tuple(STYLES)),
    ("half-cut-dp2|1", _half_cut_at_the_last_mlp, BOTH),
    ("half-cuts-tp-1|2|2|4", lambda model: _half_cuts_tp(model, sp=False), (*BOTH, "llama-qk-norm")),
    ("half-cuts-tp-1|2|2|4-sp", lambda model: _half_cuts_tp(model, sp=True), (*BOTH, "moe")),
    ("half-cut-and-whole", _half_cut_beside_whole_layers, (*BOTH, "gpt2-untied", "llama-tied", "moe")),
    ("half-cuts-recompute", _half_cuts_recompute, (*BOTH, "moe")),
    ("interleaved-2x2", _interleaved({"ranks": (0,)}, {"ranks": (1,)}, cuts=(1, 3, 4)), ("gpt2-tied", "llama-tied")),
    (
        "interleaved-tp-2sp|1x2",
        _interleaved({"ranks": (0, 1), "tp": 2, "sp": True}, {"ranks": (2,), "mbs": 2}, cuts=(2, 3, 5)),
        ("llama-qk-norm",),
    ),
    (
        "interleaved-3x2",
        _interleaved({"ranks": (0,)}, {"ranks": (2,)}, {"ranks": (1,)}, cuts=(1, 2, 3, 4, 5), num_samples=5),
        ("gpt2-tied",),
    ),
    # The ranks of the first stage have the last one, too.
    (
        "interleaved-there-and-back",
        _interleaved({"ranks": (1, 2), "tp": 2}, {"ranks": (0,)}, cuts=(2, 5)),
        ("llama-gqa",),
    ),
    (
        "interleaved-dp-2|tp-2x2",
        _interleaved(
            {"ranks": (0, 1), "dp": 2},
            {"ranks": (2, 3), "tp": 2, "sp": True, "mbs": 4},
            cuts=(1, 3, 4),
            num_samples=8,
        ),
        ("llama-gqa",),
    ),
    (
        "interleaved-half-cuts",
        _interleaved({"ranks": (0,)}, {"ranks": (1, 2), "tp": 2, "sp": True}, cuts=(0.5, 2, 2.5, 4, 5.5)),
        ("gpt2-tied", "moe"),
    ),
    (
        "interleaved-recompute",
        _interleaved(
            {"ranks": (0, 1), "dp": 2, "recompute": "full"}, {"ranks": (2,), "recompute": "selective"}, cuts=(1, 2, 4)
        ),
        ("llama-gqa",),
    ),
    ("interleaved-and-plain", _interleaved_beside_plain, ("llama-tied", "moe")),
    ("interleaved-delays", _interleaved_delays, ("llama-gqa",)),
    ("interleaved-shares", _interleaved_shares, ("gpt2-tied", "gpt2-untied")),
    ("interleaved-gpipe", _interleaved_gpipe, ("llama-gqa",)),
)


@functools.cache
def layouts() -> tuple[tuple[str, str, Plan], ...]:
    """Every layout in float64 as (its name, the model style, the plan)."""
    return tuple((name, style, _in_float64(build, style)) for name, build, styles in _TABLE for style in styles)


def in_turns(name: str, *, every: int, first: int = 0) -> pytest.MarkDecorator:
    """The mark of a layout that has its turn in each so many runs, in one of its cases; its neighbours in the table
    have theirs in others. The table's own first layout has it in run ``first``."""
    place = [each for each, _, _ in _TABLE].index(name)
    return pytest.mark.rotates(name, every=every, turn=(first + place) % every)


def layout(name: str, style: str) -> Plan:
    """One of :func:`layouts`."""
    (made,) = (made for *named, made in layouts() if named == [name, style])
    return made


def _in_float64(build: Callable[[ModelSpec], Plan], style: str) -> Plan:
    return dataclasses.replace(build(STYLES[style]()), precision="fp64")


def with_delays(whole: Plan, delays: Sequence[int | None]) -> Plan:
    """``whole`` with split backwards: stages get delays in turn, unless they recompute all."""

    def split(each: Replica) -> Replica:
        turns = zip(each.stages, cycle(delays), strict=False)
        return each.with_each_stage(
            wgrad_delay=[None if stage.recompute == "full" else delay for stage, delay in turns]
        )

    return with_every_replica(whole, split)
