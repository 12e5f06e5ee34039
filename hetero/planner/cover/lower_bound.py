"""A lower bound on the step of any plan: all the work over all the speed.

A sample passes L layers, an embedding and a head. With a_k and m_k the least device-seconds of one attention and of one
MLP for one sample on node type k, over every tp and every microbatch that fits in memory, and w the attention's share
of a layer's worth, a device of node type k does in T seconds no more than T / e_k layers' worth of either, where

    e_k = min( a_k / w, m_k / (1 - w) )

whatever w is; it is the one of the node type with the fastest layer. With h_k the device-seconds of embedding and head
and r = min_k h_k / e_k, D_k devices of every node type do in T seconds at most sum_k D_k T / e_k of the B (L + r)
layers' worth of a global batch of B samples. The update of half a layer, u, follows the last of them:

    step >= u + B (L + r) / sum_k ( D_k / e_k )

It knows nothing of templates, layer cuts, pipelines, replicas or links, and so holds for every plan that the runtime
can execute; for the same reason a step this short is rarely possible.
"""

from dataclasses import dataclass

from hetero.plan.ir import Recompute
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.stage_options import RECOMPUTES, Slot, StageOptionTable
from hetero.spec.profile import HALVES


@dataclass(frozen=True, slots=True)
class _Least:
    """The least that one node type takes: device-seconds per sample, and the seconds of an update of half a layer."""

    attention_s: float
    mlp_s: float
    ends_s: float
    update_s: float


def lower_bound_s(problem: Problem, stage_options: StageOptionTable) -> float:
    """No plan has a shorter step than this, in seconds; 0 if no device holds a layer."""
    known = {
        node_type.index: _least(node_type, problem, stage_options) for node_type in stage_options.usable_node_types
    }
    least = {index: each for index, each in known.items() if each is not None}
    if not least:
        return 0.0
    fastest = min(least.values(), key=lambda each: each.attention_s + each.mlp_s)
    share = fastest.attention_s / (fastest.attention_s + fastest.mlp_s)
    per_layer = {index: min(each.attention_s / share, each.mlp_s / (1 - share)) for index, each in least.items()}
    ratio = min(each.ends_s / per_layer[index] for index, each in least.items())
    layers = problem.global_batch_size * (problem.model.num_layers + ratio)
    # How little of an update one of many ranks may be left with, nobody knows.
    update_s = 0.0 if problem.distributed_optimizer else min(each.update_s for each in least.values())
    return update_s + layers / sum(problem.node_types[k].num_devices / each for k, each in per_layer.items())


def _least(node_type: PlannerNodeType, problem: Problem, stage_options: StageOptionTable) -> _Least | None:
    """The least of a node type over every tp and microbatch, ``None`` if nothing fits.

    Without recomputation, which only takes longer. Between two measured microbatches time is a straight line, and so
    time per sample has its least value at one of them or at the largest that fits; how a layer splits into its halves
    hardly changes between them.
    """
    profile = problem.costs.profile_of(node_type.device)
    measured = {time.micro_batch_size for time in profile.times} if profile is not None else set()
    attentions_s, mlps_s, ends_s, updates_s = [], [], [], []
    for tp in stage_options.degrees(node_type.gpus_per_node):
        slot = Slot(node_type.index, tp, tp)
        largest = _largest_microbatch(slot, problem, stage_options)
        for size in sorted({1, largest, *measured}):
            if 1 <= size <= largest:
                option = stage_options.option(slot, size, "none")
                attention, mlp = (
                    problem.costs.layer(
                        half,
                        device=node_type.device,
                        tp=tp,
                        micro_batch_size=size,
                        sequence_parallel=problem.splits_sequence(tp),
                        fp8=option.fp8,
                    )
                    for half in HALVES
                )
                attentions_s.append(tp * (attention.forward_s + attention.backward_s) / size)
                mlps_s.append(tp * (mlp.forward_s + mlp.backward_s) / size)
                ends_s.append(tp * (option.embedding_s + option.head_s) / size)
                updates_s += [problem.costs.update(half, device=node_type.device, tp=tp)[0] for half in HALVES]
    if not attentions_s:
        return None
    return _Least(min(attentions_s), min(mlps_s), min(ends_s), min(updates_s))


def _largest_microbatch(slot: Slot, problem: Problem, stage_options: StageOptionTable) -> int:
    """The largest microbatch with which a stage fits, its layers not counted; 0 if not even one sample does.

    With a distributed optimizer nobody knows how little of its state a device may have, so everything fits.
    """
    if problem.distributed_optimizer:
        return problem.global_batch_size

    def largest(recompute: Recompute) -> int:
        one, two = (stage_options.option(slot, size, recompute) for size in (1, 2))
        base, more = (option.memory.bytes(0, 1, first=False, last=False) for option in (one, two))
        # Bytes are a straight line in the samples, but for rounding: one sample more loses nothing of the bound.
        room = one.capacity_bytes - base
        return 0 if room < 0 else min(2 + int(room / max(1.0, more - base)), problem.global_batch_size)

    return max(largest(recompute) for recompute in RECOMPUTES)
