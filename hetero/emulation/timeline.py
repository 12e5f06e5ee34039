"""Turns the records of an emulated step into a simulation's result, so that both can be laid side by side."""

from collections.abc import Sequence

from hetero.cost.cost_model import CostModel
from hetero.cost.gradient_volume import CountedBucket
from hetero.cost.simulation.collectives import CollectiveSpan
from hetero.cost.simulation.engine import NO_CAUSE, Span
from hetero.cost.simulation.exposed_communication import exposed_s
from hetero.cost.simulation.simulator import Simulation
from hetero.cost.simulation.stage_times import RankTimes, StageTimes, mean_times
from hetero.emulation.records import Arrival, EmulatedRun, StepRecord
from hetero.plan.ir import Stage
from hetero.schedule.actions import COMPUTE, ActionKind


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
    costs_of = {(r, s): costs.of(stage) for r, s, stage in plan.stages()}
    return Simulation(
        plan=plan,
        step_s=run.step_s,
        compute_end_s=max(span.end_s for span in spans if span.kind in COMPUTE),
        confidence=max(cost.confidence for cost in costs_of.values()),
        stages={(r, s): _times(stage, last, run.step_s) for r, s, stage in plan.stages()},
        costs=costs_of,
        spans=tuple(sorted(spans, key=lambda span: span.start_s)),
        alike=tuple(range(len(plan.replicas))),
        syncs=_collectives(ActionKind.REDUCE, last, begin_s),
        transfers={},
        gathers=_collectives(ActionKind.GATHER, last, begin_s),
    )


def _computes(replica: int, stage: int, record: StepRecord, begin_s: float) -> list[Span]:
    return [
        Span(replica, stage, stage, c.kind, c.number, c.start_s - begin_s, c.end_s - begin_s, NO_CAUSE)
        for c in record.computes
        if c.stage == stage
    ]


def _transfers(replica: int, stage: int, records: Sequence[StepRecord], begin_s: float) -> list[Span]:
    """What the ranks of ``stage`` received, slice by slice."""
    found: dict[tuple[ActionKind, int], list[Arrival]] = {}
    for record in records:
        for arrival in record.arrivals:
            if stage == (arrival.boundary + 1 if arrival.kind == ActionKind.SEND_F else arrival.boundary):
                found.setdefault((arrival.kind, arrival.number), []).append(arrival)
    spans = []
    for (kind, number), arrivals in found.items():
        sender = stage - 1 if kind == ActionKind.SEND_F else stage + 1
        start_s, end_s = min(a.start_s for a in arrivals) - begin_s, max(a.end_s for a in arrivals) - begin_s
        spans.append(Span(replica, sender, stage, kind, number, start_s, end_s, NO_CAUSE))
    return spans


def _collectives(kind: ActionKind, records: Sequence[StepRecord], begin_s: float) -> tuple[CollectiveSpan, ...]:
    every = {each: None for record in records for each in record.collectives if each.kind == kind}
    return tuple(
        CollectiveSpan(CountedBucket(x.ranks, 0, x.position), x.start_s - begin_s, x.end_s - begin_s)
        for x in sorted(every, key=lambda x: (x.start_s, x.ranks))
    )


def _times(stage: Stage, records: Sequence[StepRecord], step_s: float) -> StageTimes:
    share = 1 / len(stage.ranks)
    return mean_times([(share, _of_rank(records[rank])) for rank in stage.ranks], step_s=step_s)


def _of_rank(record: StepRecord) -> RankTimes:
    """All ranks agree on the gradients' norm at the end of a record, and update then."""
    begin_s = record.start_s + record.update_s
    return RankTimes(
        begin_s=begin_s,
        computed_s=max(c.end_s for c in record.computes),
        summed_s=record.end_s,
        busy_s=sum(c.busy_s for c in record.computes),
        update_s=record.update_s,
        exposed_s=exposed_s(
            [(c.start_s - begin_s, c.end_s - begin_s) for c in record.computes],
            [(a.start_s - begin_s, a.end_s - begin_s) for a in record.arrivals],
        ),
    )
