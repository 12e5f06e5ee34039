"""Keeps a node in a job by a lease of etcd, and follows what all others of the job have written there.

Three threads: one watches for changes, one reads all keys after each, one keeps the lease alive. While etcd is away
nothing is lost but the possibility to change something; the threads go on trying.
"""

import hashlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.elastic.etcd import (
    EtcdAddress,
    EtcdConnection,
    delete_request,
    has_revision,
    has_value,
    is_absent,
    is_below,
    put_request,
)
from hetero.elastic.job_store import STEP_DIGITS, JobState, JobStore
from hetero.elastic.records import Epoch, JobSettings, NodeInfo, NodeReport, Notice, Outcome, RestorePoint
from hetero.errors import ConfigError, MembershipStoreError
from hetero.serialization import to_json

_READ_AT_LEAST_EVERY_S = 2.0
_RETRY_S = 0.25
"""Between two tries to reach an etcd that is away."""
_NOTE_COMMITTED_EVERY_S = 1.0
"""At most; the first one is noted at once, as it is the one after which no run may begin anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """What keeps this node from reading or changing anything in etcd.

    since_s: when it began, by ``time.monotonic``.
    problem: for people, with etcd's own words.
    takes_no_writes: etcd answers reads; only changes fail.
    """

    since_s: float
    problem: str
    takes_no_writes: bool


class Membership:
    """This node's place in a job.

    Attributes:
        state: the newest that was read.
        trouble: with reading or writing, ``None`` as long as there is none.
        evicted: the lease is over, or another has taken the place of this node.
        lease_s: what etcd has granted; what was asked for as long as it has granted nothing.
        failure: what ended one of the threads. This node is blind then, or its lease is not kept.
        went_back: how one sees that etcd has lost what it had, for people; stays once it is set.
    """

    def __init__(self, address: EtcdAddress, job: str, *, lease_s: int, on_change: Callable[[], None]) -> None:
        self.state = JobState()
        self.evicted = False
        self.lease_s = lease_s
        self.failure: BaseException | None = None
        self.went_back: str | None = None
        self._troubles: dict[str, Trouble] = {}
        self._address = address
        self._asked_lease_s = lease_s
        self._on_change = on_change
        self._reader = JobStore(address, job)
        self._writer = JobStore(address, job)
        self._leases = EtcdConnection(address)
        self._leases_lock = threading.Lock()
        self._lease: int | None = None
        self._node: NodeInfo | None = None
        self._noted, self._noted_s = 0, -math.inf
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=f"etcd-{name}", daemon=True)
            for name, run in (("watch", self._watch), ("read", self._read), ("lease", self._stay))
        ]

    @property
    def trouble(self) -> Trouble | None:
        """The earliest trouble that is not over."""
        return min(self._troubles.copy().values(), key=lambda trouble: trouble.since_s, default=None)

    def start(self) -> JobState:
        """Read the job's keys, and go on doing so whenever they change.

        Raises:
            MembershipStoreError: etcd does not answer.
        """
        self.state = self._reader.read()
        for thread in self._threads:
            thread.start()
        return self.state

    def close(self) -> None:
        """Leave the job, if etcd answers, and end the threads."""
        self._closed.set()
        self._changed.set()
        if self._lease is not None:
            try:
                with self._leases_lock:
                    self._leases.revoke(self._lease)
            except MembershipStoreError:
                # It ends by itself.
                pass
        for store in (self._reader, self._writer, self._leases):
            store.close()

    def claim_token(self) -> str:
        """The token of the job, drawn here if there is none yet."""
        key = self._writer.key("token")
        self._write([is_absent(key)], [put_request(key, secrets.token_hex(32))])
        token = self._writer.read().token
        assert token is not None
        return token

    def agree_on_settings(self, settings: JobSettings) -> None:
        """Make these the settings of the job, or check that they are.

        What is left of a job of which no node is there and that has not begun gives way.

        Raises:
            ConfigError: the job has others; names what differs.
        """
        key, text = self._writer.key("settings"), to_json(settings)
        if self._write([is_absent(key)], [put_request(key, text)]):
            return
        state = self._writer.read()
        if state.settings is None or (state.epoch is None and not state.nodes):
            self._write([], [put_request(key, text)])
        elif state.settings != settings:
            differences = "; ".join(_differences(state.settings, settings))
            raise ConfigError(
                f"this agent does not fit to its job: {differences}. Start all agents with the same program, flags and "
                "versions, or this one with another --job"
            )

    def join(self, node: NodeInfo) -> bool:
        """Take the place of ``node.name``; whether it was free, or held by the incarnation that was last seen.

        Raises:
            MembershipStoreError: etcd does not answer.
        """
        with self._leases_lock:
            if (old := self._lease) is not None:
                self._node = self._lease = None
                self._leases.revoke(old)
            granted = self._leases.grant(self._asked_lease_s)
        lease, self.lease_s = granted.number, granted.seconds
        key = self._writer.key(f"nodes/{node.name}")
        seen = self.state.nodes.get(node.name)
        condition = is_absent(key) if seen is None else has_value(key, to_json(seen))
        if not self._write([condition], [put_request(key, to_json(node), lease=lease)]):
            self.state = self._writer.read()
            return False
        self._node, self._lease, self.evicted = node, lease, False
        self._changed.set()
        return True

    def reopen(self, outcome_revision: int, settings: JobSettings) -> bool:
        """Have a job go on that has ended, with these settings; whether the outcome was still that of the revision."""
        key = self._writer.key
        return self._write(
            [has_revision(key("finished"), outcome_revision)],
            [delete_request(key("finished")), put_request(key("settings"), to_json(settings))],
        )

    def lead(self) -> bool:
        """Become the leader if no node that is there is; whether this node is now."""
        node, lease = self._joined()
        state, key = self.state, self._writer.key("leader")
        if state.leader is not None:
            return False
        unchanged = has_revision(key, state.revisions.get("leader", 0))
        return self._write([unchanged], [put_request(key, node.incarnation, lease=lease)])

    def resign(self) -> None:
        """Give up the lead, if this node has it."""
        node, _ = self._joined()
        key = self._writer.key("leader")
        self._write([has_value(key, node.incarnation)], [delete_request(key)])

    def make_epoch(self, epoch: Epoch, *, after_revision: int) -> bool:
        """Make ``epoch`` true for all, if this node still leads and the last epoch is the one that it knew."""
        node, _ = self._joined()
        key = self._writer.key
        return self._write(
            [has_value(key("leader"), node.incarnation), has_revision(key("epoch"), after_revision)],
            [
                put_request(key("epoch"), to_json(epoch)),
                delete_request(key("broken/"), prefix=True),
                delete_request(key("stop/"), prefix=True),
            ],
        )

    def request_stop(self, number: int, reason: str) -> None:
        """As the leader, have all ranks end after the step in hand."""
        self._write_as_leader([put_request(self._writer.key(f"stop/{number}"), reason)])

    def break_epoch(self, number: int, reason: str) -> None:
        """Say that an epoch cannot go on; the first reason stays."""
        key = self._writer.key(f"broken/{number}")
        self._write([is_absent(key)], [put_request(key, reason)])

    def evict(self, node: NodeInfo) -> None:
        """Take a node's place away, and the lead; one that has come back in the meantime stays.

        The leader may, and anybody whose connection the node's host has refused: its agent is dead.
        """
        key = self._writer.key
        self._write(
            [has_value(key(f"nodes/{node.name}"), to_json(node))],
            [delete_request(key(f"nodes/{node.name}")), delete_request(key(f"reports/{node.name}"))],
        )
        self._write([has_value(key("leader"), node.incarnation)], [delete_request(key("leader"))])

    def report(self, report: NodeReport) -> None:
        """Tell the others what this node's ranks have said, and note what they have committed where it stays."""
        node, lease = self._joined()
        self._write([], [put_request(self._writer.key(f"reports/{node.name}"), to_json(report), lease=lease)])
        self._note_committed(max((rank.committed for rank in report.ranks), default=0))

    def _note_committed(self, step: int) -> None:
        """Never to a smaller step, whoever else notes one."""
        if step <= max(self.state.committed, self._noted) or time.monotonic() < self._noted_s + _NOTE_COMMITTED_EVERY_S:
            return
        key, text = self._writer.key("committed"), f"{step:0{STEP_DIGITS}d}"
        if not self._write([is_absent(key)], [put_request(key, text)]):
            self._write([is_below(key, text)], [put_request(key, text)])
        self._noted, self._noted_s = step, time.monotonic()

    def put_notice(self, notice: Notice) -> None:
        """Say that a node will leave."""
        self._write([], [put_request(self._writer.key(f"notices/{notice.node}"), to_json(notice))])

    def withdraw_notice(self, node: str) -> None:
        """The node has left, or is back."""
        self._write([], [delete_request(self._writer.key(f"notices/{node}"))])

    def report_bad_copy(self, copy: str) -> None:
        """Have the node of a copy delete it."""
        self._write([], [put_request(self._writer.key(f"bad/{copy}"), "bad")])

    def forget_bad_copy(self, copy: str) -> None:
        """It is deleted."""
        self._write([], [delete_request(self._writer.key(f"bad/{copy}"))])

    def report_stored(self, stored: RestorePoint) -> None:
        """As the leader, say that a step is in the object store."""
        self._write_as_leader([put_request(self._writer.key("stored"), to_json(stored))])

    def finish(self, outcome: Outcome) -> None:
        """As the leader, end the job."""
        self._write_as_leader([put_request(self._writer.key("finished"), to_json(outcome))])

    def _write_as_leader(self, then: Sequence[Mapping[str, Any]]) -> None:
        node, _ = self._joined()
        self._write([has_value(self._writer.key("leader"), node.incarnation)], then)

    def _write(self, conditions: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]) -> bool:
        """Make a transaction; whether the conditions held."""
        try:
            result = self._writer.write(conditions, then)
        except MembershipStoreError as error:
            self._note_trouble("writes", error)
            raise
        self._troubles.pop("writes", None)
        return result.succeeded

    def _note_trouble(self, kind: str, error: MembershipStoreError) -> None:
        since_s = self._troubles[kind].since_s if kind in self._troubles else time.monotonic()
        self._troubles[kind] = Trouble(since_s=since_s, problem=str(error), takes_no_writes=kind == "writes")

    def _joined(self) -> tuple[NodeInfo, int]:
        assert self._node is not None, "join first"
        assert self._lease is not None, "join first"
        return self._node, self._lease

    def _run(self, thread: Callable[[], None]) -> None:
        """Run a thread; whatever ends it before it is to end, ends the agent."""
        try:
            thread()
        except BaseException as error:  # noqa: BLE001  # the agent raises it
            self.failure = error
            self._on_change()

    def _watch(self) -> None:
        etcd = EtcdConnection(self._address)
        while not self._closed.is_set():
            try:
                for _ in etcd.changes(self._reader.key("")):
                    self._changed.set()
                    if self._closed.is_set():
                        break
            except MembershipStoreError:
                self._closed.wait(_RETRY_S)
        etcd.close()

    def _read(self) -> None:
        while not self._closed.is_set():
            self._changed.wait(_RETRY_S if "reads" in self._troubles else _READ_AT_LEAST_EVERY_S)
            self._changed.clear()
            if self._closed.is_set():
                return
            # Before the read: what it finds may be from before a place was taken.
            node = self._node
            known = self.state
            try:
                state = self._reader.read()
            except MembershipStoreError as error:
                self._note_trouble("reads", error)
            else:
                self._troubles.pop("reads", None)
                if state.revision < known.revision:
                    self.went_back = f"its revision is {state.revision} and was {known.revision}"
                if node is not None and node is self._node:
                    self.evicted = state.nodes.get(node.name) != node
                self.state = state
            self._on_change()

    def _stay(self) -> None:
        """Keep the lease alive. While etcd is away a lease may end or not: etcd says so when it is back."""
        while not self._closed.wait(self.lease_s / 4):
            lease = self._lease
            if lease is None:
                continue
            try:
                with self._leases_lock:
                    alive = self._leases.keep_alive(lease)
            except MembershipStoreError:
                continue
            if not alive and lease == self._lease:
                self.evicted = True
                self._on_change()


