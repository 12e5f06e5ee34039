"""Bounds the step of a plan from below without a replay, so that most bad changes of a plan need none.

Stage s has M microbatches, each of which takes f for a forward, b for the part of a backward that is sent on, and w for
what it leaves for later; f_i and b_i are those of the stages before it:

    step >= sum f_i          +  M (f + b + w)         +  the shortest update
    step >= sum (f_i + b_i)  +  M (f + b + w) - late  +  the shortest update

The first microbatch comes to stage s through all stages before it, and stage s does its own work one after the other.
Behind its last backward the gradient goes back through the same stages; up to ``wgrad_delay`` + 1 weights' gradients
may be left for then, which take ``late``. Transfers and sums of gradients come on top.
"""

from hetero.cost.cost_model import CostModel
from hetero.plan.ir import Plan, Replica


def least_step_s(plan: Plan, costs: CostModel) -> float:
    """Seconds that no simulated step of ``plan`` is below.

    Raises:
        ConfigError: a device has no profile.
    """
    # Of a distributed optimizer a rank updates a part, however small.
    updates = (costs.of(stage).update_s for _, _, stage in plan.stages())
    shortest_update_s = 0.0 if plan.distributed_optimizer else min(updates)
    return max(_least_compute_s(plan.replicas[first], costs) for first, *_ in plan.alike()) + shortest_update_s


def _least_compute_s(replica: Replica, costs: CostModel) -> float:
    if replica.is_interleaved:
        return max(
            sum(replica.num_microbatches(s) * costs.of(replica.stages[s]).microbatch_s for s in group)
            for group in replica.device_groups
        )
    longest_s = there_s = back_s = 0.0
    for s, stage in enumerate(replica.stages):
        cost, count = costs.of(stage), replica.num_microbatches(s)
        busy_s = count * cost.microbatch_s
        late_s = min(count, (stage.wgrad_delay or 0) + 1) * cost.weight_s
        longest_s = max(longest_s, there_s + busy_s, there_s + busy_s - late_s + back_s)
        there_s += cost.forward_s
        back_s += cost.undelayed_backward_s
    return longest_s
