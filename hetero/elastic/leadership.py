"""What the leader does next, given what it sees of the nodes: a pure function, called again whenever that changes.

An epoch is over when it is broken (anybody said so, or one of its nodes is gone) or when all its nodes have stopped as
asked. The leader then asks every node that is there to end its ranks and to say which copies it has. Those who answer
make the next epoch; those who cannot be reached are evicted. While an epoch trains, only a notice, a better set of
nodes or the end of the run changes anything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from hetero.elastic.records import Epoch, NodeInfo, RankPhase, RunFlags

StepTime = Callable[[tuple[NodeInfo, ...]], float | None]
"""Predicted seconds of a step on these nodes under the best plan known, ``None`` where the model does not fit them.

Asked at most twice per move, with the nodes in the order of their names."""

_OUT = frozenset({"stopped", "finished"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderSettings:
    """How patient the leader is. Times in seconds.

    min_nodes: an epoch needs as many, and the model has to fit them.
    first_settle_s: at the first start, how long nobody may have joined before it begins.
    settle_s: how long after the end of an epoch the next one may begin, so that losses at once are seen at once.
    answer_s: within which a node has to end its ranks and say what it has.
    missing_s: how long to wait for nodes enough, or for nodes with copies, before the run is left with an error.
    min_gain: by which part a step has to get shorter for a change that nothing forces.
    dwell_s: how long an epoch lasts at least before such a change.
    commit_s: what finishing a copy takes beside one step; a notice that leaves less than both is a loss.
    max_failures: so many epochs in a row that broke with all their nodes there and committed nothing new end the run.
    """

    min_nodes: int = 1
    first_settle_s: float = 2.0
    settle_s: float = 0.2
    answer_s: float = 5.0
    missing_s: float = 600.0
    min_gain: float = 0.05
    dwell_s: float = 60.0
    commit_s: float = 2.0
    max_failures: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """What the leader knows of a node whose lease lives. Times are on the leader's clock.

    info: its ``node_type`` is the one as which it counts now, which for a straggler is not that of its announcement.
    since_s: when the leader first saw it.
    answered: it has ended its ranks of the newest epoch, will start no more of it, and has said which copies it has.
    refused: its agent refused a connection, so there is none.
    phase: the one that the last of its ranks has reached in the newest epoch; ``failed`` if one has failed.
    leaves_by_s: the deadline of its notice, infinity if it has none; ``None`` without a notice.
    was_evicted: since the end of the epoch, as it did not answer in time: the others wait no more for it.
    is_broken: its agent can be reached, but answers with an error and not with what it has.
    """

    info: NodeInfo
    since_s: float
    answered: bool = False
    refused: bool = False
    phase: RankPhase | None = None
    leaves_by_s: float | None = None
    was_evicted: bool = False
    is_broken: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LackOfStep:
    """Why the next epoch has nothing to go on from, and the exit code of the job if that does not change."""

    reason: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What the leader sees.

    leader: the name of its own node.
    epoch: the newest one, ``None`` before the first.
    nodes: by name.
    started_s: when this leader began to lead.
    epoch_since_s: when it first saw the newest epoch.
    over_since_s: when it first saw that this one was over, ``None`` while it goes on.
    broken: why it is, in somebody's words; ``None`` if nobody said so.
    stop_requested: why its ranks were asked to stop, ``None`` if they were not.
    is_stop_for_good: they were asked to save the step in hand as well.
    run: how long the run is, and where its checkpoints go.
    finished_step: after which the ranks of the newest epoch have finished the run, 0 as long as none has.
    committed: the newest step of this epoch that was committed, 0 for none.
    step_s: seconds of a step of this epoch now, to be held against predictions; ``None`` while it is not known.
    no_step: why there is no step to go on from; ``None`` if there is one, or if the leader has not looked yet.
    """

    leader: str
    epoch: Epoch | None
    nodes: dict[str, NodeView]
    started_s: float
    epoch_since_s: float = 0.0
    over_since_s: float | None = None
    broken: str | None = None
    stop_requested: str | None = None
    is_stop_for_good: bool = False
    run: RunFlags = field(default_factory=RunFlags)
    finished_step: int = 0
    committed: int = 0
    step_s: float | None = None
    no_step: LackOfStep | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Do nothing until something changes, or until a time; ``None`` for no time."""

    until_s: float | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeEpoch:
    """Choose a step, plan for these nodes, and write the next epoch in one transaction.

    failures: how many epochs in a row, up to now, broke by themselves; belongs into the epoch.
    """

    nodes: tuple[str, ...]
    failures: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStop:
    """Ask the ranks to finish the step, to commit it and to end.

    is_for_good: and to save it, as no node stays.
    """

    reason: str
    is_for_good: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictNode:
    """Take a node's lease away: it comes back as a new incarnation, or not at all."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """End the run on all nodes with this exit code; see :class:`hetero.elastic.records.Outcome`."""

    exit_code: int
    reason: str
    resumes: bool = False


Move = Wait | MakeEpoch | RequestStop | EvictNode | Finish


