"""The trace opens in viewers: its events have what the Trace Event Format asks for, and lanes do not overlap."""

import json
from itertools import pairwise
from typing import Any

from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.report.trace import chrome_trace
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
    trace = chrome_trace(simulated(), COSTS)
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
        stage(layers=(0, 3), ranks=(0,), device="A100-40", depth=2, delay=0),
        stage(layers=(3, 6), ranks=(1,), device="A100-40", depth=1, delay=2),
    )
    split = plan(MODEL, [replica(*stages, num_samples=6)])
    trace = chrome_trace(simulate(split, nodes(2), COSTS), COSTS)["traceEvents"]
    weights = [e for e in trace if e["name"] == "W5"]
    assert [e["tid"] for e in sorted(weights, key=lambda e: e["tid"])] == [0, 4], "the compute lane of either stage"
    peak = plan_memory(split, COSTS)[0, 1]
    counters = [e["args"]["MiB"] for e in trace if e["name"] == "stage 1 MiB"]
    assert max(counters) == round(peak.total / MIB, 1)
    assert counters[-1] == round((peak.total - peak.activations - peak.logits - peak.deferred) / MIB, 1)


def test_stages_of_one_device_group_share_their_lanes_and_their_counter() -> None:
    model = gpt2_model(num_layers=8, tied_embeddings=False)
    costs = cost_model(model, [profile(model, update_s=0.5)])
    made = uniform_plan(
        UniformLayout(
            model=model,
            world_size=4,
            pp=2,
            stages_per_rank=2,
            micro_batch_size=1,
            global_batch_size=8,
            seq_length=16,
            device="A100-40",
        )
    )
    result = simulate(made, nodes(4, gb_per_s=1e-3), costs)
    trace = chrome_trace(result, costs)["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["name"] == "thread_name" and e["pid"] == 1]
    assert [name for name in names if name.endswith("compute")] == ["stages 0,2: compute", "stages 1,3: compute"]
    for pid in (0, 1):
        lanes: dict[int, list[tuple[float, float]]] = {}
        for e in trace:
            if e["ph"] == "X" and e["pid"] == pid:
                lanes.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
        assert len(lanes[0]) == len(lanes[4]) == 2 * 2 * 4, "four microbatches of two stages, forwards and backwards"
        for tid in (0, 4):
            assert all(end <= start + 0.002 for (_, end), (start, _) in pairwise(sorted(lanes[tid])))
    assert {"0F0", "2F0", "3B3", "update"} <= {e["name"] for e in trace}
    assert sum(e["name"] == "update" for e in trace) == 4, "one per device group"
    devices = device_memory(made, plan_memory(made, costs))
    for g, name in ((0, "stages 0,2 MiB"), (1, "stages 1,3 MiB")):
        counters = [e["args"]["MiB"] for e in trace if e["ph"] == "C" and e["pid"] == 0 and e["name"] == name]
        assert max(counters) == round(devices[0, g].total / MIB, 1)
        assert counters[-1] == min(counters)
