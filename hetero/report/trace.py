"""A simulation as a trace that chrome://tracing and ui.perfetto.dev show: a process per replica, lanes per group.

Stages on the same ranks run in turns and share their lanes; their actions are named with the stage then, as ``2F0``.

The format is Chrome's Trace Event Format: complete events ("X") and counters ("C"), in microseconds.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hetero.cost.cost_model import CostModel
from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.simulation.engine import Span
from hetero.cost.simulation.simulator import Simulation
from hetero.cost.stage_memory import memory_of_stage
from hetero.schedule.actions import COMPUTE, Action, ActionKind
from hetero.schedule.activation_residency import HeldMicrobatches, Residency
from hetero.text import numbered
from hetero.units import MIB, US_PER_S

COLOURS = {
    ActionKind.F: "good",
    ActionKind.R: "good",
    ActionKind.B: "bad",
    ActionKind.I: "bad",
    ActionKind.W: "terrible",
}
"""Names that Chrome's viewer knows; Perfetto takes its own."""

LANES_PER_GROUP = 4
"""Compute, activations to the next stage, gradients to the previous one, collectives and the update."""

_LANE = {**dict.fromkeys(COMPUTE, 0), ActionKind.SEND_F: 1, ActionKind.SEND_B: 2}
_SYNC_LANE = 3
_LANE_NAMES = ("compute", "sends activations", "sends gradients", "sums gradients, updates, gathers weights")

Event = dict[str, Any]


GroupKey = tuple[int, ...]
"""The stages that the same ranks hold."""


def chrome_trace(
    simulation: Simulation, memory_costs: CostModel | None = None, *, executed: Simulation | None = None
) -> dict[str, Any]:
    """The trace as plain data; ``json.dumps`` of it is a file that the viewers open.

    memory_costs: adds a counter of what a device of each group holds.
    executed: the same step as it ran, shown as more processes, each below its prediction.
    """
    shown = [(simulation, "" if executed is None else ", predicted")]
    if executed is not None:
        shown.append((executed, ", executed"))
    events: list[Event] = []
    for i, (timeline, label) in enumerate(shown):
        for event in _events(timeline, label) + (_memory(timeline, memory_costs) if memory_costs and i == 0 else []):
            events.append(event | {"pid": event["pid"] * len(shown) + i})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step_s": simulation.step_s}}


def _events(simulation: Simulation, label: str) -> list[Event]:
    """The events of one step; the process is the replica."""
    events: list[Event] = []
    on_path = {_key(span) for span in simulation.critical_path()}
    for r, replica in enumerate(simulation.plan.replicas):
        groups = replica.device_groups
        events += _names(r, groups, label)
        lanes = {s: (g, len(group) > 1) for g, group in enumerate(groups) for s in group}
        for span in simulation.spans_of(r):
            g, several = lanes[span.stage]
            events.append(_span(r, g, span, names_stage=several, critical=_key(span) in on_path))
        events += [_update(simulation, r, g, group[0]) for g, group in enumerate(groups)]
    return events + _syncs(simulation)


def _names(replica: int, groups: Sequence[GroupKey], label: str) -> list[Event]:
    rows: list[Event] = [_metadata("process_name", replica, 0, f"replica {replica}{label}")]
    for g, group in enumerate(groups):
        for lane, name in enumerate(_LANE_NAMES):
            rows.append(_metadata("thread_name", replica, _thread(g, lane), f"{numbered('stage', group)}: {name}"))
    return rows


def _metadata(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _thread(group: int, lane: int) -> int:
    return group * LANES_PER_GROUP + lane


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


def _span(replica: int, group: int, span: Span, *, names_stage: bool, critical: bool) -> Event:
    event = _complete(
        f"{span.stage if names_stage else ''}{span.kind}{span.number}",
        replica,
        _thread(group, _LANE[span.kind]),
        span.start_s,
        span.end_s,
        critical=critical,
    )
    if span.kind in COLOURS:
        event["cname"] = COLOURS[span.kind]
    return event


def _key(span: Span) -> object:
    """The same for what several ranks of a stage do at the same point of their rows, which is shown once."""
    return span.replica, span.stage, span.kind, span.number


def _update(simulation: Simulation, replica: int, group: int, stage: int) -> Event:
    """``stage`` is one of the group's, whose ranks update all of its stages at once."""
    return _complete("update", replica, _thread(group, _SYNC_LANE), *simulation.update_of(replica, stage))


def _syncs(simulation: Simulation) -> list[Event]:
    place = {
        rank: (r, g)
        for r, replica in enumerate(simulation.plan.replicas)
        for g, group in enumerate(replica.device_groups)
        for rank in replica.stages[group[0]].ranks
    }
    events = []
    named = [("sum", sync) for sync in simulation.syncs] + [("gather", gather) for gather in simulation.gathers]
    for what, sync in named:
        for r, g in sorted({place[rank] for rank in sync.bucket.ranks}):
            name = f"{what} from layer {sync.bucket.position}"
            thread = _thread(g, _SYNC_LANE)
            events.append(_complete(name, r, thread, sync.start_s, sync.end_s, ranks=list(sync.bucket.ranks)))
    return events


def _memory(simulation: Simulation, costs: CostModel) -> list[Event]:
    """What one device of each group holds as its microbatches come and go, beside what it holds throughout."""
    plan = simulation.plan
    events = []
    for (r, first), peak in device_memory(plan, plan_memory(plan, costs)).items():
        replica = plan.replicas[r]
        group = next(group for group in replica.device_groups if group[0] == first)
        each = {s: memory_of_stage(replica.stages[s], costs) for s in group}
        fixed = peak.total - peak.activations - peak.logits - peak.deferred
        for at_s, held in _held(simulation.spans_of(r), group):
            parts = [each[s].holding(of_stage) for s, of_stage in held.items()]
            moving = sum(part.activations + part.logits + part.deferred for part in parts)
            events.append(
                {
                    "ph": "C",
                    "name": f"{numbered('stage', group)} MiB",
                    "pid": r,
                    "ts": round(at_s * US_PER_S, 3),
                    "args": {"MiB": round((fixed + moving) / MIB, 1)},
                }
            )
    return events


def _held(spans: Sequence[Span], group: GroupKey) -> Iterator[tuple[float, dict[int, HeldMicrobatches]]]:
    """(second, what is held of each stage from then on) whenever a compute of the group begins or has ended."""
    computes = [span for span in spans if span.stage in group and span.kind in COMPUTE]
    actions = [Action(span.stage, span.kind, span.number) for span in computes]
    residency = Residency.of_row(actions)
    # What ends at a time lets go before what begins then takes.
    moments = [(span.start_s, 1, residency.begin, action) for span, action in zip(computes, actions, strict=True)]
    moments += [(span.end_s, 0, residency.end, action) for span, action in zip(computes, actions, strict=True)]
    for at_s, _, changes, action in sorted(moments, key=lambda moment: moment[:2]):
        changes(action)
        yield at_s, dict(residency.held)
