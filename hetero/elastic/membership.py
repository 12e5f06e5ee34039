"""Keeps a node in a job by a lease of etcd, and tells what all others of the job have said there.

    /hetero/JOB/token            what readers of copies show; written once, by the first agent
    /hetero/JOB/settings         JobSettings, what has to be the same everywhere
    /hetero/JOB/nodes/NAME       NodeInfo, on the lease of the node
    /hetero/JOB/leader           name and incarnation, on the lease of the node that leads
    /hetero/JOB/epoch            Epoch, written by the leader as long as it leads, in one transaction
    /hetero/JOB/broken/E         why epoch E cannot go on; the first who notices says so
    /hetero/JOB/stop/E           why epoch E is to end after the step in hand
    /hetero/JOB/reports/NAME     NodeReport, on the lease of the node
    /hetero/JOB/committed        the newest committed step that any rank reported; it outlives all nodes
    /hetero/JOB/notices/NAME     Notice
    /hetero/JOB/stored           RestorePoint, the newest step that this job has put into the object store
    /hetero/JOB/bad/COPY         a copy that its node is to delete
    /hetero/JOB/finished         Outcome

Three threads: one watches for changes, one reads all keys after each, one keeps the lease alive. While etcd is away
nothing is lost but the possibility to change something; the threads go on trying.
"""

import hashlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hetero.elastic.etcd import (
    EtcdAddress,
    EtcdConnection,
    StoredValue,
    delete_request,
    has_revision,
    has_value,
    is_absent,
    is_below,
    put_request,
)
from hetero.elastic.records import Epoch, JobSettings, NodeInfo, NodeReport, Notice, Outcome, RestorePoint
from hetero.errors import ConfigError, MembershipStoreError
from hetero.serialization import from_json, to_json

_ROOT = "/hetero"
_READ_AT_LEAST_EVERY_S = 2.0
_RETRY_S = 0.25
"""Between two tries to reach an etcd that is away."""
_NOTE_COMMITTED_EVERY_S = 1.0
"""At most; the first one is noted at once, as it is the one after which no run may begin anew."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What the store says about a job at one moment.

    leader: incarnation of the node that leads.
    epoch_revision: of the store when the epoch was written, 0 without one.
    broken, stop: reasons, of the epoch that is in ``epoch``.
    committed: the newest step that was committed, within a second; 0 for none.
    bad_copies: as ranks report them (:class:`hetero.elastic.recovery.BadCopy`), until their node has deleted them.
    stored: the newest step that the job has put into the object store.
    """

    token: str | None = None
    settings: JobSettings | None = None
    nodes: Mapping[str, NodeInfo] = field(default_factory=dict)
    leader: str | None = None
    epoch: Epoch | None = None
    epoch_revision: int = 0
    broken: str | None = None
    stop: str | None = None
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    notices: Mapping[str, Notice] = field(default_factory=dict)
    committed: int = 0
    bad_copies: frozenset[str] = frozenset()
    stored: RestorePoint | None = None
    outcome: Outcome | None = None

    def stays_without(self, name: str) -> bool:
        """Whether another node than ``name`` is there and does not leave."""
        return any(other not in self.notices for other in self.nodes if other != name)

    def goes_on_without(self, name: str) -> bool:
        """Whether the epoch has none of this node's ranks, and has what it restored on its own nodes."""
        if self.epoch is None or any(each.node.name == name for each in self.epoch.nodes):
            return False
        ranks = [rank for each in self.reports.values() for rank in each.ranks if rank.epoch == self.epoch.number]
        return self.epoch.start.step == 0 or any(rank.committed >= self.epoch.start.step for rank in ranks)


