"""Estimates the step of a plan without a replay: to tell which of many new plans are worth one.

A bound on the computes alone says little of a large cluster's plan, whose step may end a quarter later than they do,
with the sums of gradients. What stage s computes takes c_s = M_s t_s; the first microbatch comes to it after the
forwards f_i and the transfers x_i of the stages before it, and behind its last backward the gradient goes back through
them:

    computed = max over s of  sum_{i < s} (f_i + x_i) + c_s + sum_{i < s} (b_i + x_i) - late_s

with late_s what of the weights' gradients may wait for the end; and no less than what the busiest interface of its
nodes has to send or receive, for all replicas on them. Stage s ends sum_{i < s} (b_i + x_i) - late_s before that. Then
its gradients are ready, which the simulator's own collectives sum on its links
(:mod:`hetero.cost.simulation.collectives`). A heuristic: no stage waits for another one in between, and sums never meet
transfers.
"""

import itertools
from collections import defaultdict
from functools import cache

from hetero.cost.gradient_volume import CountedBucket, sync_buckets
from hetero.cost.network import CollectiveCost, Port, all_reduce_cost
from hetero.cost.simulation.collectives import run_collectives
from hetero.cost.simulation.gradient_ready import share_of_backward
from hetero.cost.simulation.recent import Recent
from hetero.cost.simulation.simulated_plan import MOST_SMALL
from hetero.plan.ir import Plan, Replica, StageKey
from hetero.planner.improve.transfer_costs import TransferCosts
from hetero.planner.problem import Problem
from hetero.schedule.actions import ActionKind

LARGER_BUCKETS = 4
"""So many times as large buckets as those of the plan: there are fewer to look at. A heuristic."""

ESTIMATING_S = 5e-5
"""Seconds of an estimate for one stage, about, for the count of work."""


class StepEstimates:
    """Estimates steps of plans for ``problem``."""

    def __init__(self, problem: Problem, transfers: TransferCosts) -> None:
        self._problem, self._transfers = problem, transfers
        self._collectives: Recent[CollectiveCost] = Recent(MOST_SMALL)

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step, about.

        Raises:
            ConfigError: a device has no profile, or two ranks that talk to one another no link.
        """
        costs = self._problem.costs
        ends: dict[StageKey, float] = {}
        lane_of_rank: dict[int, StageKey] = {}
        wires_s = self._wires_s(plan)
        for members in plan.alike():
            # Replicas that are alike have their gradients at the same times.
            first = members[0]
            longest_s = max(wires_s[r] for r in members)
            ends |= {(first, s): end_s for s, end_s in enumerate(self._ends(plan.replicas[first], longest_s))}
            for r in members:
                for s, stage in enumerate(plan.replicas[r].stages):
                    lane_of_rank |= dict.fromkeys(stage.ranks, (first, s))

        @cache
        def ready_s(lane: StageKey, position: float) -> float:
            stage = plan.replicas[lane[0]].stages[lane[1]]
            if stage.wgrad_delay is not None:
                return ends[lane]
            left = 1.0 - share_of_backward(costs, stage, position, ActionKind.B)
            return ends[lane] - left * costs.of(stage).backward_s

        numel = LARGER_BUCKETS * (plan.gradient_sync.bucket_numel or costs.runtime.bucket_numel)
        sums = run_collectives(
            sync_buckets(plan, bucket_numel=numel), cost_of=self._cost, ready_s=ready_s, lane_of_rank=lane_of_rank
        )
        summed_s = max((span.end_s for span in sums.spans), default=0.0)
        update_s = min(costs.of(stage).update_s for _, _, stage in plan.stages())
        return max(summed_s, *ends.values()) + update_s

    def _wires_s(self, plan: Plan) -> list[float]:
        """By replica, how long all transfers of a step keep the busiest interface that it uses."""
        busy: defaultdict[Port, float] = defaultdict(float)
        used: list[set[Port]] = []
        for replica in plan.replicas:
            ports: set[Port] = set()
            counts = replica.microbatch_counts
            for (a, sender), (b, receiver) in itertools.pairwise(enumerate(replica.stages)):
                for here, there, s in ((sender, receiver, a), (receiver, sender, b)):
                    for port, seconds in self._transfers.between(here, there).ports:
                        busy[port] += counts[s] * seconds
                        ports.add(port)
            used.append(ports)
        return [max((busy[port] for port in ports), default=0.0) for ports in used]

    def _cost(self, bucket: CountedBucket) -> CollectiveCost:
        num_bytes = bucket.numel * self._problem.costs.gradient_bytes
        return self._collectives.of(
            (num_bytes, bucket.ranks, bucket.domains),
            lambda: all_reduce_cost(num_bytes, bucket.ranks, bucket.domains, self._problem.topology),
        )

    def _ends(self, replica: Replica, wires_s: float) -> list[float]:
        """When each stage has computed all, after the first one began; ``wires_s`` for the transfers."""
        costs = [self._problem.costs.of(stage) for stage in replica.stages]
        counts = replica.microbatch_counts
        if replica.is_interleaved:
            busy_s = max(sum(counts[s] * costs[s].microbatch_s for s in numbers) for numbers in replica.device_groups)
            return [busy_s] * len(costs)
        there_s = back_s = computed_s = 0.0
        after: list[float] = []
        for s, (cost, count) in enumerate(zip(costs, counts, strict=True)):
            stage = replica.stages[s]
            last = s + 1 == len(costs)
            transfer_s = 0.0 if last else self._transfers.between(stage, replica.stages[s + 1]).seconds
            late_s = 0.0 if stage.wgrad_delay is None else min(count, stage.wgrad_delay + 1) * cost.weight_s
            busy_s = count * cost.microbatch_s
            computed_s = max(computed_s, there_s + busy_s, there_s + busy_s + back_s - late_s)
            after.append(max(0.0, back_s - late_s))
            there_s += cost.forward_s + transfer_s
            back_s += cost.undelayed_backward_s + transfer_s
        computed_s = max(computed_s, there_s + wires_s)
        return [computed_s - each for each in after]
