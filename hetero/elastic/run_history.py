"""Makes the history of a run out of its nodes' event logs: what each node did, the epochs, and what changes cost.

Clocks of nodes may differ. How long a phase of a change took is counted by each node from its own notice of it; where
the nodes are drawn on one axis, their clocks are taken as they are.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hetero.elastic.events import ElasticEvent, EventKind, read_events
from hetero.errors import ConfigError
from hetero.report.elastic_run import (
    PHASES,
    ChangeOfNodes,
    ElasticRun,
    EpochHistory,
    NodeSpan,
    NodeState,
    Progress,
    RunNote,
)

LOG_SUFFIX = ".events.jsonl"

_NOTICED: tuple[EventKind, ...] = ("detected", "stop_requested")

_LOSSES: tuple[EventKind, ...] = ("rank_failed", "detected")
"""Which notice of a loss a node counts the seconds of a change from: the later of these, if it has noted both. Only the
first there is of a node whose last rank has failed."""

_PHASE_ENDS: tuple[EventKind, ...] = (
    "stopped",
    "ranks_gone",
    "plan",
    "epoch_made",
    "forked",
    "joined",
    "built",
    "restored",
    "first_step",
)
"""What is noted at the end of each of the phases."""

_TOLD: frozenset[EventKind] = frozenset(
    {
        "notice",
        "rank_failed",
        "bad_copy",
        "evicted",
        "etcd_away",
        "etcd_back",
        "unreadable_key",
        "waiting",
        "upload_failed",
        "straggler",
        "events_lost",
    }
)
"""What is listed beside epochs and changes."""

_OF_THE_OLD_EPOCH: tuple[EventKind, ...] = ("stopped", "ranks_gone", "plan")

_TELLS_STEP: tuple[EventKind, ...] = (
    "first_step",
    "progress",
    "rank_failed",
    "detected",
    "stop_requested",
    "stopped",
    "ranks_gone",
)
"""Events whose step is the last that is done."""

_WORDS = re.compile(r"[\w.-]*[\w-]")
"""Among them the names of nodes, without the full stop or the colon behind them."""


def read_history(path: Path, *, name: str, origin: str) -> ElasticRun:
    """The history of the run whose logs lie in a folder.

    Raises:
        ConfigError: there is no log, or one of them is none.
    """
    logs = sorted(path.glob(f"*{LOG_SUFFIX}"))
    events = [event for log in logs for event in read_events(log)]
    if not events:
        raise ConfigError(
            f"{path}: no event logs (*{LOG_SUFFIX}) with anything in them; name the folder that agents were given as "
            "--logs, with the logs of all nodes"
        )
    return history(events, name=name, origin=origin)


def history(events: Iterable[ElasticEvent], *, name: str, origin: str) -> ElasticRun:
    """The history that the events of all nodes tell.

    Args:
        name, origin: as those of :class:`hetero.report.elastic_run.ElasticRun`.
    """
    ordered = sorted(events, key=lambda each: each.time_s)
    start_s = ordered[0].time_s
    ordered = [_since(event, start_s) for event in ordered]
    nodes = tuple(sorted({event.node for event in ordered}))
    epochs = _epochs(ordered)
    # A leader waits for what it has asked for: nothing new.
    reasons = {"training", *(event.detail for event in ordered if event.kind in _NOTICED)}
    endings = [event.detail for event in ordered if event.kind == "finished" and "has left" not in event.detail]
    return ElasticRun(
        name=name,
        origin=origin,
        seconds=ordered[-1].time_s,
        nodes=nodes,
        spans=tuple(itertools.chain.from_iterable(_spans(node, ordered, epochs) for node in nodes)),
        epochs=epochs,
        changes=tuple(_change(ordered, before, after) for before, after in itertools.pairwise(epochs)),
        published=tuple((event.time_s, event.step) for event in ordered if event.kind == "published"),
        notes=tuple(
            RunNote(
                time_s=event.time_s,
                node=event.node,
                text=f"{event.kind.replace('_', ' ')}: {event.detail}".rstrip(": "),
            )
            for event in ordered
            if event.kind in _TOLD and event.detail not in reasons
        ),
        ending=endings[-1] if endings else "",
    )


def _since(event: ElasticEvent, start_s: float) -> ElasticEvent:
    return dataclasses.replace(event, time_s=event.time_s - start_s)


def _epochs(events: Sequence[ElasticEvent]) -> tuple[EpochHistory, ...]:
    made = {event.epoch: event for event in reversed(events) if event.kind == "forked"}
    # A leader's log may be missing; it says more.
    made |= {event.epoch: event for event in reversed(events) if event.kind == "epoch_made"}
    return tuple(_epoch(made[number], events) for number in sorted(made))


def _epoch(made: ElasticEvent, events: Sequence[ElasticEvent]) -> EpochHistory:
    plans = [
        event.detail
        for event in events
        if event.kind == "plan" and event.node == made.node and event.time_s <= made.time_s
    ]
    own = [event for event in events if event.epoch == made.epoch and event.node in made.nodes]
    firsts = {event.node: event.time_s for event in own if event.kind == "first_step"}
    with_log = {event.node for event in events} & set(made.nodes)
    return EpochHistory(
        number=made.epoch,
        nodes=made.nodes,
        start_step=made.step,
        plan=plans[-1] if plans else "",
        reason=made.detail,
        begin_s=made.time_s,
        first_step_s=max(firsts.values()) if firsts.keys() == with_log else None,
        end_s=_end_s(own, events),
        progress=tuple(_progress(own)),
    )


def _end_s(own: Sequence[ElasticEvent], events: Sequence[ElasticEvent]) -> float:
    """When an epoch trained no more: at the first notice of a loss, at its last rank's last step, or with the run."""
    lost = [event.time_s for event in own if event.kind in _LOSSES]
    stopped = [event.time_s for event in own if event.kind == "stopped"]
    if lost or stopped:
        return min(lost) if lost else max(stopped)
    return max([event.time_s for event in own if event.kind in _TELLS_STEP], default=events[-1].time_s)


