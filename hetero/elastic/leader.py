"""What the agent that leads does: sees the nodes, asks the protocol for the next move, and makes it.

A move may take a while (inventories, a plan, a transaction), during which the agent goes on with everything else.
"""

import asyncio
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hetero.elastic.copy_client import CopyClient
from hetero.elastic.copy_folder import read_placement
from hetero.elastic.events import EventLog
from hetero.elastic.exhaustion import Exhaustion
from hetero.elastic.job_reports import all_out, finished_step, measured_step_s, phase_of_node, wrong_input
from hetero.elastic.job_store import JobState
from hetero.elastic.leadership import (
    EvictNode,
    Finish,
    LeaderSettings,
    MakeEpoch,
    Move,
    NodeView,
    RequestStop,
    View,
    Wait,
    end_of_epoch,
    next_move,
)
from hetero.elastic.membership import Membership
from hetero.elastic.node_probe import ProbeAnswer, probe
from hetero.elastic.node_speeds import NodeSpeeds
from hetero.elastic.planning_problem import PlanningProblem
from hetero.elastic.planning_service import PlanningService
from hetero.elastic.publishing import Publisher
from hetero.elastic.records import CopyTrust, Epoch, NodeInfo, Outcome
from hetero.elastic.recovery import Restore
from hetero.elastic.replanning import NewPlan, PlanTable
from hetero.elastic.step_search import StepSearch
from hetero.elastic.stragglers import StragglerSettings
from hetero.errors import (
    CheckpointError,
    ConfigError,
    MembershipStoreError,
    ObjectStoreError,
    PlanError,
    SourceLostError,
)
from hetero.report.plan_wording import shape_of

_RETRY_S = 0.3
"""After a request that etcd has not answered."""
_MADE_EPOCH_S = 10.0
"""Within which an epoch that was made is read again: etcd is read every 3 s, and at each change."""


@dataclass(frozen=True, kw_only=True)
class LeaderTools:
    """What a leader works with.

    folder: of the copies of its own node.
    trust: which servers of copies are trusted, ``None`` without TLS.
    publisher: for the object store, if the job has one.
    stragglers: when a node is planned for as a slower one.
    serve_store: starts a store for ranks on this node and returns its port.
    exhaustion: does again what fails for lack of descriptors.
    forget: the command that deletes what etcd has of the job, for messages.
    show: takes a line for people.
    """

    membership: Membership
    planning: PlanningService
    problem: PlanningProblem
    settings: LeaderSettings
    stragglers: StragglerSettings
    events: EventLog
    folder: Path
    job: str
    token: str
    trust: CopyTrust | None
    forget: str
    publisher: Publisher | None
    serve_store: Callable[[], Awaitable[int]]
    exhaustion: Exhaustion
    wake: Callable[[], None]
    show: Callable[[str], None]


@dataclass(slots=True)
class _EpochNotes:
    """What this leader has seen of the newest epoch; times on its clock."""

    number: int
    since_s: float
    over_since_s: float | None = None
    predicted_s: float | None = None
    committed: int = 0
    stop_asked: RequestStop | None = None


_Nodes = tuple[tuple[str, str, str], ...]


