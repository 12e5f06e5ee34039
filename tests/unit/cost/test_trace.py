"""The trace opens in viewers: its events have what the Trace Event Format asks for, and lanes do not overlap."""

import json
from itertools import pairwise
from typing import Any

from hetero.cost.memory import plan_memory
from hetero.cost.simulator import Simulation, simulate
from hetero.cost.trace import chrome_trace
from hetero.units import MIB
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

MODEL = gpt2_model()
PLAN = plan(
    MODEL,
    [
        replica(
            stage(layers=(0, 3), ranks=(2 * r,), device="A100-40", depth=3),
            stage(layers=(3, 6), ranks=(2 * r + 1,), device="A100-40", depth=1),
            num_samples=6,
        )
        for r in range(2)
    ],
)
COSTS = cost_model(MODEL, [profile(MODEL, update_s=0.5)])


def simulated() -> Simulation:
    return simulate(PLAN, nodes(4, gb_per_s=1e-5), COSTS)


def events(phase: str) -> list[dict[str, Any]]:
    trace = chrome_trace(simulated(), plan_memory(PLAN, COSTS))
    return [event for event in json.loads(json.dumps(trace))["traceEvents"] if event["ph"] == phase]


def test_every_replica_is_a_process_and_every_stage_has_its_lanes() -> None:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events("M") if e["name"] == "thread_name"}
    assert names[1, 0] == "stage 0: compute"
    assert names[0, 4] == "stage 1: compute"
    assert {e["args"]["name"] for e in events("M") if e["name"] == "process_name"} == {"replica 0", "replica 1"}


def test_everything_that_takes_time_is_there_in_microseconds() -> None:
    result = simulated()
    spans = events("X")
    computes = [e for e in spans if e["name"] in ("F0", "B5")]
    assert len(computes) == 2 * 2 * 2, "two of each on two stages of two replicas"
    assert max(e["ts"] + e["dur"] for e in spans) == round(result.step_s * 1e6, 3)
    assert {e["name"] for e in spans} >= {"SEND_F0", "SEND_B5", "update", "sum from layer -1"}
    assert any(e["args"].get("critical") for e in computes)


def test_nothing_overlaps_within_a_lane() -> None:
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events("X"):
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert end <= start + 0.002, "rounded to nanoseconds"


def test_memory_reaches_its_peak_and_falls_back() -> None:
    counters = [e["args"]["MiB"] for e in events("C") if e["pid"] == 0 and e["name"] == "stage 0 MiB"]
    peak = plan_memory(PLAN, COSTS)[0, 0]
    assert max(counters) == round(peak.total / MIB, 1)
    assert counters[-1] == round((peak.total - peak.activations - peak.logits) / MIB, 1)


def test_memory_is_left_out_where_nobody_asks() -> None:
    assert not [e for e in chrome_trace(simulated())["traceEvents"] if e["ph"] == "C"]


def test_weights_gradients_are_computes_and_their_memory_falls_with_them() -> None:
    stages = (
        stage(layers=(0, 3), ranks=(0,), device="A100-40", depth=2, lag=0),
        stage(layers=(3, 6), ranks=(1,), device="A100-40", depth=1, lag=2),
    )
    split = plan(MODEL, [replica(*stages, num_samples=6)])
    trace = chrome_trace(simulate(split, nodes(2), COSTS), plan_memory(split, COSTS))["traceEvents"]
    weights = [e for e in trace if e["name"] == "W5"]
    assert [e["tid"] for e in sorted(weights, key=lambda e: e["tid"])] == [0, 4], "the compute lane of either stage"
    peak = plan_memory(split, COSTS)[0, 1]
    counters = [e["args"]["MiB"] for e in trace if e["name"] == "stage 1 MiB"]
    assert max(counters) == round(peak.total / MIB, 1)
    assert counters[-1] == round((peak.total - peak.activations - peak.logits - peak.deferred) / MIB, 1)
