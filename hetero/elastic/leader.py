"""What the agent that leads does: sees the nodes, asks the protocol for the next move, and makes it.

A move may take a while (inventories, a plan, a transaction), during which the agent goes on with everything else.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetero.elastic.copy_client import CopyClient
from hetero.elastic.copy_folder import read_placement
from hetero.elastic.events import EventLog
from hetero.elastic.job_reports import all_out, measured_step_s, phase_of_node, wrong_input
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
from hetero.elastic.object_store import StoredHistory
from hetero.elastic.planning_problem import PlanningProblem
from hetero.elastic.planning_service import PlanningService
from hetero.elastic.publishing import Publisher
from hetero.elastic.records import Epoch, Inventory, NodeInfo, Outcome, RestorePoint
from hetero.elastic.recovery import BadCopy, Restore, choose_step, lineage_of, why_none_is_whole
from hetero.elastic.replanning import NewPlan, PlanTable
from hetero.elastic.stragglers import StragglerSettings
from hetero.errors import CheckpointError, ConfigError, MembershipStoreError, ObjectStoreError, PlanError
from hetero.report.plan_wording import shape_of

_STORE_PATIENCE_S = 1.0
"""With an object store that may not be needed: nodes have a step."""


@dataclass(frozen=True, kw_only=True)
class LeaderTools:
    """What a leader works with.

    folder: of the copies of its own node.
    publisher: for the object store, if the job has one.
    stragglers: when a node is planned for as a slower one.
    serve_store: starts a store for ranks on this node and returns its port.
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
    tls_certificate: str | None
    publisher: Publisher | None
    serve_store: Callable[[], Awaitable[int]]
    wake: Callable[[], None]


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
        self._inventories: dict[str, Inventory] = {}
        self._refused: set[str] = set()
        self._speeds = NodeSpeeds(tools.problem, tools.stragglers)
        self._table = PlanTable()
        self._plans: dict[_Nodes, NewPlan | None] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._made = 0
        self._waits = ""
        self._problem = ""

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
            # What was wrong with it is known to nobody yet.
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
        if "epoch" in self._tasks or self._notes.number < self._made:
            return None
        if (outcome := wrong_input(state)) is not None:
            await asyncio.to_thread(self._tools.membership.finish, outcome)
            return None
        move = next_move(view, now_s, self._tools.settings, lambda nodes: self._step_time(nodes, state))
        return await self._make(move, state)

    def _see(self, state: JobState, now_s: float) -> None:
        number = state.epoch.number if state.epoch is not None else 0
        if number != self._notes.number:
            self._notes = _EpochNotes(number, now_s, committed=0)
            self._inventories, self._plans = {}, {}
            self._speeds.begin(state.epoch, now_s)
            if state.epoch is not None:
                self._make_table(state.epoch)
        here = {node.incarnation for node in state.nodes.values()}
        self._refused &= here
        self._since_s = {each: self._since_s.get(each, now_s) for each in here}
        self._inventories = {each: found for each, found in self._inventories.items() if each in here}
        self._leaves_by_s = {
            name: self._leaves_by_s.get(name, now_s + (math.inf if notice.seconds is None else notice.seconds))
            for name, notice in state.notices.items()
        }
        for report in state.reports.values():
            for rank in report.ranks:
                if rank.epoch == number:
                    self._notes.committed = max(self._notes.committed, rank.committed)
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
                    answered=node.incarnation in self._inventories or self._is_spare(state, node),
                    refused=node.incarnation in self._refused,
                    phase=phase_of_node(state.reports.get(name), node, state.epoch),
                    leaves_by_s=self._leaves_by_s.get(name),
                )
                for name, node in state.nodes.items()
            },
            started_s=self._started_s,
            epoch_since_s=self._notes.since_s,
            over_since_s=self._notes.over_since_s,
            broken=state.broken,
            stop_requested=state.stop,
            is_stop_for_good=state.is_stop_for_good,
            saves=self._tools.problem.saves,
            committed=self._notes.committed,
            step_s=step_s if step_s > 0 and self._notes.predicted_s is not None else None,
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
            if node.incarnation in self._inventories or node.incarnation in self._refused:
                continue
            report = state.reports.get(name)
            has_ended = (
                report is not None and report.incarnation == node.incarnation and report.ended >= self._notes.number
            )
            self._in_background(f"ask {node.incarnation}", self._ask(node, wants_inventory=has_ended))

    async def _ask(self, node: NodeInfo, *, wants_inventory: bool) -> None:
        if await probe(node) is ProbeAnswer.REFUSED:
            self._refused.add(node.incarnation)
        elif wants_inventory:
            tools = self._tools
            client = CopyClient(node, job=tools.job, token=tools.token, tls_certificate=tools.tls_certificate)
            try:
                self._inventories[node.incarnation] = await asyncio.to_thread(client.inventory)
            except CheckpointError as error:
                self._problem = str(error)
                await asyncio.sleep(0.2)
            finally:
                client.close()
        else:
            # It is ending them.
            await asyncio.sleep(0.2)

    def _step_time(self, nodes: tuple[NodeInfo, ...], state: JobState) -> float | None:
        """Predicted seconds of a step; ``None`` as long as nobody knows, which the planner is asked to change.

        While an epoch trains, in proportion to what its steps really take; its own plan is priced on nodes as they are
        now, of which some may have become slower.
        """
        if not nodes:
            return None
        key = _key(nodes)
        if key not in self._plans:
            self._in_background(f"plan {key}", self._plan(nodes, state))
            return None
        plan = self._plans[key]
        if plan is None or state.epoch is None or self._notes.over_since_s is not None:
            return None if plan is None else plan.step_s
        predicted_s = plan.kept_s or self._notes.predicted_s
        return plan.step_s if predicted_s is None else plan.step_s * measured_step_s(state) / predicted_s

    async def _plan(self, nodes: tuple[NodeInfo, ...], state: JobState) -> None:
        """Find the plan for ``nodes``, after the end of an epoch with the places that move the least."""
        tools, problem, planned = self._tools, self._speeds.problem, self._planned(state)
        restore = self._restore(state) if self._inventories else None
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
        self._in_background("table", make())

    def _restore(self, state: JobState) -> Restore | None:
        """The newest step that is whole among all nodes that are there, and what the object store has."""
        return choose_step(
            list(self._inventories.values()),
            lineage=self._lineage(state),
            stored=self._stored.steps,
            bad=frozenset(BadCopy.parse(each) for each in state.bad_copies),
            committed=self._committed(state),
        )

    @property
    def _stored(self) -> StoredHistory:
        """What is in the object store, as far as it is known."""
        return StoredHistory() if self._tools.publisher is None else self._tools.publisher.history

    def _lineage(self, state: JobState) -> Mapping[int, RestorePoint]:
        """Of the newest epoch; at the start of a job that of the run that is in the object store."""
        return self._stored.lineage if state.epoch is None else state.epoch.lineage

    def _committed(self, state: JobState) -> int:
        """Not of this leader's time alone: who has reported it may be gone."""
        if state.epoch is None:
            return 0 if self._tools.publisher is None else self._tools.publisher.newest_step
        return max(self._notes.committed, state.committed, state.epoch.start.step)

    async def _ask_store(self, state: JobState) -> None:
        """See what the object store has; for long only if there is nothing else to go on from.

        A job that begins has nothing to lose yet: a refusal ends it at once.

        Raises:
            ObjectStoreError: it does not answer or refuses, and there is nothing else.
            ConfigError: it holds another run.
        """
        publisher = self._tools.publisher
        if publisher is None:
            return
        nothing_else = state.epoch is None or self._restore(state) is None
        try:
            await publisher.refresh(
                patience_s=self._tools.settings.missing_s if nothing_else else _STORE_PATIENCE_S,
                waits_for_fix=state.epoch is not None,
            )
        except ObjectStoreError:
            if nothing_else:
                raise
        if state.epoch is None:
            await publisher.check_model(self._tools.problem.trained_model)

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
                return until_s
            case MakeEpoch():
                self._in_background("epoch", self._make_epoch(move, state))
            case RequestStop(reason=reason, is_for_good=is_for_good):
                if move != self._notes.stop_asked:
                    self._notes.stop_asked = move
                    await asyncio.to_thread(
                        membership.request_stop, self._notes.number, reason, is_for_good=is_for_good
                    )
            case EvictNode(name=name, reason=reason):
                self._tools.events.note("evicted", epoch=self._notes.number, detail=f"{name}: {reason}")
                await asyncio.to_thread(membership.evict, state.nodes[name])
            case Finish(exit_code=code, reason=reason):
                if code != 0 and any(name.startswith("plan ") for name in self._tasks):
                    # Whether the model fits is not known yet; the end of the plan wakes the agent.
                    return None
                await asyncio.to_thread(membership.finish, Outcome(exit_code=code, reason=self._with_problem(reason)))
        return None

    def _with_problem(self, reason: str) -> str:
        return f"{reason} ({self._problem})" if "does not fit" in reason and self._problem else reason

    async def _make_epoch(self, move: MakeEpoch, state: JobState) -> None:
        tools = self._tools
        try:
            await self._ask_store(state)
        except (ObjectStoreError, ConfigError) as error:
            await asyncio.to_thread(tools.membership.finish, Outcome(exit_code=2, reason=str(error)))
            return
        number = (self._stored.newest_claim if state.epoch is None else state.epoch.number) + 1
        infos = tuple(state.nodes[name] for name in move.nodes)
        plan = self._plans.get(_key(tuple(map(self._speeds.counted, infos))))
        restore = self._restore(state)
        if restore is None:
            why = why_none_is_whole(
                list(self._inventories.values()),
                lineage=self._lineage(state),
                committed=self._committed(state),
                object_store=tools.publisher is not None,
            )
            await asyncio.to_thread(tools.membership.finish, Outcome(exit_code=1, reason=why))
            return
        assert plan is not None, "next_move has asked for it"
        tools.events.note("inventories", epoch=number, step=restore.start.step, detail=f"step of {restore.start}")
        port = await tools.serve_store()
        epoch = Epoch(
            number=number,
            plan=plan.plan,
            nodes=tuple(dataclasses.replace(each, node=state.nodes[each.node.name]) for each in plan.placed.nodes),
            start=restore.start,
            lineage=lineage_of(number, restore.start, self._lineage(state)),
            sources=restore.sources,
            rendezvous_host=self._node.host,
            rendezvous_port=port,
            reason=move.reason,
            failures=move.failures,
            others=tuple(state.nodes[name] for name in sorted(restore.holders - set(move.nodes))),
            slower=self._speeds.slower(infos),
        )
        if await asyncio.to_thread(tools.membership.make_epoch, epoch, after_revision=state.epoch_revision):
            # What is read from the store from now on has it.
            self._made = number
            names = tuple(each.node.name for each in epoch.nodes)
            tools.events.note("epoch_made", epoch=number, step=epoch.start.step, nodes=names, detail=move.reason)

    def _in_background(self, name: str, work: Awaitable[None]) -> None:
        """Unless it is under way; wakes the agent when it is done."""

        async def run() -> None:
            try:
                await work
            except MembershipStoreError as error:
                self._problem = str(error)
            finally:
                self._tools.wake()

        if name in self._tasks and not self._tasks[name].done():
            if asyncio.iscoroutine(work):
                work.close()
            return
        self._tasks[name] = asyncio.create_task(run())


def _key(nodes: tuple[NodeInfo, ...]) -> _Nodes:
    return tuple(sorted((node.name, node.incarnation, node.node_type) for node in nodes))
