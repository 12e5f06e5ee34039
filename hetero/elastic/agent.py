"""The agent of a node: joins the job, starts, watches and replaces ranks, serves the node's copies, leads if elected.

It imports no torch, and what it does never takes long: what does runs in threads or processes of its own.
"""

import asyncio
import contextlib
import hashlib
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from hetero.distributed.process_output import ignore_output_errors
from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.copy_folder import claimed_folder, delete_folder, remove_copy, remove_epochs_before
from hetero.elastic.copy_server import CopyServer, server_tls
from hetero.elastic.events import EventLog
from hetero.elastic.fork_server import ForkServer
from hetero.elastic.job_settings import settings_checksum
from hetero.elastic.job_store import JobState
from hetero.elastic.leader import Leader, LeaderTools
from hetero.elastic.membership import Membership
from hetero.elastic.node_probe import ProbeAnswer, probe
from hetero.elastic.notices import watch_metadata
from hetero.elastic.planning_problem import PlanningProblem
from hetero.elastic.planning_service import PlanningService
from hetero.elastic.rank_watch import RankWatch
from hetero.elastic.records import DESCRIBE_VARIABLE, Epoch, NodeInfo, NodeReport, Notice, Outcome
from hetero.elastic.recovery import BadCopy
from hetero.elastic.uploads import Uploads
from hetero.errors import CheckpointError, ConfigError, MembershipStoreError
from hetero.serialization import load

T = TypeVar("T")

_PROBE_EVERY_S = 0.5
_TELL_STEPS_EVERY_S = 0.5
_RETRY_S = 0.3
_LAST_S = 30.0
"""For ranks that have finished, until their processes have ended."""


