"""The agent of a node: joins the job, starts, watches and replaces ranks, serves the node's copies, leads if elected.

It imports no torch, and what it does never takes long: what does runs in threads or processes of its own.
"""

import asyncio
import contextlib
import math
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.copy_folder import MemoryOfEpochs, remove_copy
from hetero.elastic.copy_server import CopyServer
from hetero.elastic.copy_tls import server_context
from hetero.elastic.ends import (
    AgentEnd,
    End,
    EndError,
    end_by_error,
    end_of,
    end_of_job,
    end_without_step,
    forget_command,
)
from hetero.elastic.etcd_patience import EtcdPatience
from hetero.elastic.events import EventLog
from hetero.elastic.exhaustion import Exhaustion
from hetero.elastic.folder_claim import claimed_folder, delete_folder
from hetero.elastic.fork_server import ForkServer
from hetero.elastic.job_entry import JobEntry
from hetero.elastic.job_settings import settings_checksum
from hetero.elastic.job_store import JobState, token_mark
from hetero.elastic.leader import Leader, LeaderTools
from hetero.elastic.leaving import Leaving
from hetero.elastic.membership import Membership
from hetero.elastic.node_probe import ProbeAnswer, probe
from hetero.elastic.notices import watch_metadata
from hetero.elastic.planning_problem import PlanningProblem
from hetero.elastic.planning_service import PlanningService
from hetero.elastic.rank_watch import RankWatch
from hetero.elastic.records import DESCRIBE_VARIABLE, Epoch, NodeInfo, NodeReport
from hetero.elastic.recovery import BadCopy
from hetero.elastic.uploads import Uploads
from hetero.errors import CheckpointError, ConfigError, MembershipStoreError
from hetero.serialization import load

_PROBE_EVERY_S = 0.5
_TELL_STEPS_EVERY_S = 0.5
_RETRY_S = 0.3
_LAST_S = 30.0
"""For ranks that have finished: until their processes have ended, and until etcd has taken note of it."""