class Leader:
    """Leads from its making until the agent drops it."""

    def __init__(self, node: NodeInfo, tools: LeaderTools) -> None:
        self._node = node
        self._tools = tools
        self._started_s = time.monotonic()
        self._notes = _EpochNotes(0, self._started_s)
        self._since_s: dict[str, float] = {}
        self._leaves_by_s: dict[str, float] = {}
        self._refused: set[str] = set()
        self._evicted: set[str] = set()
        self._search = StepSearch(
            tools.publisher,
            tools.problem,
            missing_s=tools.settings.missing_s,
            forget=tools.forget,
            show=tools.show,
        )
        self._speeds = NodeSpeeds(tools.problem, tools.stragglers)
        self._table = PlanTable()
        self._plans: dict[_Nodes, NewPlan | None] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._made_until_s = 0.0
        self._waits = ""
        self._problem = ""
        self._problem_of: dict[str, str] = {}

    def close(self) -> None:
        """Drop what is under way."""
        for task in self._tasks.values():
            task.cancel()
        if self._tools.publisher is not None:
            self._tools.publisher.close()

    async def act(self, state: JobState) -> float | None:
        """Make the next move; returns when to come again at the latest, on the clock of ``time.monotonic``."""
        now_s = time.monotonic()
        for task in [each for each in self._tasks.values() if each.done()]:
            # An unhandled error ends this agent, and its lease: another node leads.
            task.result()
        self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
        self._see(state, now_s)
        if self._tools.publisher is not None:
            self._tools.publisher.follow(state)
        view = self._view(state)
        over = end_of_epoch(view)
        if over is not None and self._notes.over_since_s is None:
            self._notes.over_since_s = now_s
            # Made for other places of the nodes: what they have decides now.
            self._plans = {}
            view = self._view(state)
        if over is not None and state.broken is None and not all_out(view):
            await asyncio.to_thread(self._tools.membership.break_epoch, self._notes.number, over)
        if over is not None or view.epoch is None:
            self._ask_nodes(state)
        if "epoch" in self._tasks:
            return None
        if self._notes.number < self._search.made.number and now_s < self._made_until_s:
            return self._made_until_s
        if (outcome := wrong_input(state)) is not None:
            await asyncio.to_thread(self._tools.membership.finish, outcome)
            return None
        move = next_move(view, now_s, self._tools.settings, lambda nodes: self._step_time(nodes, state))
        return await self._make(move, state)

    def _see(self, state: JobState, now_s: float) -> None:
        number = state.epoch.number if state.epoch is not None else 0
        if number != self._notes.number:
            self._notes = _EpochNotes(number, now_s, committed=0)
            self._search.inventories, self._plans, self._evicted = {}, {}, set()
            self._speeds.begin(state.epoch, now_s)
            if state.epoch is not None and self._tools.problem.is_answered_by(state.epoch.plan):
                self._make_table(state.epoch)
        here = {node.incarnation for node in state.nodes.values()}
        self._refused &= here
        self._since_s = {each: self._since_s.get(each, now_s) for each in here}
        self._search.inventories = {each: found for each, found in self._search.inventories.items() if each in here}
        self._leaves_by_s = {
            name: self._leaves_by_s.get(name, now_s + (math.inf if notice.seconds is None else notice.seconds))
            for name, notice in state.notices.items()
        }
        for report in state.reports.values():
            for rank in report.ranks:
                if rank.epoch == number:
                    self._notes.committed = max(self._notes.committed, rank.committed)
                    self._search.committed = max(self._search.committed, rank.committed)
        if self._notes.over_since_s is None:
            for change in self._speeds.judge(state.reports, now_s):
                self._tools.events.note("straggler", epoch=number, detail=change)

    def _view(self, state: JobState) -> View:
        step_s = measured_step_s(state)
        return View(
            leader=self._node.name,
            epoch=self._planned(state),
            nodes={
                name: NodeView(
                    info=self._speeds.counted(node),
                    since_s=self._since_s[node.incarnation],
                    answered=node.incarnation in self._search.inventories or self._is_spare(state, node),
                    refused=node.incarnation in self._refused,
                    phase=phase_of_node(state.reports.get(name), node, state.epoch),
                    leaves_by_s=self._leaves_by_s.get(name),
                    was_evicted=name in self._evicted,
                    is_broken=name in self._problem_of,
                )
                for name, node in state.nodes.items()
            },
            started_s=self._started_s,
            epoch_since_s=self._notes.since_s,
            over_since_s=self._notes.over_since_s,
            broken=state.broken,
            stop_requested=state.stop,
            is_stop_for_good=state.is_stop_for_good,
            run=self._tools.problem.run,
            finished_step=finished_step(state),
            committed=self._notes.committed,
            step_s=step_s if step_s > 0 and self._notes.predicted_s is not None else None,
            no_step=self._search.lack,
        )

    def _planned(self, state: JobState) -> Epoch | None:
        """The newest epoch, of nodes of the types that its plan takes them for."""
        epoch = state.epoch
        return None if epoch is None else dataclasses.replace(epoch, nodes=self._speeds.planned(epoch))

    def _is_spare(self, state: JobState, node: NodeInfo) -> bool:
        """While an epoch trains, a node that is none of it may be counted on."""
        return (
            self._notes.over_since_s is None
            and state.epoch is not None
            and all(each.node.incarnation != node.incarnation for each in state.epoch.nodes)
        )

    def _ask_nodes(self, state: JobState) -> None:
        """Ask nodes that have ended their ranks for what they have, and see whether the others are there at all."""
        for name, node in state.nodes.items():
            if node.incarnation in self._search.inventories or node.incarnation in self._refused:
                continue
            report = state.reports.get(name)
            has_ended = (
                report is not None and report.incarnation == node.incarnation and report.ended >= self._notes.number
            )
            self._in_background(
                f"ask {node.incarnation}", functools.partial(self._ask, node, wants_inventory=has_ended)
            )

    async def _ask(self, node: NodeInfo, *, wants_inventory: bool) -> None:
        if await probe(node) is ProbeAnswer.REFUSED:
            self._refused.add(node.incarnation)
        elif wants_inventory:
            tools = self._tools
            client = CopyClient(node, job=tools.job, token=tools.token, trust=tools.trust)
            try:
                self._search.inventories[node.incarnation] = await asyncio.to_thread(client.inventory)
                self._problem_of.pop(node.name, None)
            except CheckpointError as error:
                if not isinstance(error, SourceLostError):
                    self._problem_of[node.name] = str(error)
                await asyncio.sleep(_RETRY_S)
            finally:
                client.close()
        else:
            # It is ending them.
            await asyncio.sleep(_RETRY_S)

    def _step_time(self, nodes: tuple[NodeInfo, ...], state: JobState) -> float | None:
        """Predicted seconds of a step; ``None`` as long as nobody knows, which the planner is asked to change.

        While an epoch trains, in proportion to what its steps really take; its own plan is priced on nodes as they are
        now, of which some may have become slower.
        """
        if not nodes:
            return None
        key = _key(nodes)
        if key not in self._plans:
            self._in_background(f"plan {key}", functools.partial(self._plan, nodes, state))
            return None
        plan = self._plans[key]
        if plan is None or state.epoch is None or self._notes.over_since_s is not None:
            return None if plan is None else plan.step_s
        predicted_s = plan.kept_s or self._notes.predicted_s
        return plan.step_s if predicted_s is None else plan.step_s * measured_step_s(state) / predicted_s

    async def _plan(self, nodes: tuple[NodeInfo, ...], state: JobState) -> None:
        """Find the plan for ``nodes``, after the end of an epoch with the places that move the least."""
        tools, problem, planned = self._tools, self._speeds.problem, self._planned(state)
        if planned is not None and not problem.is_answered_by(planned.plan):
            planned = None
        restore = self._search.history(state).restore if self._search.inventories else None
        try:
            plan = await tools.planning.replan(
                problem,
                nodes,
                present=None if planned is None else (planned.plan, planned.nodes),
                table=self._table,
                held={} if restore is None else self._held_blocks(restore),
                **({"solve_s": problem.time_limit_s} if planned is None else {}),
            )
        except PlanError as error:
            self._problem = str(error)
            self._plans[_key(nodes)] = None
            return
        self._plans[_key(nodes)] = plan
        self._table.put(problem.counts_of(nodes), plan.plan)
        tools.events.note("plan", epoch=self._notes.number, detail=f"{shape_of(plan.plan)}; {plan.reason()}")

    def _make_table(self, epoch: Epoch) -> None:
        """Have the plan of ``epoch`` priced, and plans made for each single loss."""

        async def make() -> None:
            problem, planned = self._speeds.problem, self._speeds.planned(epoch)
            nodes = tuple(each.node for each in planned)
            present = await self._tools.planning.replan(
                problem, nodes, present=(epoch.plan, planned), table=self._table, held={}
            )
            if self._notes.number == epoch.number:
                self._notes.predicted_s = present.step_s
                if present.plan == epoch.plan:
                    self._speeds.predict(present.busy_s)
            for counts in self._table.missing(problem.counts_of(nodes)):
                self._table.put(counts, await self._tools.planning.plan_ahead(problem, counts))

        if (before := self._tasks.get("table")) is not None:
            before.cancel()
            del self._tasks["table"]
        self._in_background("table", make)

    def _held_blocks(self, restore: Restore) -> dict[str, list[str]]:
        """By node, what it has of a step; nothing where this node does not know the units of that epoch."""
        placement = None
        # A damaged list says nothing, as in this node's inventory.
        with contextlib.suppress(CheckpointError):
            placement = read_placement(self._tools.folder, restore.start.epoch)
        held: dict[str, list[str]] = {}
        for unit in () if placement is None else placement.units:
            for node in restore.sources.get(unit.name, ()):
                held.setdefault(node, []).extend(unit.blocks)
        return held

    async def _make(self, move: Move, state: JobState) -> float | None:
        membership = self._tools.membership
        match move:
            case Wait(until_s=until_s, reason=reason):
                # While it asks or plans itself, nobody is waited for.
                if reason != self._waits and not self._tasks:
                    self._waits = reason
                    self._tools.events.note("waiting", epoch=self._notes.number, detail=reason)
                    if self._search.lack is not None:
                        self._tools.show(f"hetero: {reason}; it waits for {self._tools.settings.missing_s:g} s")
                again_s = self._search.again_s
                return again_s if until_s is None else min(until_s, again_s)
            case MakeEpoch():
                self._in_background("epoch", functools.partial(self._make_epoch, move, state))
            case RequestStop(reason=reason, is_for_good=is_for_good):
                if move != self._notes.stop_asked:
                    self._notes.stop_asked = move
                    await asyncio.to_thread(
                        membership.request_stop, self._notes.number, reason, is_for_good=is_for_good
                    )
            case EvictNode(name=name, reason=reason):
                if state.nodes[name].incarnation not in self._refused:
                    self._evicted.add(name)
                self._tools.events.note(
                    "evicted", epoch=self._notes.number, detail=f"{name}: {reason}{self._problems([name])}"
                )
                await asyncio.to_thread(membership.evict, state.nodes[name])
            case Finish(exit_code=code, reason=reason, resumes=resumes):
                if code != 0 and any(name.startswith("plan ") for name in self._tasks):
                    # Whether the model fits is not known yet; the end of the plan wakes the agent.
                    return None
                outcome = Outcome(exit_code=code, reason=self._with_problem(reason), resumes=resumes)
                await asyncio.to_thread(membership.finish, outcome)
        return None

    def _with_problem(self, reason: str) -> str:
        if "does not fit" in reason and self._problem:
            return f"{reason} ({self._problem})"
        return f"{reason}{self._problems(self._evicted) if 'are asked for' in reason else ''}"

    def _problems(self, names: Iterable[str]) -> str:
        """What these nodes have answered instead of their inventories, for a message."""
        said = [self._problem_of[name] for name in sorted(names) if name in self._problem_of]
        return f" ({'; '.join(said)})" if said else ""

    async def _make_epoch(self, move: MakeEpoch, state: JobState) -> None:
        tools = self._tools
        try:
            history = await self._search.find(state)
        except (ObjectStoreError, ConfigError) as error:
            await asyncio.to_thread(tools.membership.finish, Outcome(exit_code=2, reason=str(error)))
            return
        if history is None:
            return
        made, restore = self._search.next_epoch(history, state), history.restore
        infos = tuple(state.nodes[name] for name in move.nodes)
        plan = self._plans.get(_key(tuple(map(self._speeds.counted, infos))))
        assert restore is not None
        assert plan is not None, "next_move has asked for it"
        tools.events.note("inventories", epoch=made.number, step=restore.start.step, detail=f"step of {restore.start}")
        port = await tools.serve_store()
        epoch = Epoch(
            number=made.number,
            plan=plan.plan,
            nodes=tuple(dataclasses.replace(each, node=state.nodes[each.node.name]) for each in plan.placed.nodes),
            start=restore.start,
            ids=made.ids,
            lineage=made.lineage,
            sources=restore.sources,
            rendezvous_host=self._node.host,
            rendezvous_port=port,
            reason=move.reason,
            failures=move.failures,
            others=tuple(state.nodes[name] for name in sorted(restore.holders - set(move.nodes))),
            slower=self._speeds.slower(infos),
        )
        # If etcd went back, nodes remember what it does not know.
        committed = 0 if state.committed or history.committed == 0 else max(1, restore.start.step)
        if await asyncio.to_thread(
            tools.membership.make_epoch, epoch, after_revision=state.epoch_revision, committed=committed
        ):
            # What is read from the store from now on has it.
            self._search.made, self._made_until_s = made, time.monotonic() + _MADE_EPOCH_S
            names = tuple(each.node.name for each in epoch.nodes)
            tools.events.note("epoch_made", epoch=made.number, step=epoch.start.step, nodes=names, detail=move.reason)

    def _in_background(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Unless it is under way; wakes the agent when it is done."""

        async def run() -> None:
            try:
                await self._tools.exhaustion.outlive(work)
            except MembershipStoreError as error:
                # The next move asks for it again; the membership knows since when etcd does not take it.
                self._problem = str(error)
                await asyncio.sleep(_RETRY_S)
            finally:
                self._tools.wake()

        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(run())


def _key(nodes: tuple[NodeInfo, ...]) -> _Nodes:
    return tuple(sorted((node.name, node.incarnation, node.node_type) for node in nodes))
