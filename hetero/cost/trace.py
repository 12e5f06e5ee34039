"""A simulation as a trace that chrome://tracing and ui.perfetto.dev show: a process per replica, a lane per stage.

The format is Chrome's Trace Event Format: complete events ("X") and counters ("C"), in microseconds.
"""

from typing import Any

from hetero.cost.engine import Span
from hetero.cost.memory import MemoryParts
from hetero.cost.simulator import Simulation
from hetero.schedule.actions import COMPUTE, Kind
from hetero.units import MIB, US_PER_S

COLOURS = {Kind.F: "good", Kind.R: "good", Kind.B: "bad", Kind.I: "bad", Kind.W: "terrible"}
"""Names that Chrome's viewer knows; Perfetto takes its own."""

LANES_PER_STAGE = 4
"""Compute, activations to the next stage, gradients to the previous one, sums of gradients."""

_LANE = {**dict.fromkeys(COMPUTE, 0), Kind.SEND_F: 1, Kind.SEND_B: 2}
_SYNC_LANE = 3
_LANE_NAMES = ("compute", "sends activations", "sends gradients", "sums gradients, updates")

Event = dict[str, Any]


def chrome_trace(
    simulation: Simulation,
    memory: dict[tuple[int, int], MemoryParts] | None = None,
    *,
    executed: Simulation | None = None,
) -> dict[str, Any]:
    """The trace as plain data; ``json.dumps`` of it is a file that the viewers open.

    memory: from :func:`hetero.cost.memory.plan_memory`; adds a counter of each stage's memory.
    executed: the same step as it ran, shown as more processes, each below its prediction.
    """
    shown = [(simulation, "" if executed is None else ", predicted")]
    if executed is not None:
        shown.append((executed, ", executed"))
    events: list[Event] = []
    for i, (timeline, label) in enumerate(shown):
        for event in _events(timeline, memory if i == 0 else None, label):
            events.append(event | {"pid": event["pid"] * len(shown) + i})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step_s": simulation.step_s}}


def _events(simulation: Simulation, memory: dict[tuple[int, int], MemoryParts] | None, label: str) -> list[Event]:
    """The events of one step; the process is the replica."""
    events: list[Event] = []
    on_path = {id(span) for span in simulation.critical_path()}
    for r, replica in enumerate(simulation.plan.replicas):
        events += _names(r, len(replica.stages), label)
        events += [_span(r, span, critical=id(span) in on_path) for span in simulation.spans_of(r)]
        for s in range(len(replica.stages)):
            events.append(_update(simulation, r, s))
            if memory is not None:
                events += _memory(simulation, r, s, memory[r, s])
    return events + _syncs(simulation)


def _names(replica: int, num_stages: int, label: str) -> list[Event]:
    rows: list[Event] = [_metadata("process_name", replica, 0, f"replica {replica}{label}")]
    for s in range(num_stages):
        for lane, name in enumerate(_LANE_NAMES):
            rows.append(_metadata("thread_name", replica, _thread(s, lane), f"stage {s}: {name}"))
    return rows


def _metadata(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _thread(stage: int, lane: int) -> int:
    return stage * LANES_PER_STAGE + lane


def _complete(name: str, process: int, thread: int, start_s: float, end_s: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": round(start_s * US_PER_S, 3),
        "dur": round((end_s - start_s) * US_PER_S, 3),
        "args": args,
    }


def _span(replica: int, span: Span, *, critical: bool) -> Event:
    event = _complete(
        f"{span.kind}{span.number}",
        replica,
        _thread(span.stage, _LANE[span.kind]),
        span.start_s,
        span.end_s,
        critical=critical,
    )
    if span.kind in COLOURS:
        event["cname"] = COLOURS[span.kind]
    return event


def _update(simulation: Simulation, replica: int, stage: int) -> Event:
    return _complete("update", replica, _thread(stage, _SYNC_LANE), *simulation.update_of(replica, stage))


def _syncs(simulation: Simulation) -> list[Event]:
    place = {rank: (r, s) for r, s, stage in simulation.plan.stages() for rank in stage.ranks}
    events = []
    for sync in simulation.syncs:
        for r, s in sorted({place[rank] for rank in sync.bucket.ranks}):
            name = f"sum from layer {sync.bucket.position}"
            thread = _thread(s, _SYNC_LANE)
            events.append(_complete(name, r, thread, sync.start_s, sync.end_s, ranks=list(sync.bucket.ranks)))
    return events


def _memory(simulation: Simulation, replica: int, stage: int, peak: MemoryParts) -> list[Event]:
    """The peak's moving part in proportion to the microbatches of which something is held."""
    held_at = simulation.held(replica, stage)
    depth = max(held for _, held in held_at)
    moving = peak.activations + peak.logits + peak.deferred
    return [
        {
            "ph": "C",
            "name": f"stage {stage} MiB",
            "pid": replica,
            "ts": round(at_s * US_PER_S, 3),
            "args": {"MiB": round((peak.total - moving + moving * held / depth) / MIB, 1)},
        }
        for at_s, held in held_at
    ]