def settings_checksum(settings: JobSettings) -> str:
    """Short text that differs wherever the settings do, for :class:`~hetero.elastic.records.NodeInfo`."""
    return hashlib.sha256(to_json(settings).encode()).hexdigest()[:16]


def _differences(there: JobSettings, here: JobSettings) -> list[str]:
    """What differs, in words."""
    said = []
    if there.program != here.program:
        said.append(f"the program is {here.program} here and {there.program} in the job")
    if there.flags != here.flags:
        only_here = [each for each in here.flags if each not in there.flags]
        only_there = [each for each in there.flags if each not in here.flags]
        if only_here or only_there:
            said.append(
                f"flags: here {' '.join(only_here) or 'nothing'}, in the job {' '.join(only_there) or 'nothing'}"
            )
        else:
            said.append("the flags come in another order")
    for flag, mine, theirs in (
        ("--object-store", here.object_store, there.object_store),
        ("--upload-every", here.upload_every, there.upload_every),
    ):
        if mine != theirs:
            said.append(f"{flag} is {mine or 'not given'} here and {theirs or 'not given'} in the job")
    for name in sorted({*there.versions, *here.versions}):
        mine, theirs = here.versions.get(name, "missing"), there.versions.get(name, "missing")
        if mine != theirs:
            said.append(f"{name} is {mine} here and {theirs} in the job")
    return said
