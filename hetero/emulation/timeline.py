"""An emulated step in the terms in which the simulator predicts one, so that both can be laid side by side."""

from collections.abc import Mapping, Sequence

from hetero.cost.collectives import SyncSpan
from hetero.cost.engine import NO_CAUSE, Span
from hetero.cost.exposure import exposed_s
from hetero.cost.gradients import SyncBucket
from hetero.cost.latency import CostModel
from hetero.cost.layout import StageKey
from hetero.cost.simulator import Simulation, StageTimes
from hetero.emulation.records import Arrival, EmulatedRun, Reduction, StepRecord
from hetero.plan.ir import Plan, Stage
from hetero.schedule.actions import COMPUTE, Kind


def executed(run: EmulatedRun, costs: CostModel) -> Simulation:
    """The last step of ``run``. Times count from the end of the first update of the step before.

    What ranks of one stage do alike is shown once: computes of its first rank; a slice from the start of its first
    message to the end of its last; times of a stage are means over its ranks.
    """
    plan = run.plan
    last = [steps[-1] for steps in run.ranks]
    begin_s = min(last[rank].start_s + last[rank].update_s for _, _, stage in plan.stages() for rank in stage.ranks)
    spans: list[Span] = []
    for r, s, stage in plan.stages():
        records = [last[rank] for rank in stage.ranks]
        spans += _computes(r, s, records[0], begin_s)
        spans += _transfers(r, s, records, begin_s)
    syncs = _syncs(last, begin_s)
    costs_of = {(r, s): costs.of(stage) for r, s, stage in plan.stages()}
    return Simulation(
        plan=plan,
        step_s=run.step_s,
        compute_end_s=max(span.end_s for span in spans if span.kind in COMPUTE),
        basis=max(cost.basis for cost in costs_of.values()),
        stages=_stage_times(plan, last, run.step_s),
        costs=costs_of,
        spans=tuple(sorted(spans, key=lambda span: span.start_s)),
        alike=tuple(range(len(plan.replicas))),
        syncs=syncs,
        transfers={},
    )


def _computes(replica: int, stage: int, record: StepRecord, begin_s: float) -> list[Span]:
    return [
        Span(replica, stage, stage, c.kind, c.number, c.start_s - begin_s, c.end_s - begin_s, NO_CAUSE)
        for c in record.computes
        if c.stage == stage
    ]


def _transfers(replica: int, stage: int, records: Sequence[StepRecord], begin_s: float) -> list[Span]:
    """What the ranks of ``stage`` received, slice by slice."""
    found: dict[tuple[Kind, int], list[Arrival]] = {}
    for record in records:
        for arrival in record.arrivals:
            if stage == (arrival.boundary + 1 if arrival.kind == Kind.SEND_F else arrival.boundary):
                found.setdefault((arrival.kind, arrival.number), []).append(arrival)
    spans = []
    for (kind, number), arrivals in found.items():
        sender = stage - 1 if kind == Kind.SEND_F else stage + 1
        start_s, end_s = min(a.start_s for a in arrivals) - begin_s, max(a.end_s for a in arrivals) - begin_s
        spans.append(Span(replica, sender, stage, kind, number, start_s, end_s, NO_CAUSE))
    return spans


def _syncs(records: Sequence[StepRecord], begin_s: float) -> tuple[SyncSpan, ...]:
    every: dict[Reduction, None] = {reduction: None for record in records for reduction in record.reductions}
    return tuple(
        SyncSpan(SyncBucket(x.ranks, 0, x.position), x.start_s - begin_s, x.end_s - begin_s)
        for x in sorted(every, key=lambda x: (x.start_s, x.ranks))
    )


def _stage_times(plan: Plan, records: Sequence[StepRecord], step_s: float) -> Mapping[StageKey, StageTimes]:
    return {(r, s): _times(stage, records, step_s) for r, s, stage in plan.stages()}


def _times(stage: Stage, records: Sequence[StepRecord], step_s: float) -> StageTimes:
    count = len(stage.ranks)
    own = [records[rank] for rank in stage.ranks]
    busy_s = sum(c.end_s - c.start_s for record in own for c in record.computes) / count
    update_s = sum(record.update_s for record in own) / count
    bubble_s = sum(_last_compute_s(record) - record.start_s - record.update_s for record in own) / count - busy_s
    sync_s = sum(
        max([_last_compute_s(record), *(x.end_s for x in record.reductions)]) - _last_compute_s(record)
        for record in own
    )
    sync_s /= count
    return StageTimes(
        busy_s=busy_s,
        bubble_s=bubble_s,
        sync_s=sync_s,
        update_s=update_s,
        rest_s=step_s - busy_s - bubble_s - sync_s - update_s,
        exposed_s=sum(_exposed_s(record) for record in own) / count,
    )


def _exposed_s(record: StepRecord) -> float:
    begin_s = record.start_s + record.update_s
    return exposed_s(
        [(c.start_s - begin_s, c.end_s - begin_s) for c in record.computes],
        [(a.start_s - begin_s, a.end_s - begin_s) for a in record.arrivals],
    )


def _last_compute_s(record: StepRecord) -> float:
    return max(c.end_s for c in record.computes)