def end_of_epoch(view: View) -> str | None:
    """Why the newest epoch is over, ``None`` if it is not.

    The leader's agent notes the time in ``over_since_s`` and tells the others, if nobody has: they end their ranks.

    It is over if somebody said that it broke, if a node of it is not there any more or is another incarnation, if one
    of its ranks failed, or if all its nodes have stopped.
    """
    if view.epoch is None:
        return None
    if view.broken is not None:
        return view.broken
    for each in view.epoch.nodes:
        node = view.nodes.get(each.node.name)
        if node is None or node.info.incarnation != each.node.incarnation:
            return f"node {each.node.name} is gone"
        if node.refused:
            return f"node {each.node.name} refuses connections"
        if node.phase == "failed":
            return f"a rank of node {each.node.name} failed"
    if all(view.nodes[each.node.name].phase in _OUT for each in view.epoch.nodes):
        return view.stop_requested or "all ranks have stopped"
    return None


def next_move(view: View, now_s: float, settings: LeaderSettings, step_time: StepTime) -> Move:
    """What the leader does now."""
    for name, node in sorted(view.nodes.items()):
        if node.refused:
            return EvictNode(name=name, reason="its agent refuses connections")
    if view.epoch is None:
        return _start(view, now_s, settings, step_time, since_s=view.started_s, failures=0, reason="first start")
    if all(_phase(view, each.node.name) == "finished" for each in view.epoch.nodes):
        return _finish(view)
    if (reason := end_of_epoch(view)) is not None:
        return _follow(view, now_s, settings, step_time, reason)
    return _keep_training(view, now_s, settings, step_time)


def _finish(view: View) -> Finish:
    """The end of a job whose ranks have finished: all steps are done, the flags end the run, or all nodes leave."""
    run, step = view.run, view.finished_step
    if step >= run.num_steps:
        return Finish(exit_code=0, reason="all ranks have finished")
    why = "all nodes leave" if view.is_stop_for_good else "the flags end the run"
    reason = f"{why} after step {step} of {run.num_steps}"
    if run.save is None:
        return Finish(exit_code=0, reason=reason)
    way_on = "agents that are started again under the same --job go on from it"
    if not run.resumes:
        way_on = f"to go on from it, give --load {run.save}"
    return Finish(exit_code=0, reason=f"{reason}, which is saved in {run.save}; {way_on}", resumes=run.resumes)


def _follow(view: View, now_s: float, settings: LeaderSettings, step_time: StepTime, reason: str) -> Move:
    """After the end of an epoch: who is there goes on.

    A node that leaves has to answer too, as it may be the only one with copies that the others need. A leader that
    most nodes do not answer is itself the one that is cut off.
    """
    over_s = now_s if view.over_since_s is None else view.over_since_s
    if now_s < over_s + settings.settle_s:
        return Wait(until_s=over_s + settings.settle_s, reason=reason)
    asked_s = {
        name: max(over_s, node.since_s)
        for name, node in view.nodes.items()
        if not node.answered and not node.was_evicted
    }
    late = sorted(name for name in asked_s if now_s >= asked_s[name] + settings.answer_s)
    out_of_reach = [name for name in late if not view.nodes[name].is_broken]
    if 2 * len(out_of_reach) > len(view.nodes):
        others = ", ".join(out_of_reach)
        return EvictNode(name=view.leader, reason=f"it reaches neither of {others}: another node shall lead")
    if late:
        return EvictNode(name=late[0], reason=f"its agent did not answer within {settings.answer_s:g} s")
    if asked_s:
        return Wait(until_s=min(asked_s.values()) + settings.answer_s, reason=f"for {', '.join(sorted(asked_s))}")
    # Not before all that do not answer are evicted, as their loss is no failure.
    failures = failures_in_a_row(view)
    if failures >= settings.max_failures:
        lack = "saved nothing, though all nodes leave" if view.is_stop_for_good else "committed no new step"
        return Finish(
            exit_code=1,
            reason=f"{failures} epochs in a row broke with all their nodes there and {lack}, the last because "
            f"{reason}; see the log of that rank, and start the job again when its cause is removed",
        )
    return _start(view, now_s, settings, step_time, since_s=over_s, failures=failures, reason=reason)


