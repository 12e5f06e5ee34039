"""Takes a node's place in its job: waits for etcd, agrees on settings, has an ended job go on, and joins."""

import asyncio
import functools
import time
from collections.abc import Callable

from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.ends import End, EndError, forget_command
from hetero.elastic.etcd_patience import EtcdPatience
from hetero.elastic.events import EventLog
from hetero.elastic.folder_claim import owner_of_copies
from hetero.elastic.job_settings import check_settings, settings_differences
from hetero.elastic.job_store import JobState, token_mark
from hetero.elastic.membership import Membership
from hetero.elastic.node_probe import ProbeAnswer, probe
from hetero.elastic.records import NodeInfo, Outcome
from hetero.errors import ConfigError

_RETRY_S = 0.3

_OTHERS_END_WITHIN_S = 60.0
"""After which nodes that have to go count as stuck, on top of the lease: of a job that has ended, or with the name of
this one."""


class JobEntry:
    """The way of one node into its job, and back after it was evicted."""

    def __init__(
        self,
        options: AgentOptions,
        membership: Membership,
        patience: EtcdPatience,
        *,
        events: EventLog,
        show: Callable[[str], None],
    ) -> None:
        self._options = options
        self._membership = membership
        self._patience = patience
        self._events = events
        self._show = show
        self._token = ""
        self._has_said = False
        self._unreadable: set[str] = set()

    async def claim_token(self) -> str:
        """Find the job, or begin it, once etcd answers; returns the job's token.

        A job that ended before its last step is begun again, from its last checkpoint.

        Raises:
            EndError: the job has finished.
            ConfigError: it has other settings, or keys that cannot be read; or nodes of the ended job do not go.
            MembershipStoreError: the wait for etcd is over.
        """
        # Agents may be started before their etcd.
        state = await self._patience.insist(self._membership.start)
        until_s = self._others_end_by_s()
        while (outcome := state.outcome) is not None and outcome.exit_code == 0:
            self._check_resumes(state, outcome)
            forget = functools.partial(self._membership.forget, state)
            if self._has_no_node(state, outcome, until_s) and await self._patience.insist(forget):
                self._show(
                    f"hetero: job {self._options.job} had ended ({outcome.reason}); it begins again, from the newest "
                    "checkpoint"
                )
            await asyncio.sleep(_RETRY_S)
            state = self._membership.state
        if state.outcome is None:
            await self._agree()
        self._token = await self._patience.insist(self._membership.claim_token)
        return self._token

    def check_copies(self, owner: str) -> None:
        """Refuse to delete copies of another job, unless ``hetero elastic forget`` has freed those of this name.

        Raises:
            ConfigError: the folder of this node has copies of a job of another name, or of one that etcd does not know.
        """
        options = self._options
        before = owner_of_copies(options.folder)
        if before in (None, owner):
            return
        job, _, mark = before.rpartition(" ")
        if job != options.job:
            raise ConfigError(
                f"{options.folder}: has copies of {f'job {job}' if job else 'a job that its job.json does not name'}; "
                "go on with that job, name another folder (--copies), or delete this one to give its copies up"
            )
        if mark not in self._membership.state.forgotten:
            raise ConfigError(
                f"{options.folder}: has copies of an earlier job {options.job}, of which etcd at "
                f"{', '.join(options.etcd.urls)} knows nothing; start etcd with the data of that job to go on from "
                "them, or delete the folder to begin without them"
            )

    async def enter(self) -> None:
        """See that the job has this agent's settings when it joins; one that has ended with an error goes on.

        Raises:
            EndError: the job has finished.
            ConfigError: others have opened it again with other settings, or nodes of the ended job do not go.
            MembershipStoreError: the wait for etcd is over.
        """
        until_s = self._others_end_by_s()
        while (outcome := (state := self._membership.state).outcome) is not None:
            if outcome.exit_code == 0:
                self.check_begins_again(state)
                raise self._is_over(outcome)
            if self._has_no_node(state, outcome, until_s):
                settings, revision = self._options.settings, state.outcome_revision
                reopen = functools.partial(self._membership.reopen, revision, settings)
                if await self._patience.insist(reopen):
                    self._show(
                        f"hetero: job {self._options.job} had ended ({outcome.reason}); it goes on with the program, "
                        "flags and versions of this agent"
                    )
            await asyncio.sleep(_RETRY_S)
        self._check_not_forgotten(state)
        await self._agree()

    def check_begins_again(self, state: JobState) -> None:
        """See whether the job ends for the nodes that leave alone, and goes on with this one, which does not.

        Raises:
            EndError: it does: this agent has to start once more.
        """
        outcome = state.outcome
        if outcome is None or not (outcome.resumes and state.is_stop_for_good):
            return
        if state.settings == self._options.settings:
            reason = f"job {self._options.job} has ended for the nodes that were in it ({outcome.reason})"
            raise EndError(End.JOB_BEGINS_AGAIN, f"{reason}; this node stays, and begins it again")

    async def join(self, node: NodeInfo) -> None:
        """Take the place of ``node.name`` once an earlier agent of it is gone.

        Raises:
            ConfigError: another agent has the place, and is alive; or its host is silent, and its lease does not end.
            MembershipStoreError: the wait for etcd is over.
        """
        name = node.name
        until_s = time.monotonic() + self._options.lease_s + _OTHERS_END_WITHIN_S
        while True:
            if self._membership.state.outcome is not None:
                # The job has ended meanwhile, as the agent is about to see.
                return
            before = self._membership.state.nodes.get(name)
            is_free = before is None or (before.host, before.port) == (node.host, node.port)
            if before is not None and not is_free:
                answer = await probe(before)
                if answer is ProbeAnswer.CONNECTED:
                    raise ConfigError(
                        f"node {name} is in job {self._options.job} already, at {before.host}:{before.port}; give "
                        "each agent another --node-name"
                    )
                if answer is ProbeAnswer.SILENT and time.monotonic() >= until_s:
                    raise ConfigError(
                        f"node {name} is in job {self._options.job} already, at {before.host}:{before.port}, which "
                        "cannot be reached from here, but keeps its place; end that agent, or give this one another "
                        "--node-name"
                    )
                is_free = answer is ProbeAnswer.REFUSED
            if is_free and await self._patience.insist(functools.partial(self._membership.join, node)):
                break
            await asyncio.sleep(_RETRY_S)
        if (granted_s := self._membership.lease_s) != self._options.lease_s:
            self._show(
                f"hetero: etcd keeps a silent node for {granted_s} s, not for {self._options.lease_s} s (--lease): it "
                "grants no lease shorter than its election timeout allows"
            )

    def check_job(self, state: JobState) -> None:
        """See that this is still the job that was joined, and name the keys that cannot be read, each once.

        Raises:
            EndError: etcd has lost the data of the job, or has older ones.
            ConfigError: agents with other settings have opened the job again.
            MembershipStoreError: the wait for etcd is over.
        """
        self._patience.check(epoch=0 if state.epoch is None else state.epoch.number)
        if state.token != self._token and "token" not in state.unreadable:
            self._check_not_forgotten(state)
            raise EndError(
                End.TOKEN_LOST,
                f"etcd does not know the token of job {self._options.job} any more: its data is another's, or lost; "
                "start all agents again, with etcd's old data or under another --job",
            )
        check_settings(state.settings, self._options.settings)
        for key in sorted(state.unreadable.keys() - self._unreadable):
            self._events.note("unreadable_key", detail=state.unreadable[key])
            self._show(f"hetero: {state.unreadable[key]}; the rest of the job goes on")
        self._unreadable = set(state.unreadable)

    async def _agree(self) -> None:
        settings = self._options.settings
        await self._patience.insist(lambda: self._membership.agree_on_settings(settings))

    def _check_not_forgotten(self, state: JobState) -> None:
        """See that etcd still has the job whose token was claimed.

        Raises:
            EndError: it was forgotten, maybe for another of its name: this agent has to start once more.
        """
        if token_mark(self._token) in state.forgotten:
            reason = f"etcd has forgotten the job {self._options.job} that this node was in, or came to"
            raise EndError(End.JOB_BEGINS_AGAIN, f"{reason}; it starts again")

    def _others_end_by_s(self) -> float:
        return time.monotonic() + self._options.lease_s + _OTHERS_END_WITHIN_S

    def _has_no_node(self, state: JobState, outcome: Outcome, until_s: float) -> bool:
        """Whether no node of an ended job is left, whose agents have to see its end first.

        Raises:
            ConfigError: some are, and the time is over.
            MembershipStoreError: the wait for etcd is over.
        """
        self._patience.check()
        if state.nodes and time.monotonic() >= until_s:
            raise ConfigError(
                f"job {self._options.job} has ended ({outcome.reason}), but its nodes {', '.join(state.nodes)} are "
                "still there; end their agents, then start this one again"
            )
        if state.nodes and not self._has_said:
            self._has_said = True
            self._show(
                f"hetero: job {self._options.job} has ended ({outcome.reason}); it goes on once its nodes "
                f"{', '.join(state.nodes)} are gone"
            )
        return not state.nodes

    def _check_resumes(self, state: JobState, outcome: Outcome) -> None:
        """See whether a job that has ended with 0 goes on from its last checkpoint with this agent.

        Raises:
            EndError: it does not.
        """
        if not outcome.resumes:
            raise self._is_over(outcome)
        if state.settings is not None and (said := settings_differences(state.settings, self._options.settings)):
            raise self._is_over(outcome, f", but not with other settings ({'; '.join(said)})")

    def _is_over(self, outcome: Outcome, but: str = "") -> EndError:
        options = self._options
        return EndError(
            End.JOB_IS_OVER,
            f"job {options.job} is over already: {outcome.reason}{but}; give another --job, or delete what etcd has of "
            f"this one and start again: {forget_command(options.etcd, options.job)}",
        )
