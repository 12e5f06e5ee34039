"""Writes into a plan where it comes from, once it has been simulated."""

import dataclasses

from hetero.cost.prediction_range import StepRange
from hetero.cost.simulation.simulator import Simulation
from hetero.plan.ir import Plan
from hetero.plan.provenance import PlanPrediction, PlanProvenance
from hetero.spec.cluster import ClusterSpec


def with_provenance(simulation: Simulation, step: StepRange, *, cluster: ClusterSpec, command: str) -> Plan:
    """The simulated plan, which now says what made it, for which cluster, and with which prediction.

    command: the line that was typed.
    """
    prediction = PlanPrediction(
        step_s=simulation.step_s,
        step_low_s=step.low_s,
        step_high_s=step.high_s,
        bubble_share=simulation.bubble_share,
    )
    provenance = PlanProvenance(command=command, cluster=cluster, prediction=prediction)
    return dataclasses.replace(simulation.plan, provenance=provenance)
