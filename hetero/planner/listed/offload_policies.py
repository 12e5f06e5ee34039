"""Lists plans by the rules of published systems that train beside a host's memory, labelled as policies.

Their decisions are expressed as plans of this runtime, priced and executed like any other; their own implementations
are not measured by it. Each gives every device a whole replica (pipelines are not theirs), and leaves gradients,
weights and activations on the device, where this runtime keeps them.

    zero-offload   all optimizer state is on the host; the next step begins when all of it is updated and copied back
                   (ZeRO-Offload, arXiv 2101.06840, without its delayed update, which changes what is trained)
    autohete       a number of layers computed again, and a number whose optimizer state is on the host, updated beside
                   the next forward (AutoHete, arXiv 2503.01890, without the layers whose weights are streamed)
"""

import itertools
from collections.abc import Iterator

from hetero.cost.cost_model import StageConfig
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.planner.listed.listed_plans import Listing
from hetero.planner.problem import Problem
from hetero.planner.scoring import EstimatedPlan

STEPS_OF_A_COUNT = 8
"""Numbers of layers that are tried are multiples of so many parts of all layers. A heuristic."""


def zero_offload_plans(problem: Problem) -> Listing:
    """List whole replicas on all devices, for every microbatch, with everything computed again or nothing."""
    everything = Offload(optimizer_from=-1.0, overlap=False)
    for size in _sizes(problem):
        for recomputed in (0, problem.model.num_layers):
            yield _estimated(problem, size, recomputed, everything)


def autohete_plans(problem: Problem) -> Listing:
    """List whole replicas on all devices, for every microbatch and number of layers of either kind."""
    num_layers = problem.model.num_layers
    counts = sorted({num_layers * part // STEPS_OF_A_COUNT for part in range(STEPS_OF_A_COUNT + 1)})
    for size, recomputed, on_host in itertools.product(_sizes(problem), counts, counts):
        # Those whose gradients come first: the last ones, and with all layers the embedding too.
        first = -1.0 if on_host == num_layers else float(num_layers - on_host)
        yield _estimated(problem, size, recomputed, Offload(optimizer_from=first) if on_host else NOTHING_ON_HOST)


def _sizes(problem: Problem) -> Iterator[int]:
    """Samples of a microbatch: powers of two that divide the samples of a device."""
    num_devices = problem.cluster.num_devices
    size = 1
    while problem.global_batch_size % (size * num_devices) == 0:
        yield size
        size *= 2


def _estimated(problem: Problem, size: int, recomputed: int, offload: Offload) -> EstimatedPlan:
    """By the seconds of the slowest device's computes alone."""
    model, num_devices = problem.model, problem.cluster.num_devices
    microbatches = problem.global_batch_size // (size * num_devices)
    seconds = max(
        problem.costs.stage(
            StageConfig(
                node_type.device,
                0,
                model.num_layers,
                1,
                size,
                recompute="full" if recomputed else "none",
                recompute_num_layers=recomputed or None,
            )
        ).microbatch_s
        for node_type in problem.node_types
    )
    return EstimatedPlan(microbatches * seconds, lambda: _plan(problem, size, recomputed, offload))


def _plan(problem: Problem, size: int, recomputed: int, offload: Offload) -> Plan:
    model, num_devices = problem.model, problem.cluster.num_devices
    return problem.plan_of(
        Replica(
            num_samples=problem.global_batch_size // num_devices,
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
                    offload=offload,
                ),
            ),
        )
        for rank in range(num_devices)
    )
