"""Plans of few words, and their simulation on links that cost next to nothing."""

import dataclasses
from collections.abc import Sequence

from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.cost.runtime_model import HETERO, RuntimeModel
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.plan.ir import Plan
from hetero.spec.cluster import ClusterSpec
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

MODEL = gpt2_model(tied_embeddings=False)
BLOCK_S = (1.0, 2.0)
A100 = "A100-40"
DEEPSPEED_FAST_HOST = dataclasses.replace(DEEPSPEED, transfer_host_s=0.0)
"""Transfers cost what their links cost."""


def run(
    described: Plan,
    cluster: ClusterSpec | None = None,
    *,
    update_s: float = 0.0,
    runtime: RuntimeModel = HETERO,
) -> Simulation:
    """On single-device nodes with links that cost next to nothing, unless ``cluster`` says otherwise."""
    costs = cost_model(described.model, [profile(described.model, block_s=BLOCK_S, update_s=update_s)], runtime=runtime)
    return simulate(described, cluster or nodes(described.world_size, gb_per_s=1e9), costs)


def pipeline(num_stages: int, *, num_samples: int, depths: list[int] | None = None) -> Plan:
    """One replica of equal stages on one device each."""
    layers = MODEL.num_layers // num_stages
    stages = [
        stage(
            layers=(s * layers, (s + 1) * layers),
            ranks=(s,),
            device=A100,
            depth=depths[s] if depths else min(num_stages - s, num_samples),
        )
        for s in range(num_stages)
    ]
    return plan(MODEL, [replica(*stages, num_samples=num_samples)])


def split(whole: Plan, delays: Sequence[int | None]) -> Plan:
    """The plan of one replica with other delays."""
    (one,) = whole.replicas
    return whole.with_replica(0, one.with_each_stage(wgrad_delay=delays))


def unequal_microbatches() -> Plan:
    """Two stages that count 2 and 4 microbatches."""
    stages = (
        stage(layers=(0, 3), ranks=(0,), device=A100, mbs=2, depth=2),
        stage(layers=(3, 6), ranks=(1,), device=A100, mbs=1, depth=1),
    )
    return plan(MODEL, [replica(*stages, num_samples=4)])
