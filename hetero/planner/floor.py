"""Seconds below which no plan whatever can be: all the work over all the speed.

A sample passes L layers, an embedding and a head. With e_k the least device-seconds of one layer for one sample on kind
k, over every tp and every microbatch that fits in memory beside one layer, h_k those of embedding and head, and
r = min_k h_k / e_k, D_k devices of every kind do in T seconds at most sum_k D_k T / e_k of the B (L + r) layers' worth
of a global batch of B samples. The update of one layer, u, follows the last of them:

    step >= u + B (L + r) / sum_k ( D_k / e_k )

It knows nothing of templates, layer cuts, pipelines, replicas or links, and so holds for every plan that the runtime
can execute; for the same reason a step this short is rarely possible.
"""

from hetero.planner.candidates import RECOMPUTES, Candidates, Slot
from hetero.planner.problem import NodeKind, Problem


def floor_s(problem: Problem, candidates: Candidates) -> float:
    """The bound at the head of this file; 0 if no device holds a layer."""
    per_layer: dict[int, float] = {}
    ratios, updates = [], []
    for kind in candidates.usable_kinds:
        costs = list(_costs(kind, problem, candidates))
        if costs:
            per_layer[kind.index] = min(layer_s for layer_s, _, _ in costs)
            ratios.append(min(ends_s for _, ends_s, _ in costs) / per_layer[kind.index])
            updates.append(min(update_s for _, _, update_s in costs))
    if not per_layer:
        return 0.0
    layers = problem.global_batch_size * (problem.model.num_layers + min(ratios))
    return min(updates) + layers / sum(problem.kinds[k].num_devices / each for k, each in per_layer.items())


def _costs(kind: NodeKind, problem: Problem, candidates: Candidates) -> list[tuple[float, float, float]]:
    """Device-seconds per sample of a layer, and of embedding and head, and the update of a layer, by tp and microbatch.

    Without recomputation, which only takes longer. Between two measured microbatches time is a straight line, and so
    time per sample has its least value at one of them or at the largest that fits.
    """
    costs = []
    for tp in candidates.degrees(kind.gpus_per_node):
        slot = Slot(kind.index, tp, tp)
        largest = _largest_microbatch(slot, problem, candidates)
        profile = problem.costs.profile_of(kind.device)
        measured = {time.micro_batch_size for time in profile.times} if profile is not None else set()
        for size in sorted({1, largest, *measured}):
            if 1 <= size <= largest:
                option = candidates.option(slot, size, "none")
                ends_s = option.embedding_s + option.head_s
                costs.append((tp * option.layer_s / size, tp * ends_s / size, option.updates_s[0]))
    return costs


def _largest_microbatch(slot: Slot, problem: Problem, candidates: Candidates) -> int:
    """The largest microbatch with which one layer fits under some recomputation; 0 if not even one sample does.

    With a distributed optimizer nobody knows how little of its state a device may have, so everything fits.
    """
    if problem.costs.traits.distributed_optimizer:
        return problem.global_batch_size
    low, high = 0, problem.global_batch_size
    while low < high:
        middle = (low + high + 1) // 2
        options = [candidates.option(slot, middle, recompute) for recompute in RECOMPUTES]
        if any(option.most_layers(1, first=False, last=False) for option in options):
            low = middle
        else:
            high = middle - 1
    return low