class Agent:
    """One node's agent; :meth:`run` is its life."""

    def __init__(self, options: AgentOptions, *, show: Callable[[str], None]) -> None:
        self._options = options
        self._show = show
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._events = EventLog(options.logs / f"{options.name}.events.jsonl", node=options.name, show=show)
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
        self._stopping = 0
        self._news = asyncio.Event()
        self._urgent_news = asyncio.Event()
        self._leaving: Notice | None = None
        self._away = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._outcome: Outcome | None = None

    async def run(self) -> int:
        """Stay until the job has finished or this node leaves; returns the exit code.

        Raises:
            ConfigError: something about this node, its program or its job is wrong.
            MembershipStoreError: etcd has not answered within the time that the options give it.
        """
        options = self._options
        self._events.note("agent_started")
        try:
            state = await self._first_state()
            if state.outcome is not None:
                raise ConfigError(
                    f"job {options.job} is over already: {state.outcome.reason}; start it anew under another --job"
                )
            await self._insist(lambda: self._membership.agree_on_settings(options.settings))
            self._token = await self._insist(self._membership.claim_token)
            # After what may end this agent at once, and from this thread, with which the server will end.
            self._fork_server.start()
            owner = f"{options.job} {hashlib.sha256(self._token.encode()).hexdigest()[:16]}"
            if options.object_store is not None:
                self._uploads = Uploads(
                    options, holder=owner, events=self._events, show=self._show, on_news=lambda: self.news(urgent=True)
                )
            with claimed_folder(options.folder, job=owner):
                async with self._serving() as port:
                    await self._warm_up()
                    await self._join(port)
                    await self._live()
        finally:
            await self._end()
        assert self._outcome is not None
        self._events.note("finished", detail=self._outcome.reason)
        self._events.close()
        self._show(f"hetero: {self._outcome.reason}")
        delete_folder(options.folder)
        return self._outcome.exit_code

    def news(self, *, urgent: bool) -> None:
        """Have what the ranks have said told to the others."""
        self._news.set()
        if urgent:
            self._urgent_news.set()
        self._wake.set()

    def epoch_broke(self, epoch: int, reason: str) -> None:
        """End the ranks here at once, and tell the others to."""
        self._broken = (epoch, reason)
        self._start(self._insist(lambda: self._membership.break_epoch(epoch, reason)))
        self._wake.set()

    def first_commit(self, epoch: int) -> None:
        """What earlier epochs have left is not needed any more."""
        self._start(asyncio.to_thread(remove_epochs_before, self._options.folder, epoch))

    def bad_copy(self, detail: str) -> None:
        """Have the node that has it delete it."""
        with contextlib.suppress(CheckpointError):
            copy = str(BadCopy.parse(detail))
            self._start(self._insist(lambda: self._membership.report_bad_copy(copy)))

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[int]:
        """Serve copies, and take the reports of ranks."""
        options = self._options
        tls = None
        if options.tls_certificate is not None and options.tls_key is not None:
            tls = server_tls(options.tls_certificate, options.tls_key)
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
        if self._leaving is None:
            # One that an earlier agent of this node was given, and did not live to see met.
            await self._insist(lambda: self._membership.withdraw_notice(options.name))
        while True:
            before = self._membership.state.nodes.get(options.name)
            is_free = before is None or (before.host, before.port) == (options.host, port)
            if before is not None and not is_free:
                answer = await probe(before)
                if answer is ProbeAnswer.CONNECTED:
                    raise ConfigError(
                        f"node {options.name} is in job {options.job} already, at {before.host}:{before.port}; give "
                        "each agent another --node-name"
                    )
                is_free = answer is ProbeAnswer.REFUSED
            with contextlib.suppress(MembershipStoreError):
                if is_free and await asyncio.to_thread(self._membership.join, self._node):
                    break
            await asyncio.sleep(_RETRY_S)
        epoch = self._membership.state.epoch
        self._ended = epoch.number if epoch is not None else 0
        self.news(urgent=True)
        self._events.note("node_joined", epoch=self._ended)

    async def _live(self) -> None:
        """React to whatever happens until the end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._leave_at_signal, number)
        for work in (self._ranks.show_output(), self._tell_news(), self._probe_nodes()):
            self._start(work)
        if self._options.metadata is not None:
            self._start(watch_metadata(self._options.metadata, self._leave))
        while self._outcome is None:
            self._wake.clear()
            for task in [each for each in self._tasks if each.done()]:
                self._tasks.discard(task)
                task.result()
            try:
                until_s = await self._react(self._membership.state)
            except MembershipStoreError:
                # Changes wait until it is back; the threads of the membership say when.
                until_s = time.monotonic() + _RETRY_S
            timeout = None if until_s is None else max(0.0, until_s - time.monotonic())
            if self._outcome is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), timeout)

    async def _react(self, state: JobState) -> float | None:
        """Do what the state of the job asks of this node; until when there is nothing else to do."""
        self._look_at_etcd(state)
        if self._membership.evicted:
            await self._come_back()
            return time.monotonic()
        if state.outcome is not None:
            if state.outcome.exit_code == 0:
                # They have said that they have finished, and are about to end.
                await self._ranks.wait(_LAST_S)
            await self._watch.end(state.outcome.reason)
            self._outcome = state.outcome
            return None
        if state.epoch is not None:
            await self._follow(state.epoch, state)
        await self._delete_bad_copies(state)
        await self._leave_if_due(state)
        return None if self._outcome is not None else await self._lead(state)

    async def _follow(self, epoch: Epoch, state: JobState) -> None:
        """Run the ranks of the newest epoch, if it goes on and has some here; end all others."""
        if self._ranks.running and self._ranks.epoch < epoch.number:
            await self._watch.end("a newer epoch has begun")
        broken = state.broken or (self._broken[1] if self._broken[0] == epoch.number else "")
        if self._ended >= epoch.number:
            return
        if broken:
            self._events.note("detected", epoch=epoch.number, step=self._watch.step, detail=broken)
            self._show(f"hetero: epoch {epoch.number} is over: {broken}")
            await self._watch.end(broken)
        elif self._ranks.epoch < epoch.number and any(each.node == self._node for each in epoch.nodes):
            uploads = None
            if self._uploads is not None:
                uploads = await self._uploads.begin(epoch, stored=state.stored)
            self._watch.start(epoch, token=self._token, uploads=uploads)
            names = ", ".join(each.node.name for each in epoch.nodes)
            self._show(f"hetero: epoch {epoch.number} on {names} from step {epoch.start.step}: {epoch.reason}")
        elif self._ranks.running and state.stop and self._stopping < epoch.number and self._watch.can_stop:
            self._stopping = epoch.number
            self._events.note("stop_requested", epoch=epoch.number, step=self._watch.step, detail=state.stop)
            self._show(f"hetero: epoch {epoch.number} ends after the step in hand: {state.stop}")
            self._ranks.terminate()
        if not self._ranks.running:
            self._ended = epoch.number
            self.news(urgent=True)

    async def _lead(self, state: JobState) -> float | None:
        """Take the lead if nobody has it; with it, make the next move."""
        assert self._node is not None
        # Who leads serves the rendezvous of the next epoch, and has to be there as long as that is.
        leaves = self._leaving is not None and state.stays_without(self._node.name)
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
            certificate = self._options.tls_certificate
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
                tls_certificate=None if certificate is None else str(certificate),
                publisher=None if self._uploads is None else self._uploads.publisher(self._membership),
                serve_store=lambda: self._ranks.serve_store(self._options.host),
                wake=self._wake.set,
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
        await self._join(self._node.port)

    def _look_at_etcd(self, state: JobState) -> None:
        """Say once that etcd is away, and that it is back.

        Raises:
            ConfigError: what is there now is another etcd, or an empty one.
        """
        trouble = self._membership.trouble
        is_away = trouble is not None
        if is_away != self._away:
            self._away = is_away
            problem = "" if trouble is None else trouble.problem
            self._events.note("etcd_away" if is_away else "etcd_back", epoch=self._ended, detail=problem)
            said = f"training goes on, but nothing can be changed: {problem}" if is_away else "etcd is back"
            self._show(f"hetero: {said}")
        if not is_away and state.token != self._token:
            raise ConfigError(
                f"etcd does not know the token of job {self._options.job} any more: its data is another's, or lost; "
                "start all agents again, with etcd's old data or under another --job"
            )

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
        if self._leaving is not None or number == signal.SIGINT:
            self._outcome = Outcome(exit_code=128 + number, reason=f"{number.name}: the node leaves at once")
            self._wake.set()
            return
        self._leave(f"its agent got {number.name}", self._options.leave_within_s)

    def _leave(self, reason: str, seconds: float | None) -> None:
        """Leave the job: the ranks finish the step in hand and commit it, if there is time."""
        if self._leaving is not None:
            return
        notice = Notice(node=self._options.name, reason=reason, seconds=seconds)
        self._note_notice(notice)
        self._start(self._insist(lambda: self._membership.put_notice(notice)))

    def _note_notice(self, notice: Notice) -> None:
        self._leaving = notice
        self._events.note("notice", epoch=self._ended, detail=notice.reason)
        self._show(f"hetero: node {self._options.name} leaves: {notice.reason}")
        if notice.seconds is not None:
            self._loop.call_later(notice.seconds, self._give_up_leaving)

    def _give_up_leaving(self) -> None:
        if self._outcome is None:
            self._outcome = Outcome(exit_code=0, reason="its time was over before the job had gone on without it")
            self._wake.set()

    async def _leave_if_due(self, state: JobState) -> None:
        """End this agent once the others do not need it any more: its copies are theirs."""
        assert self._node is not None
        if self._leaving is None:
            if (notice := state.notices.get(self._options.name)) is not None:
                self._note_notice(notice)
            return
        if self._ranks.running or (state.epoch is not None and self._ended < state.epoch.number):
            return
        if state.goes_on_without(self._node.name) or not state.stays_without(self._node.name):
            await asyncio.to_thread(self._membership.withdraw_notice, self._options.name)
            self._outcome = Outcome(exit_code=0, reason=f"node {self._options.name} has left: {self._leaving.reason}")

    async def _tell_news(self) -> None:
        """Write what ranks have said into etcd: what somebody may wait for at once, the rest now and then."""
        while True:
            await self._news.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent_news.wait(), _TELL_STEPS_EVERY_S)
            self._news.clear()
            self._urgent_news.clear()
            await self._insist(self._tell)

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
        await self._insist(lambda: self._membership.evict(node))

    async def _first_state(self) -> JobState:
        """The state of the job, once etcd answers: the agents of an array of jobs may be there before it."""
        limit_s = self._options.wait_for_etcd_s
        until_s = time.monotonic() + limit_s
        while True:
            try:
                return await asyncio.to_thread(self._membership.start)
            except MembershipStoreError as error:
                if time.monotonic() >= until_s:
                    raise
                if not self._away:
                    self._away = True
                    self._show(f"hetero: {error}; it is asked again for {limit_s:g} s (--wait-for-etcd)")
                await asyncio.sleep(_RETRY_S)

    async def _insist(self, request: Callable[[], T]) -> T:
        """Make a request of etcd, again and again while it is away."""
        while True:
            try:
                return await asyncio.to_thread(request)
            except MembershipStoreError:
                await asyncio.sleep(_RETRY_S)

    def _start(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        task.add_done_callback(lambda _: self._wake.set())
        self._tasks.add(task)

    def _wake_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _end(self) -> None:
        """End everything that was started, however far that had come."""
        self._drop_lead()
        for task in self._tasks:
            task.cancel()
        if self._uploads is not None:
            await self._uploads.end()
        await self._watch.end("the agent ends")
        self._ranks.end_store()
        if self._planning is not None:
            self._planning.close()
        await asyncio.to_thread(self._membership.close)


def run_agent(options: AgentOptions) -> int:
    """Run the agent of a node to its end; returns the exit code."""
    ignore_output_errors()

    def show(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    async def live() -> int:
        return await Agent(options, show=show).run()

    return asyncio.run(live())