def _progress(own: Iterable[ElasticEvent]) -> Iterator[Progress]:
    """Nodes tell of it at different moments: what one has said another does not take back."""
    step = committed = 0
    for event in own:
        if event.kind in _TELLS_STEP:
            step, committed = max(step, event.step), max(committed, event.committed)
            yield Progress(time_s=event.time_s, step=step, committed=committed)


def _change(events: Sequence[ElasticEvent], before: EpochHistory, after: EpochHistory) -> ChangeOfNodes:
    of_before = [event for event in events if event.epoch == before.number]
    losses = sorted((each for each in of_before if each.kind in _LOSSES), key=lambda each: _LOSSES.index(each.kind))
    noticed = losses or [event for event in of_before if event.kind == "stop_requested"]
    begin_s = min((event.time_s for event in noticed), default=before.end_s)
    # A failed rank does not begin its node's count anew.
    noticed_s = {event.node: event.since_change_s for event in noticed}
    phases: dict[str, float] = {}
    reached_s = 0.0
    for kind, phase in zip(_PHASE_ENDS, PHASES, strict=True):
        number = before.number if kind in _OF_THE_OLD_EPOCH else after.number
        ends = [
            event.since_change_s - noticed_s[event.node]
            for event in events
            if event.kind == kind and event.epoch == number and event.node in noticed_s and event.time_s >= begin_s
        ]
        if ends:
            phases[phase] = max(0.0, max(ends) - reached_s)
            reached_s = max(reached_s, *ends)
    return ChangeOfNodes(
        epoch=after.number,
        reason=after.reason,
        is_loss=bool(losses),
        begin_s=begin_s,
        phases=phases,
        repeated=max(0, before.last_step - after.start_step),
    )


def _spans(node: str, events: Sequence[ElasticEvent], epochs: Sequence[EpochHistory]) -> Iterator[NodeSpan]:
    """What a node was, from the first start of its agent on."""
    lives = list(_lives(node, events))
    for (start_s, end_s, is_lost), following in zip(lives, [*lives[1:], None], strict=True):
        yield from _spans_of_life(node, (start_s, end_s), epochs)
        until_s = following[0] if following is not None else events[-1].time_s
        if is_lost and until_s > end_s:
            yield NodeSpan(node=node, state="lost", start_s=end_s, end_s=until_s)


def _lives(node: str, events: Sequence[ElasticEvent]) -> Iterator[tuple[float, float, bool]]:
    """From when to when an agent of the node was there, and whether it went without a word."""
    own = [event for event in events if event.node == node]
    starts = [i for i, event in enumerate(own) if event.kind == "agent_started"]
    for first, end in itertools.pairwise([*(starts or [0]), len(own)]):
        last = own[end - 1]
        if last.kind == "finished":
            yield own[first].time_s, last.time_s, False
            continue
        is_last = end == len(own)
        missed_s = [event.time_s for event in events if event.time_s > last.time_s and _misses(event, node)]
        if is_last and not missed_s:
            # Its log ends with the others': the run was ended from outside.
            yield own[first].time_s, events[-1].time_s, False
        else:
            gone_s = missed_s[0] if missed_s else last.time_s
            yield own[first].time_s, gone_s if is_last else min(gone_s, own[end].time_s), True


def _misses(event: ElasticEvent, node: str) -> bool:
    """Whether another node says here that ``node`` is gone."""
    return event.node != node and event.kind in ("detected", "evicted") and node in _WORDS.findall(event.detail)


def _spans_of_life(node: str, life: tuple[float, float], epochs: Sequence[EpochHistory]) -> Iterator[NodeSpan]:
    at_s, end_s = life
    for epoch in epochs:
        if epoch.first_step_s is None or epoch.end_s <= at_s or epoch.first_step_s >= end_s:
            continue
        begin_s, until_s = max(at_s, epoch.first_step_s), min(end_s, epoch.end_s)
        if begin_s > at_s:
            yield NodeSpan(node=node, state="present", start_s=at_s, end_s=begin_s)
        state: NodeState = "training" if node in epoch.nodes else "idle"
        yield NodeSpan(node=node, state=state, start_s=begin_s, end_s=until_s)
        at_s = until_s
    if end_s > at_s:
        yield NodeSpan(node=node, state="present", start_s=at_s, end_s=end_s)
