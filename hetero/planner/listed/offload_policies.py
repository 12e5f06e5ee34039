"""Lists plans by the rules of published systems that train beside a host's memory, labelled as policies.

Their decisions are expressed as plans of this runtime, priced and executed like any other; their own implementations
are not measured by it. Each gives every device a whole replica (pipelines are not theirs), and computes everything
again or nothing unless said. Where a rule leaves something open, all of it is listed and the best counts.

    zero-offload   All optimizer state is on the host, which has the gradients of a block as soon as a backward has
                   them; the next step begins when all is updated and copied back (ZeRO-Offload, arXiv 2101.06840).
                   Gradients may also stay, which is better with many microbatches. Left out: its delayed update,
                   which changes what is trained.
    patrickstar    Weights on the device as far as they fit; optimizer state there in what memory is left, and only the
                   rest updated by the host, behind the backward as above (PatrickStar, arXiv 2108.05818; what is left
                   for state: ``margin_use_ratio`` in doc/optimization_options.md of Tencent/PatrickStar, here all of
                   it). Not expressible: gradients that take the memory of their weights, and chunks that go and come
                   as the memory for activations changes within a step.
    stronghold     A window of layers is on the device with all of its state; of all others the host has weights,
                   gradients and state, fetches ahead for each compute and updates beside the backward and the next
                   forward (StrongHold, SC'22, doi 10.1109/SC41404.2022.00076). Here the window is the first layers and
                   two that come and go. Updates wait for the norm or are tried before it. Not expressible: weights of
                   more than one block ahead, several optimizers that update one after the other's chunk at the same
                   time, and more than one microbatch at a time beside the same weights.
    autohete       Three numbers of layers: computed again, with optimizer state on the host (updated beside the next
                   forward), with weights on the host (AutoHete, arXiv 2503.01890). Gradients of what the host updates
                   leave as a backward has them, or stay. Not expressible: weights on the host whose state is not.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from hetero.cost.cost_model import StageConfig
from hetero.cost.memory import plan_memory
from hetero.cost.offload.host_rates import can_update, host_rates
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.planner.listed.listed_plans import Listed, Listing
from hetero.planner.problem import Problem
from hetero.planner.scoring import EstimatedPlan, bytes_over_capacity
from hetero.spec.parameters import parameters

STEPS_OF_A_COUNT = 8
"""Numbers of layers that are tried are multiples of so many parts of all layers. A heuristic."""

STEPS_OF_WEIGHTS = 4
"""The same of layers whose weights are on the host. A heuristic."""


def zero_offload_plans(problem: Problem) -> Listing:
    """List whole replicas on all devices that leave all updates to hosts, one after the other with the computes."""
    for size, recomputed in _shapes(problem):
        for gradients in (True, False):
            yield _listed(problem, size, recomputed, _OnHost(problem.model.num_layers, gradients, overlap=False))


def patrickstar_plans(problem: Problem) -> Listing:
    """List whole replicas on all devices with as much state there as fits, updated behind the backward."""
    num_layers = problem.model.num_layers
    for size, recomputed in _shapes(problem):
        for least in (_OnHost(0, gradients=True, overlap=False), _OnHost(0, overlap=False)):
            yield _fewest_listed(problem, size, recomputed, partial(_updating, least))
        if not _fits(problem, size, recomputed, _OnHost(num_layers, gradients=True, overlap=False)):
            yield _fewest_listed(
                problem, size, recomputed, lambda n: _OnHost(num_layers, gradients=True, weights=n, overlap=False)
            )


def stronghold_plans(problem: Problem) -> Listing:
    """List whole replicas on all devices with a window of layers there and all else on the hosts."""
    num_layers = problem.model.num_layers
    for size, recomputed in _shapes(problem):
        fewest = _fewest(problem, size, recomputed, lambda n: _OnHost(n, gradients=True, weights=n))
        if fewest is None:
            yield None
            continue
        for on_host in {fewest, *(count for count in _counts(num_layers, STEPS_OF_A_COUNT) if count > fewest)}:
            for speculate in (False, True)[: 1 + problem.previews]:
                yield _listed(
                    problem, size, recomputed, _OnHost(on_host, gradients=True, weights=on_host, speculate=speculate)
                )


def autohete_plans(problem: Problem) -> Listing:
    """List whole replicas on all devices by three numbers of layers: recomputed, updated and kept by the hosts."""
    num_layers = problem.model.num_layers
    counts = _counts(num_layers, STEPS_OF_A_COUNT)
    kinds = [_OnHost(0), *(_OnHost(0, True, weights) for weights in _counts(num_layers, STEPS_OF_WEIGHTS))]
    for size, recomputed, kind in itertools.product(_sizes(problem), counts, kinds):
        fewest = _fewest(problem, size, recomputed, partial(_updating, kind))
        if fewest is None:
            yield None
            continue
        for count in sorted({max(fewest, kind.weights), num_layers}):
            yield _listed(problem, size, recomputed, _updating(kind, count))


POLICIES: Mapping[str, Callable[[Problem], Listing]] = {
    "zero-offload": zero_offload_plans,
    "patrickstar": patrickstar_plans,
    "stronghold": stronghold_plans,
    "autohete": autohete_plans,
}
"""By name of the policy, what lists its plans."""


@dataclass(frozen=True, slots=True)
class _OnHost:
    """What a policy leaves to hosts.

    layers: so many of the last ones are updated there, all of them with the embedding.
    gradients: theirs add up there.
    weights: those of so many of the last ones are there.
    """

    layers: int
    gradients: bool = False
    weights: int = 0
    overlap: bool = True
    speculate: bool = False

    def offload(self, num_layers: int) -> Offload:
        if not self.layers:
            return NOTHING_ON_HOST
        first, weights = (
            None if not count else -1.0 if count == num_layers else float(num_layers - count)
            for count in (self.layers, self.weights)
        )
        return Offload(
            optimizer_from=first,
            gradients_from=first if self.gradients else None,
            weights_from=weights,
            speculate=self.speculate,
            overlap=self.overlap,
        )


def _updating(on_host: _OnHost, layers: int) -> _OnHost:
    return dataclasses.replace(on_host, layers=max(layers, on_host.weights))


def _counts(num_layers: int, steps: int) -> list[int]:
    return sorted({num_layers * part // steps for part in range(steps + 1)})


def _ranks(problem: Problem) -> list[int]:
    """Those that have a replica each: the ones whose devices have the precision."""
    return [rank for node_type in problem.usable_node_types for rank in node_type.ranks]


def _sizes(problem: Problem) -> Iterator[int]:
    """Samples of a microbatch: powers of two that divide the samples of a device."""
    num_devices = len(_ranks(problem))
    size = 1
    while problem.global_batch_size % (size * num_devices) == 0:
        yield size
        size *= 2


def _shapes(problem: Problem) -> Iterator[tuple[int, int]]:
    """Samples of a microbatch, and the layers that are computed again: none or all."""
    return itertools.product(_sizes(problem), (0, problem.model.num_layers))


def _fits(problem: Problem, size: int, recomputed: int, on_host: _OnHost) -> bool:
    plan = _plan(problem, size, recomputed, on_host)
    return not bytes_over_capacity(plan, problem, plan_memory(plan, problem.costs))


def _fewest(problem: Problem, size: int, recomputed: int, on_host: Callable[[int], _OnHost]) -> int | None:
    """The fewest layers on hosts with which the devices have room; ``None`` if all of them are not enough."""
    low, high = 0, problem.model.num_layers
    if not _fits(problem, size, recomputed, on_host(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        if _fits(problem, size, recomputed, on_host(middle)):
            high = middle
        else:
            low = middle + 1
    return low


def _fewest_listed(problem: Problem, size: int, recomputed: int, on_host: Callable[[int], _OnHost]) -> Listed:
    fewest = _fewest(problem, size, recomputed, on_host)
    return None if fewest is None else _listed(problem, size, recomputed, on_host(fewest))


def _listed(problem: Problem, size: int, recomputed: int, on_host: _OnHost) -> EstimatedPlan:
    """With a lower bound: the slowest device's computes and updates, and its host's, one beside the other."""
    model, num_devices = problem.model, len(_ranks(problem))
    microbatches = problem.global_batch_size // (size * num_devices)
    seconds = 0.0
    left = on_host.layers / model.num_layers
    for usable in problem.usable_node_types:
        node_type = problem.cluster.node_types[usable.index]
        costs = problem.costs.stage(
            StageConfig(
                node_type.device,
                0,
                model.num_layers,
                1,
                size,
                recompute="full" if recomputed else "none",
                recompute_num_layers=recomputed or None,
            )
        )
        device_s = microbatches * costs.microbatch_s
        host_s = 0.0
        if on_host.layers and can_update(node_type):
            numel = sum(each.numel for each in parameters(model) if each.position >= 0)
            host_s = host_rates(node_type).update_s(left * numel / num_devices)
        seconds = max(seconds, max(device_s, host_s) if on_host.overlap else device_s + host_s)
    return EstimatedPlan(seconds, lambda: _plan(problem, size, recomputed, on_host))


def _plan(problem: Problem, size: int, recomputed: int, on_host: _OnHost) -> Plan:
    model, ranks = problem.model, _ranks(problem)
    return problem.plan_of(
        Replica(
            num_samples=problem.global_batch_size // len(ranks),
            stages=(
                Stage(
                    first_layer=0,
                    end_layer=model.num_layers,
                    ranks=(rank,),
                    device=problem.node_type_of(rank).device,
                    micro_batch_size=size,
                    in_flight=1,
                    recompute="full" if recomputed else "none",
                    recompute_num_layers=recomputed if 0 < recomputed < model.num_layers else None,
                    offload=on_host.offload(model.num_layers),
                ),
            ),
        )
        for rank in ranks
    )
