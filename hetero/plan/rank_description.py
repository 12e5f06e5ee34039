"""Says what a rank holds under a plan, for messages."""

from hetero.plan.ir import Plan
from hetero.text import numbered


def describe_rank(plan: Plan, rank: int) -> str:
    """Say what a rank holds: ``rank 3 (replica 0 stage 1, A100-40)``, or ``stages 1,3`` if it runs these in turns."""
    places = plan.placements(rank)
    if not places:
        return f"rank {rank} (idle)"
    replica, stages = places[0].replica, [place.stage for place in places]
    device = plan.replicas[replica].stages[stages[0]].device
    return f"rank {rank} (replica {replica} {numbered('stage', stages)}, {device})"