class JobStore:
    """The keys of one job: reads them, and writes those that need no lease. One thread at a time may call."""

    def __init__(self, address: EtcdAddress, job: str) -> None:
        if not job or not all(each.isalnum() or each in "-_." for each in job):
            raise ConfigError(f"job {job!r}: its name takes letters, digits, '-', '_' and '.' only; give another --job")
        self._etcd = EtcdConnection(address)
        self._prefix = f"{_ROOT}/{job}/"
        self._parsed: dict[str, tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Drop the connection."""
        self._etcd.close()

    def read(self) -> JobState:
        """Everything at one revision of the store.

        Raises:
            MembershipStoreError: etcd is away.
            ConfigError: a value was not written by this version.
        """
        with self._lock:
            found = self._etcd.read(self._prefix)
            self._parsed = {key: each for key, each in self._parsed.items() if key in found}
            epoch = self._value("epoch", Epoch, found)
            number = epoch.number if epoch is not None else 0
            return JobState(
                token=_text("token", found),
                settings=self._value("settings", JobSettings, found),
                nodes=self._values("nodes/", NodeInfo, found),
                leader=_text("leader", found),
                epoch=epoch,
                epoch_revision=found["epoch"].revision if epoch is not None else 0,
                broken=_text(f"broken/{number}", found),
                stop=_text(f"stop/{number}", found),
                reports=self._values("reports/", NodeReport, found),
                notices=self._values("notices/", Notice, found),
                committed=int(_text("committed", found) or 0),
                bad_copies=frozenset(key[len("bad/") :] for key in found if key.startswith("bad/")),
                stored=self._value("stored", RestorePoint, found),
                outcome=self._value("finished", Outcome, found),
            )

    def put_notice(self, notice: Notice) -> None:
        """Say that a node will leave."""
        self.write([], [put_request(self.key(f"notices/{notice.node}"), to_json(notice))])

    def withdraw_notice(self, node: str) -> None:
        """The node has left, or is back."""
        self.write([], [delete_request(self.key(f"notices/{node}"))])

    def break_epoch(self, number: int, reason: str) -> None:
        """Say that an epoch cannot go on; the first reason stays."""
        key = self.key(f"broken/{number}")
        self.write([is_absent(key)], [put_request(key, reason)])

    def key(self, name: str) -> str:
        """The whole name of a key of this job."""
        return f"{self._prefix}{name}"

    def write(self, conditions: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]) -> bool:
        """One transaction; whether the conditions held."""
        with self._lock:
            return self._etcd.transaction(conditions=conditions, then=then)

    def _value(self, key: str, kind: type[T], found: Mapping[str, StoredValue]) -> T | None:
        if key not in found:
            return None
        revision = found[key].revision
        if self._parsed.get(key, (0,))[0] != revision:
            self._parsed[key] = (revision, from_json(kind, found[key].text, source=f"etcd {self._prefix}{key}"))
        value: T = self._parsed[key][1]
        return value

    def _values(self, prefix: str, kind: type[T], found: Mapping[str, StoredValue]) -> dict[str, T]:
        values = {key[len(prefix) :]: self._value(key, kind, found) for key in sorted(found) if key.startswith(prefix)}
        return {name: value for name, value in values.items() if value is not None}


class Membership:
    """This node's place in a job.

    Attributes:
        state: the newest that was read.
        away_since: when etcd stopped answering, by ``time.monotonic``; ``None`` while it answers.
        problem: why the store cannot be read, for people.
        evicted: the lease is over, or another has taken the place of this node.
    """

    def __init__(self, address: EtcdAddress, job: str, *, lease_s: int, on_change: Callable[[], None]) -> None:
        self.state = JobState()
        self.away_since: float | None = None
        self.problem = ""
        self.evicted = False
        self._address = address
        self._lease_s = lease_s
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
            threading.Thread(target=run, name=f"etcd-{name}", daemon=True)
            for name, run in (("watch", self._watch), ("read", self._read), ("lease", self._stay))
        ]

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
        self._writer.write([is_absent(key)], [put_request(key, secrets.token_hex(32))])
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
        if self._writer.write([is_absent(key)], [put_request(key, text)]):
            return
        state = self._writer.read()
        if state.settings is None or (state.epoch is None and not state.nodes):
            self._writer.write([], [put_request(key, text)])
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
            lease = self._leases.grant(self._lease_s)
        key = self._writer.key(f"nodes/{node.name}")
        seen = self.state.nodes.get(node.name)
        condition = is_absent(key) if seen is None else has_value(key, to_json(seen))
        if not self._writer.write([condition], [put_request(key, to_json(node), lease=lease)]):
            self.state = self._writer.read()
            return False
        self._node, self._lease, self.evicted = node, lease, False
        self._changed.set()
        return True

    def lead(self) -> bool:
        """Become the leader if nobody is."""
        node, lease = self._joined()
        key = self._writer.key("leader")
        return self._writer.write([is_absent(key)], [put_request(key, node.incarnation, lease=lease)])

    def resign(self) -> None:
        """Give up the lead, if this node has it."""
        node, _ = self._joined()
        key = self._writer.key("leader")
        self._writer.write([has_value(key, node.incarnation)], [delete_request(key)])

    def make_epoch(self, epoch: Epoch, *, after_revision: int) -> bool:
        """Make ``epoch`` true for all, if this node still leads and the last epoch is the one that it knew."""
        node, _ = self._joined()
        key = self._writer.key
        return self._writer.write(
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
        self._writer.break_epoch(number, reason)

    def evict(self, node: NodeInfo) -> None:
        """Take a node's place away, and the lead; one that has come back in the meantime stays.

        The leader may, and anybody whose connection the node's host has refused: its agent is dead.
        """
        key = self._writer.key
        self._writer.write(
            [has_value(key(f"nodes/{node.name}"), to_json(node))],
            [delete_request(key(f"nodes/{node.name}")), delete_request(key(f"reports/{node.name}"))],
        )
        self._writer.write([has_value(key("leader"), node.incarnation)], [delete_request(key("leader"))])

    def report(self, report: NodeReport) -> None:
        """Tell the others what this node's ranks have said, and note what they have committed where it stays."""
        node, lease = self._joined()
        self._writer.write([], [put_request(self._writer.key(f"reports/{node.name}"), to_json(report), lease=lease)])
        self._note_committed(max((rank.committed for rank in report.ranks), default=0))

    def _note_committed(self, step: int) -> None:
        """Never to a smaller step, whoever else notes one."""
        if step <= max(self.state.committed, self._noted) or time.monotonic() < self._noted_s + _NOTE_COMMITTED_EVERY_S:
            return
        # As many digits always, so that the order of texts is that of numbers.
        key, text = self._writer.key("committed"), f"{step:020d}"
        if not self._writer.write([is_absent(key)], [put_request(key, text)]):
            self._writer.write([is_below(key, text)], [put_request(key, text)])
        self._noted, self._noted_s = step, time.monotonic()

    def put_notice(self, notice: Notice) -> None:
        """Say that a node will leave."""
        self._writer.put_notice(notice)

    def withdraw_notice(self, node: str) -> None:
        """The node has left, or is back."""
        self._writer.withdraw_notice(node)

    def report_bad_copy(self, copy: str) -> None:
        """Have the node of a copy delete it."""
        self._writer.write([], [put_request(self._writer.key(f"bad/{copy}"), "bad")])

    def forget_bad_copy(self, copy: str) -> None:
        """It is deleted."""
        self._writer.write([], [delete_request(self._writer.key(f"bad/{copy}"))])

    def report_stored(self, stored: RestorePoint) -> None:
        """As the leader, say that a step is in the object store."""
        self._write_as_leader([put_request(self._writer.key("stored"), to_json(stored))])

    def finish(self, outcome: Outcome) -> None:
        """As the leader, end the job."""
        self._write_as_leader([put_request(self._writer.key("finished"), to_json(outcome))])

    def _write_as_leader(self, then: Sequence[Mapping[str, Any]]) -> None:
        node, _ = self._joined()
        self._writer.write([has_value(self._writer.key("leader"), node.incarnation)], then)

    def _joined(self) -> tuple[NodeInfo, int]:
        assert self._node is not None, "join first"
        assert self._lease is not None, "join first"
        return self._node, self._lease

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
            self._changed.wait(_RETRY_S if self.away_since is not None else _READ_AT_LEAST_EVERY_S)
            self._changed.clear()
            if self._closed.is_set():
                return
            # Before the read: what it finds may be from before a place was taken.
            node = self._node
            try:
                state = self._reader.read()
                self.away_since, self.problem = None, ""
            except (MembershipStoreError, ConfigError) as error:
                self.away_since, self.problem = self.away_since or time.monotonic(), str(error)
                state = self.state
            if node is not None and node is self._node and self.away_since is None:
                self.evicted = state.nodes.get(node.name) != node
            self.state = state
            self._on_change()

    def _stay(self) -> None:
        """Keep the lease alive. While etcd is away a lease may end or not: etcd says so when it is back."""
        while not self._closed.wait(self._lease_s / 4):
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


def _text(key: str, found: Mapping[str, StoredValue]) -> str | None:
    return found[key].text if key in found else None


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