def _start(
    view: View,
    now_s: float,
    settings: LeaderSettings,
    step_time: StepTime,
    *,
    since_s: float,
    failures: int,
    reason: str,
) -> Move:
    """Make an epoch of those who have answered, if they are enough and have a step; else wait, and give up in the end.

    Where no node stays, those that leave make one more to save what they have, however few they are. Where no node of
    the epoch is there any more, its agents may have been started again together: as at the first start it waits for
    the others.
    """
    staying, min_nodes = _staying(view), max(settings.min_nodes, 1)
    if not staying and view.run.save is not None and view.epoch is not None:
        staying, min_nodes, reason = view.nodes, 1, f"all nodes leave, and nothing is saved yet: {reason}"
    if view.epoch is None or not _members_there(view):
        newest_s = max((node.since_s for node in staying.values()), default=now_s)
        if staying and now_s < newest_s + settings.first_settle_s:
            return Wait(until_s=newest_s + settings.first_settle_s, reason=f"{len(staying)} nodes, more may come")
    ready = {name: node for name, node in sorted(staying.items()) if node.answered}
    infos = tuple(node.info for node in ready.values())
    give_up_s, limit = since_s + settings.missing_s, f"within {settings.missing_s:g} s"
    if len(ready) >= min_nodes and step_time(infos) is not None:
        if (lack_of_step := view.no_step) is None:
            return MakeEpoch(nodes=tuple(ready), failures=failures, reason=reason)
        if now_s < give_up_s:
            return Wait(until_s=give_up_s, reason=f"nothing to go on from yet: {lack_of_step.reason}")
        end = f"{lack_of_step.reason}; that has not changed {limit} (--wait-for-nodes)"
        return Finish(exit_code=lack_of_step.exit_code, reason=end)
    if len(ready) < min_nodes:
        lack = f"{len(ready)} nodes are there, {min_nodes} are asked for"
    else:
        lack = f"the model does not fit {', '.join(ready) or 'no node'}"
    if now_s < give_up_s:
        return Wait(until_s=give_up_s, reason=f"{lack}: waiting for more")
    return Finish(exit_code=1, reason=f"{lack}, and no other came {limit}; start agents on more nodes, or wait longer")


def _keep_training(view: View, now_s: float, settings: LeaderSettings, step_time: StepTime) -> Move:
    assert view.epoch is not None
    members = {each.node.name: each.node for each in view.epoch.nodes}
    deadlines = [
        (node.leaves_by_s, name)
        for name, node in view.nodes.items()
        if name in members and node.leaves_by_s is not None
    ]
    if deadlines:
        leaves_by_s, name = min(deadlines)
        needed_s = settings.commit_s + (view.step_s or 0.0)
        is_for_good = view.run.save is not None and not _staying(view)
        stop = RequestStop(reason="all nodes leave" if is_for_good else f"node {name} leaves", is_for_good=is_for_good)
        if view.stop_requested is None and now_s + needed_s <= leaves_by_s:
            return stop
        if view.stop_requested is None or now_s >= leaves_by_s:
            # As a loss; the same way as that of a node that does not answer.
            return EvictNode(name=name, reason="its notice leaves no time to commit the step")
        if is_for_good and not view.is_stop_for_good:
            # The last node that was to stay has got its notice meanwhile.
            return stop
        return Wait(until_s=leaves_by_s, reason=view.stop_requested)
    if view.stop_requested is not None:
        return Wait(until_s=None, reason=view.stop_requested)
    return _better_nodes(view, now_s, settings, step_time, members)


def _better_nodes(
    view: View, now_s: float, settings: LeaderSettings, step_time: StepTime, members: dict[str, NodeInfo]
) -> Move:
    """A node more, or one that counts as another type: worth a change if the step gets shorter by enough."""
    staying = {name: node.info for name, node in sorted(_staying(view).items()) if name in members or node.answered}
    if staying == members or view.step_s is None:
        return Wait(until_s=None, reason="training")
    if now_s < view.epoch_since_s + settings.dwell_s:
        waiting = "other nodes wait to join" if staying.keys() != members.keys() else "another plan waits"
        return Wait(until_s=view.epoch_since_s + settings.dwell_s, reason=f"training; {waiting}")
    new_s = step_time(tuple(staying.values()))
    others = ", ".join(
        name if name not in members or members[name].node_type == node.node_type else f"{name} as {node.node_type}"
        for name, node in staying.items()
    )
    if new_s is None or new_s > (1.0 - settings.min_gain) * view.step_s:
        return Wait(until_s=None, reason=f"training; {others} would gain less than {settings.min_gain:z.0%}")
    return RequestStop(reason=f"a step of {view.step_s:.3g} s takes {new_s:.3g} s on {others}")


def failures_in_a_row(view: View) -> int:
    """How many epochs in a row, this one included, broke with all their nodes there and committed nothing new.

    The loss of a node, an end as asked for, or a newly committed step is no failure; the last two begin a new row, and
    so does the loss of all nodes, as where all agents were started again. Where all nodes leave, a step that is
    committed and not saved begins none: each try to save commits one.
    """
    assert view.epoch is not None
    as_asked = view.broken is None and view.stop_requested is not None
    if as_asked or (view.committed > view.epoch.start.step and not view.is_stop_for_good):
        return 0
    if not (members := _members_there(view)):
        return 0
    is_whole = len(members) == len(view.epoch.nodes) and not any(view.nodes[name].refused for name in members)
    return view.epoch.failures + (1 if is_whole else 0)


def _staying(view: View) -> dict[str, NodeView]:
    """Those that have no notice."""
    return {name: node for name, node in view.nodes.items() if node.leaves_by_s is None}


def _members_there(view: View) -> list[str]:
    """The nodes of the newest epoch that are there as the same incarnation."""
    return [
        each.node.name
        for each in (() if view.epoch is None else view.epoch.nodes)
        if (node := view.nodes.get(each.node.name)) is not None and node.info.incarnation == each.node.incarnation
    ]


def _phase(view: View, name: str) -> RankPhase | None:
    node = view.nodes.get(name)
    return None if node is None else node.phase