class Agent:
    """One node's agent; :meth:`run` is its life."""

    def __init__(self, options: AgentOptions, *, show: Callable[[str], None]) -> None:
        self._options = options
        self._show = show
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._events = EventLog(options.logs / f"{options.name}.events.jsonl", node=options.name, show=show)
        self._exhaustion = Exhaustion(show)
        self._fork_server = ForkServer()
        self._membership = Membership(
            options.etcd, options.job, lease_s=options.lease_s, on_change=self._wake_from_thread
        )
        self._watch = RankWatch(options, self._fork_server, events=self._events, listener=self, show=show)
        self._ranks = self._watch.processes
        self._uploads: Uploads | None = None
        self._planning: PlanningService | None = None
        self._problem: PlanningProblem | None = None
        self._leader: Leader | None = None
        self._node: NodeInfo | None = None
        self._token = ""
        self._ended = 0
        self._broken: tuple[int, str] = (0, "")
        self._stopping = (0, False)
        self._memory = MemoryOfEpochs(options.folder)
        self._news = asyncio.Event()
        self._urgent_news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._life: asyncio.Task[AgentEnd] | None = None
        self._has_joined = False
        self._committed_before = 0
        self._outcome: AgentEnd | None = None
        self._patience = EtcdPatience(self._membership, limit_s=options.wait_for_etcd_s, events=self._events, show=show)
        self._entry = JobEntry(options, self._membership, self._patience, events=self._events, show=show)
        self._leaving = Leaving(
            options, self._membership, events=self._events, show=show, end_at_once=self._end_at_once
        )

    async def run(self) -> AgentEnd:
        """Stay until the job has ended or this node leaves, and end all that was started.

        The copies of the node are deleted at exit code 0, and here alone.
        """
        self._events.note("agent_started")
        self._life = asyncio.create_task(self._stay_in_job())
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._leave_at_signal, number)
        try:
            end = await self._life
        except asyncio.CancelledError:
            # At once, whatever it was doing.
            if self._outcome is None:
                raise
            end = self._outcome
        except Exception as error:  # noqa: BLE001  (whatever ends an agent, its copies stay and its lease is given up)
            end = end_by_error(error, has_joined=self._has_joined, has_finished=self._has_finished)
        finally:
            await self._close()
        if self._leaving.notice is not None and self.committed <= self._committed_before:
            outcome = self._membership.state.outcome
            end = end_without_step(end, resumes=outcome is not None and outcome.resumes)
        self._events.note("finished", detail=end.reason)
        self._events.close()
        if not end.keeps_copies:
            delete_folder(self._options.folder)
        return end

    @property
    def committed(self) -> int:
        """The newest committed step that this node knows, 0 for none."""
        return max(self._membership.state.committed, self._watch.committed)

    @property
    def _has_finished(self) -> bool:
        """Whether all ranks of this node have finished the run, and are gone."""
        reports = self._watch.reports
        ranks = 0 if self._node is None else self._node.num_ranks
        return (
            not self._ranks.running and len(reports) == ranks > 0 and all(each.phase == "finished" for each in reports)
        )

    async def _stay_in_job(self) -> AgentEnd:
        """Join the job, and live in it.

        Raises:
            HeteroError: something about this node, its program, its job or etcd is wrong.
        """
        options = self._options
        self._token = await self._entry.claim_token()
        # After what may end this agent at once, and from this thread, with which the server will end.
        self._fork_server.start()
        owner = f"{options.job} {token_mark(self._token)}"
        self._entry.check_copies(owner)
        if options.object_store is not None:
            self._uploads = Uploads(
                options, holder=owner, events=self._events, show=self._show, on_news=lambda: self.news(urgent=True)
            )
        with claimed_folder(options.folder, job=owner):
            try:
                async with self._serving() as port:
                    await self._warm_up()
                    await self._join(port)
                    return await self._live()
            except EndError as error:
                if error.kind is End.WENT_BACK and self._membership.state.epoch is not None:
                    # etcd may have forgotten that a step was committed: the run must not start from initial weights.
                    await asyncio.to_thread(self._memory.note_commit)
                raise

    def news(self, *, urgent: bool) -> None:
        """Have what the ranks have said told to the others."""
        self._news.set()
        if urgent:
            self._urgent_news.set()
        self._wake.set()

    def epoch_broke(self, epoch: int, reason: str) -> None:
        """End the ranks here at once, and tell the others to."""
        self._broken = (epoch, reason)
        self._start(lambda: self._patience.insist(lambda: self._membership.break_epoch(epoch, reason)))
        self._wake.set()

    def first_commit(self, epoch: int) -> None:
        """What earlier epochs have left is not needed any more."""
        self._start(lambda: asyncio.to_thread(self._memory.first_commit, epoch))

    def bad_copy(self, detail: str) -> None:
        """Have the node that has it delete it."""
        with contextlib.suppress(CheckpointError):
            copy = str(BadCopy.parse(detail))
            self._start(lambda: self._patience.insist(lambda: self._membership.report_bad_copy(copy)))

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[int]:
        """Serve copies, and take the reports of ranks."""
        options = self._options
        tls = None if options.tls is None else server_context(options.tls)
        server = CopyServer(options.folder, job=options.job, node=options.name, token=self._token, tls=tls)
        port = await server.start(options.host, options.port)
        try:
            await self._watch.listen()
            yield port
        finally:
            self._watch.close()
            await server.stop()

    async def _warm_up(self) -> None:
        """Have the fork server import everything, and ask the program what it is going to train."""
        await asyncio.to_thread(self._fork_server.warm_up)
        if self._fork_server.fallback:
            self._show(
                f"hetero: ranks are spawned and not forked, each with seconds of imports: {self._fork_server.fallback}"
            )
        self._planning = PlanningService(self._fork_server.context)
        self._events.note("warm", detail=f"{self._fork_server.seconds_to_warm:.1f} s")
        path, settings = self._options.folder / "problem.json", self._options.settings
        code, said = await self._ranks.run_alone(
            settings.program,
            settings.flags,
            variables={DESCRIBE_VARIABLE: str(path)},
            output=self._options.logs / f"{self._options.name}.describe.log",
        )
        if code != 0 or not path.exists():
            raise ConfigError(f"{settings.program} does not say what it is to train (exit code {code}): {said}")
        self._problem = load(PlanningProblem, path)

    async def _join(self, port: int) -> None:
        """Take this node's place in the job, once an earlier agent of it is gone."""
        options, problem = self._options, self._problem
        assert problem is not None
        num_ranks = next((t.gpus_per_node for t in problem.cluster.node_types if t.name == options.node_type), 1)
        self._node = NodeInfo(
            name=options.name,
            incarnation=uuid.uuid4().hex,
            node_type=options.node_type,
            num_ranks=num_ranks,
            host=options.host,
            port=port,
            failure_domain=options.failure_domain,
            settings=settings_checksum(options.settings),
        )
        problem.counts_of([self._node])
        if self._leaving.notice is None:
            # One that an earlier agent of this node was given, and did not live to see met.
            await self._patience.insist(lambda: self._membership.withdraw_notice(options.name))
        if not self._has_joined:
            await self._entry.enter()
        await self._entry.join(self._node)
        if not self._has_joined:
            self._committed_before = self._membership.state.committed
        self._has_joined = True
        epoch = self._membership.state.epoch
        self._ended = epoch.number if epoch is not None else 0
        self.news(urgent=True)
        self._events.note("node_joined", epoch=self._ended)

    async def _live(self) -> AgentEnd:
        """React to whatever happens until the end."""
        for work in (self._ranks.show_output, self._tell_news, self._probe_nodes):
            self._start(work)
        if (metadata := self._options.metadata) is not None:
            self._start(lambda: watch_metadata(metadata, self._leave))
        while self._outcome is None:
            self._wake.clear()
            for task in [each for each in self._tasks if each.done()]:
                self._tasks.discard(task)
                task.result()
            times_s = [await self._exhaustion.outlive(self._react), self._patience.deadline_s]
            timeout = max(0.0, min((each for each in times_s if each is not None), default=math.inf) - time.monotonic())
            if self._outcome is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), None if timeout == math.inf else timeout)
        return self._outcome

    async def _react(self) -> float | None:
        """Do what the state of the job asks of this node; until when there is nothing else to do."""
        state = self._membership.state
        self._entry.check_job(state)
        if state.outcome is not None:
            if self._leaving.notice is None:
                self._entry.check_begins_again(state)
            if state.outcome.exit_code == 0:
                # They have said that they have finished, and are about to end.
                await self._ranks.wait(_LAST_S)
            await self._watch.end(state.outcome.reason)
            self._outcome = end_of_job(state.outcome.exit_code, state.outcome.reason)
            return None
        if self._membership.evicted:
            await self._come_back()
            return time.monotonic()
        if state.epoch is not None:
            await self._follow(state.epoch, state)
        self._patience.need(not self._ranks.running, at_most_s=_LAST_S if self._has_finished else math.inf)
        self._patience.check(epoch=self._ended)
        try:
            await self._delete_bad_copies(state)
            is_over = not self._ranks.running and (state.epoch is None or self._ended >= state.epoch.number)
            saves = self._problem is not None and self._problem.run.save is not None
            if (end := await self._leaving.end_if_due(state, is_over_here=is_over, saves=saves)) is not None:
                self._outcome = end
                return None
            until_s = await self._lead(state)
        except MembershipStoreError:
            # The membership asks nothing while it knows that etcd is in trouble, and says when that is over.
            return time.monotonic() + _RETRY_S
        return until_s

    async def _follow(self, epoch: Epoch, state: JobState) -> None:
        """Run the ranks of the newest epoch, if it goes on and has some here; end all others."""
        if self._ranks.running and self._ranks.epoch < epoch.number:
            await self._watch.end("a newer epoch has begun")
        is_member = any(each.node == self._node for each in epoch.nodes)
        await asyncio.to_thread(self._memory.see, epoch.ancestry, takes_part=is_member)
        broken = state.broken or (self._broken[1] if self._broken[0] == epoch.number else "")
        if self._ended >= epoch.number:
            return
        if broken:
            self._events.note("detected", epoch=epoch.number, step=self._watch.step, detail=broken)
            self._show(f"hetero: epoch {epoch.number} is over: {broken}")
            await self._watch.end(broken)
        elif self._ranks.epoch < epoch.number and is_member:
            uploads = None
            if self._uploads is not None:
                uploads = await self._uploads.begin(epoch, stored=state.stored)
            self._watch.start(epoch, token=self._token, uploads=uploads)
            names = ", ".join(each.node.name for each in epoch.nodes)
            self._show(f"hetero: epoch {epoch.number} on {names} from step {epoch.start.step}: {epoch.reason}")
        elif (
            self._ranks.running
            and state.stop
            and self._stopping < (epoch.number, state.is_stop_for_good)
            and self._watch.can_stop
        ):
            self._stopping = (epoch.number, state.is_stop_for_good)
            self._events.note("stop_requested", epoch=epoch.number, step=self._watch.step, detail=state.stop)
            self._show(f"hetero: epoch {epoch.number} ends after the step in hand: {state.stop}")
            self._ranks.stop(is_for_good=state.is_stop_for_good)
        if not self._ranks.running:
            self._ended = epoch.number
            self.news(urgent=True)

    async def _lead(self, state: JobState) -> float | None:
        """Take the lead if nobody has it; with it, make the next move."""
        assert self._node is not None
        # Who leads serves the rendezvous of the next epoch, and has to be there as long as that is.
        leaves = self._leaving.notice is not None and state.stays_without(self._node.name)
        if leaves and state.leader == self._node.incarnation:
            await asyncio.to_thread(self._membership.resign)
            return None
        if state.leader is None and not leaves:
            await asyncio.to_thread(self._membership.lead)
            # The next state of the job says who leads.
            return time.monotonic() + _RETRY_S
        if state.leader != self._node.incarnation:
            self._drop_lead()
            return None
        if self._leader is None:
            assert self._planning is not None
            assert self._problem is not None
            self._events.note("leads")
            tools = LeaderTools(
                membership=self._membership,
                planning=self._planning,
                problem=self._problem,
                settings=self._options.leader,
                stragglers=self._options.stragglers,
                events=self._events,
                folder=self._options.folder,
                job=self._options.job,
                token=self._token,
                trust=self._options.trust,
                forget=forget_command(self._options.etcd, self._options.job),
                publisher=None if self._uploads is None else self._uploads.publisher(self._membership),
                serve_store=lambda: self._ranks.serve_store(self._options.host),
                exhaustion=self._exhaustion,
                wake=self._wake.set,
                show=self._show,
            )
            self._leader = Leader(self._node, tools)
        return await self._leader.act(state)

    def _drop_lead(self) -> None:
        if self._leader is not None:
            self._leader.close()
            self._leader = None

    async def _come_back(self) -> None:
        """This node's place was taken away: its ranks end, and it joins again as another incarnation."""
        assert self._node is not None
        self._events.note("evicted", epoch=self._ended, detail=self._node.incarnation)
        self._show(f"hetero: node {self._options.name} was evicted from the job; its ranks end, and it joins again")
        self._drop_lead()
        await self._watch.end("evicted")
        self._patience.need(True)
        await self._join(self._node.port)

    async def _delete_bad_copies(self, state: JobState) -> None:
        for each in state.bad_copies:
            copy = BadCopy.parse(each)
            # While ranks of that epoch run they may be writing there.
            if copy.node == self._options.name and not self._ranks.running:
                folder = self._options.folder
                # One that cannot be deleted stays known as bad.
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(remove_copy, folder, epoch=copy.epoch, step=copy.step, unit=copy.unit)
                    await asyncio.to_thread(self._membership.forget_bad_copy, each)

    def _leave_at_signal(self, number: signal.Signals) -> None:
        if self._leaving.notice is not None or number == signal.SIGINT or not self._has_joined:
            reason = f"{number.name}: node {self._options.name} leaves at once"
            self._end_at_once(end_of(End.SIGNALLED, reason, signal_number=number))
        else:
            self._leave(f"its agent got {number.name}", self._options.leave_within_s)

    def _end_at_once(self, end: AgentEnd) -> None:
        """End the agent, whatever it is doing."""
        if self._outcome is None and self._life is not None and not self._life.done():
            self._outcome = end
            self._life.cancel()

    def _leave(self, reason: str, seconds: float | None) -> None:
        """Leave the job: the ranks finish the step in hand and commit it, if there is time."""
        is_over = self._life is None or self._life.done()
        if not is_over and self._leaving.begin(reason, seconds):
            self._start(lambda: self._patience.insist(self._leaving.put))

    async def _tell_news(self) -> None:
        """Write what ranks have said into etcd: what somebody may wait for at once, the rest now and then."""
        while True:
            await self._news.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent_news.wait(), _TELL_STEPS_EVERY_S)
            self._news.clear()
            self._urgent_news.clear()
            await self._patience.insist(self._tell)

    def _tell(self) -> None:
        assert self._node is not None
        if not self._membership.evicted:
            report = NodeReport(
                node=self._node.name,
                incarnation=self._node.incarnation,
                ended=self._ended,
                ranks=self._watch.reports,
                uploaded=None if self._uploads is None else self._uploads.uploaded,
            )
            self._membership.report(report)

    async def _probe_nodes(self) -> None:
        """Look after the next node and the leader, by turns of half a second; evict one whose host refuses."""
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            nodes = self._membership.state.nodes
            names = sorted({*nodes, self._options.name})
            following = nodes.get(names[(names.index(self._options.name) + 1) % len(names)])
            leader = next((n for n in nodes.values() if n.incarnation == self._membership.state.leader), None)
            for node in {each.incarnation: each for each in (following, leader) if each is not None}.values():
                if node.name != self._options.name and await probe(node) is ProbeAnswer.REFUSED:
                    await self._evict(node)

    async def _evict(self, node: NodeInfo) -> None:
        self._events.note("evicted", epoch=self._ended, detail=f"{node.name}: its host refuses connections")
        await self._patience.insist(lambda: self._membership.evict(node))

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._exhaustion.outlive(work))
        task.add_done_callback(lambda _: self._wake.set())
        self._tasks.add(task)

    def _wake_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _close(self) -> None:
        """End everything that was started, however far that had come; the lease first, so that the others go on."""
        given_up = asyncio.ensure_future(asyncio.to_thread(self._membership.close))
        try:
            # From the last to the first; one that fails skips none of the others.
            async with contextlib.AsyncExitStack() as steps:
                steps.push_async_callback(asyncio.gather, given_up)
                if self._planning is not None:
                    steps.callback(self._planning.close)
                steps.callback(self._ranks.end_store)
                if self._uploads is not None:
                    steps.push_async_callback(self._uploads.end)
                steps.push_async_callback(self._watch.end, "the agent ends")
                for task in self._tasks:
                    steps.callback(task.cancel)
                steps.callback(self._drop_lead)
        except Exception as error:  # noqa: BLE001  (how the agent has ended is known by now)
            self._show(f"hetero: the agent could not end all that it had started: {type(error).__name__}: {error}")
