"""Keeps a node in a job by a lease of etcd, and follows what all others of the job have written there.

Four threads: one watches for changes, one reads all keys after each, one keeps the lease alive, one tries whether etcd
takes writes again when it did not. While etcd is away nothing is lost but the possibility to change something; the
threads go on trying.
"""

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero.elastic.etcd import (
    EtcdAddress,
    EtcdConnection,
    MemberOrder,
    delete_request,
    has_revision,
    has_value,
    is_absent,
    is_below,
    put_request,
)
from hetero.elastic.job_settings import check_settings
from hetero.elastic.job_store import STEP_DIGITS, JobState, JobStore
from hetero.elastic.records import Epoch, JobSettings, NodeInfo, NodeReport, Notice, Outcome, RestorePoint
from hetero.elastic.store_health import LeasePace, Pauses, StoreHealth, Trouble
from hetero.errors import ConfigError, MembershipStoreError
from hetero.serialization import to_compact_json, to_json

_READ_AT_LEAST_EVERY_S = 3.0
_LASTING_WATCH_S = 5.0
"""A watch that ends sooner is taken for one that does not work: pauses between the next ones grow."""
_NOTE_COMMITTED_EVERY_S = 1.0
"""At most; the first one is noted at once, as it is the one after which no run may begin anew."""


class Membership:
    """This node's place in a job.

    Attributes:
        state: the newest that was read.
        evicted: the lease is over, or another has taken the place of this node.
        lease_s: what etcd has granted; what was asked for as long as it has granted nothing.
        failure: what ended one of the threads: this node is blind then, or its lease is not kept.
    """

    def __init__(self, address: EtcdAddress, job: str, *, lease_s: int, on_change: Callable[[], None]) -> None:
        self.state = JobState()
        self.evicted = False
        self.lease_s = lease_s
        self.failure: BaseException | None = None
        self._health = StoreHealth(f"etcd at {', '.join(address.urls)}")
        self._asked_lease_s = lease_s
        self._on_change = on_change
        order = MemberOrder(address)
        self._reader = JobStore(address, job, order=order)
        self._writer = JobStore(address, job, order=order)
        self._watcher = EtcdConnection(address, order=order)
        self._leases = EtcdConnection(address, order=order)
        self._leases_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._lease: int | None = None
        self._node: NodeInfo | None = None
        self._report: NodeReport | None = None
        self._noted, self._noted_s = 0, -math.inf
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._read_pauses = Pauses()
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=f"etcd-{name}", daemon=True)
            for name, run in (
                ("watch", self._watch),
                ("read", self._read),
                ("lease", self._stay),
                ("write-check", self._try_writes),
            )
        ]

    @property
    def trouble(self) -> Trouble | None:
        """What keeps this node from reading or writing; ``None`` if nothing does."""
        return self._health.trouble

    @property
    def went_back(self) -> str | None:
        """How one sees that etcd has lost what it had, for people; ``None`` if it has not. Stays once it is set."""
        return self._health.went_back

    def start(self) -> JobState:
        """Read the job's keys, and go on doing so whenever they change.

        Raises:
            MembershipStoreError: etcd does not answer. The next call pauses before it asks again.
            ConfigError: a key cannot be read without which this node cannot join.
        """
        if self.trouble is not None:
            self._closed.wait(self._read_pauses.seconds)
        self._read_once()
        for key in ("token", "epoch", "finished"):
            _check_readable(self.state, key)
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        return self.state

    def close(self) -> None:
        """Leave the job, if etcd answers, and end the threads."""
        self._closed.set()
        with self._leases_lock, contextlib.suppress(MembershipStoreError):
            # If etcd is away, it ends by itself.
            self._leave()
        self._watcher.interrupt()
        for event in (self._changed, self._health.answers_reads, self._health.fails_writes):
            event.set()
        for store in (self._reader, self._writer, self._leases, self._watcher):
            store.close()

    def claim_token(self) -> str:
        """The token of the job, drawn here if there is none yet."""
        key = self._writer.key("token")
        self._write([is_absent(key)], [put_request(key, secrets.token_hex(32))])
        state = self._read_once()
        _check_readable(state, "token")
        if state.token is None:
            raise MembershipStoreError(f"etcd lost {key} as soon as it was written; the job's keys are being deleted")
        return state.token

    def agree_on_settings(self, settings: JobSettings) -> None:
        """Make these the settings of the job, or check that they are.

        Settings under which no epoch has begun, of a job of which no node is there, give way.

        Raises:
            ConfigError: the job has others, and this names what differs; or those of the job cannot be read.
        """
        key, text = self._writer.key("settings"), to_json(settings)
        if self._write([is_absent(key)], [put_request(key, text)]):
            return
        state = self._read_once()
        revision = state.revisions.get("settings", 0)
        if state.settings != settings and state.epoch_revision < revision and not state.nodes:
            if self._write([has_revision(key, revision)], [put_request(key, text)]):
                return
            state = self._read_once()
        _check_readable(state, "settings")
        check_settings(state.settings, settings)

    def join(self, node: NodeInfo) -> bool:
        """Take the place of ``node.name``; whether it was as it was last seen: free, or held by another incarnation.

        Raises:
            MembershipStoreError: etcd does not answer, or takes no writes.
        """
        key = f"nodes/{node.name}"
        unchanged = has_revision(self._writer.key(key), self.state.revisions.get(key, 0))
        with self._leases_lock:
            with self._health.writing():
                self._leave()
                granted = self._leases.grant(self._asked_lease_s)
            self.lease_s = granted.seconds
            then = [put_request(self._writer.key(key), to_json(node), lease=granted.number)]
            if self._closed.is_set() or not self._write([unchanged], then):
                self._leases.revoke(granted.number)
                self._read_once()
                return False
            self._node, self._lease, self.evicted = node, granted.number, False
        self._changed.set()
        return True

    def _leave(self) -> None:
        """Give up the lease, and all keys that hang on it."""
        lease, self._node, self._lease, self._report = self._lease, None, None, None
        if lease is not None:
            self._leases.revoke(lease)

    def reopen(self, outcome_revision: int, settings: JobSettings) -> bool:
        """Have a job go on that has ended, with these settings; whether the outcome was still that of the revision."""
        key = self._writer.key
        return self._write(
            [has_revision(key("finished"), outcome_revision)],
            [delete_request(key("finished")), put_request(key("settings"), to_json(settings))],
        )

    def forget(self, ended: JobState) -> bool:
        """Delete all keys of a job that has ended, as this state says; whether it still had, and without a node."""
        writer = self._writer
        is_end = has_revision(writer.key("finished"), ended.outcome_revision)
        return self._write([is_end, writer.has_no_node()], writer.forgetting(ended))

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

    def make_epoch(self, epoch: Epoch, *, after_revision: int, committed: int = 0) -> bool:
        """Make ``epoch`` true for all, if this node still leads and the last epoch is the one that it knew.

        Args:
            committed: a step that was committed, of which the store does not know; 0 for none.
        """
        node, _ = self._joined()
        key = self._writer.key
        note = [put_request(key("committed"), f"{committed:020d}")] if committed else []
        return self._write(
            [has_value(key("leader"), node.incarnation), has_revision(key("epoch"), after_revision)],
            [
                put_request(key("epoch"), to_json(epoch)),
                *note,
                delete_request(key("broken/"), prefix=True),
                delete_request(key("stop/"), prefix=True),
            ],
        )

    def request_stop(self, number: int, reason: str, *, is_for_good: bool = False) -> None:
        """As the leader, have all ranks end after the step in hand."""
        wanted = {f"stop/{number}": reason, **({f"stop/{number}/for_good": "yes"} if is_for_good else {})}
        self._write_as_leader([put_request(self._writer.key(key), text) for key, text in wanted.items()])

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
        self._report = report
        # The value that is written most often: it makes most of what an etcd without compaction grows by.
        text = to_compact_json(report).decode()
        self._write([], [put_request(self._writer.key(f"reports/{node.name}"), text, lease=lease)])
        self._note_committed(max((rank.committed for rank in report.ranks), default=0))

    def _note_committed(self, step: int) -> None:
        """Note a step that is committed, never a smaller one than another node has noted."""
        state = self.state
        if step <= max(state.committed, self._noted) or time.monotonic() < self._noted_s + _NOTE_COMMITTED_EVERY_S:
            return
        key, text = self._writer.key("committed"), f"{step:0{STEP_DIGITS}d}"
        may_replace = is_below(key, text)
        if "committed" in state.unreadable:
            may_replace = has_revision(key, state.revisions["committed"])
        conditions = (may_replace, is_absent(key))
        for condition in conditions if "committed" in state.revisions else reversed(conditions):
            if self._write([condition], [put_request(key, text)]):
                break
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
        with self._health.writing():
            try:
                return self._transact(conditions, then)
            except MembershipStoreError:
                # Whether etcd is away, or takes no writes alone, a read will show.
                self._changed.set()
                raise

    def _transact(self, conditions: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]) -> bool:
        seen = self._health.newest_revision
        result = self._writer.write(conditions, then)
        self._check_revision(result.revision, seen=seen)
        return result.succeeded

    def _joined(self) -> tuple[NodeInfo, int]:
        # Of another thread's time: a node that was evicted leaves before it joins again.
        node, lease = self._node, self._lease
        if node is None or lease is None:
            raise MembershipStoreError("this node is not in the job: it has left, or was evicted and joins again")
        return node, lease

    def _run(self, thread: Callable[[], None]) -> None:
        """Run a thread; whatever ends it before it is to end, ends the agent."""
        try:
            thread()
        except BaseException as error:  # noqa: BLE001  # the agent raises it
            self.failure = error
            self._on_change()

    def _watch(self) -> None:
        """Have the keys read whenever one has changed."""
        pauses = Pauses()
        while not self._closed.is_set():
            # While the thread that reads finds etcd away, it is asked by that one alone.
            if not self._health.answers_reads.wait(_READ_AT_LEAST_EVERY_S):
                continue
            began_s = time.monotonic()
            try:
                for _ in self._watcher.changes(self._reader.key("")):
                    self._changed.set()
                    if self._closed.is_set():
                        break
            except MembershipStoreError:
                # If etcd is away, the thread that reads finds that at once, and no other watch is asked for.
                self._changed.set()
                if time.monotonic() > began_s + _LASTING_WATCH_S:
                    pauses.reset()
                self._closed.wait(pauses.seconds)
                pauses.grow()
            else:
                pauses.reset()

    def _read(self) -> None:
        """Read all keys whenever one has changed, and now and then in case the watch has missed that."""
        while not self._closed.is_set():
            is_away = not self._health.answers_reads.is_set()
            self._changed.wait(self._read_pauses.seconds if is_away else _READ_AT_LEAST_EVERY_S)
            self._changed.clear()
            if self._closed.is_set():
                return
            with contextlib.suppress(MembershipStoreError):
                self._read_once()
                self._watcher.follow_order()
            self._on_change()

    def _read_once(self) -> JobState:
        """Read all keys, and take what was read for the state of the job; returns it."""
        # Before the read: what it finds may be from before a place was taken.
        known, node, seen = self.state, self._node, self._health.newest_revision
        was_answered = self._health.answers_reads.is_set()
        try:
            with self._health.reading():
                state = self._reader.read()
        except MembershipStoreError:
            if not was_answered:
                self._read_pauses.grow()
            raise
        self._read_pauses.reset()
        self._check_revision(state.revision, seen=seen)
        self._health.check_epoch(state, known=known)
        with self._state_lock:
            # Another thread may have read a newer one in the meantime.
            if self.went_back is None and state.revision >= self.state.revision:
                if node is not None and node is self._node:
                    self.evicted = state.nodes.get(node.name) != node
                self.state = state
        return state

    def _check_revision(self, revision: int, *, seen: int) -> None:
        self._health.check_revision(revision, seen=seen)
        if self.went_back is not None:
            self._on_change()

    def _stay(self) -> None:
        """Keep the lease alive. While etcd is away a lease may end or not: etcd says so when it is back."""
        is_away, asked_s, pace = False, time.monotonic(), LeasePace()
        while True:
            # From request to request: on a slow disk an answer may take most of a short lease.
            pause_s = pace.pause_s(self.lease_s, asked_s, answers_reads=self._health.answers_reads.is_set())
            if self._closed.wait(asked_s + pause_s - time.monotonic()):
                return
            asked_s = time.monotonic()
            with self._leases_lock:
                lease = self._lease
                if lease is None:
                    continue
                try:
                    self.evicted = self.evicted or not self._leases.keep_alive(lease)
                except MembershipStoreError:
                    is_away = True
                    continue
                finally:
                    pace.note_answer(self.lease_s, asked_s, took_s=time.monotonic() - asked_s)
            if self.evicted:
                self._on_change()
            if is_away:
                # The thread that reads waits longer and longer.
                is_away = False
                self._changed.set()

    def _restore_report(self) -> None:
        """Write this node's report again if it was deleted or overwritten: others may wait for it."""
        report = self._report
        if report is not None and not self.evicted and report.node not in self.state.reports:
            with contextlib.suppress(MembershipStoreError):
                self.report(report)

    def _try_writes(self) -> None:
        """While writes fail, find out whether they work again, by a transaction that changes nothing."""
        key, pauses = self._writer.key("token"), Pauses()
        while not self._closed.is_set():
            if not self._health.fails_writes.wait(_READ_AT_LEAST_EVERY_S):
                self._restore_report()
                continue
            if not self._health.answers_reads.wait(_READ_AT_LEAST_EVERY_S):
                continue
            if self._closed.wait(pauses.seconds):
                return
            try:
                with self._health.writing(is_try=True):
                    # etcd decides whether it takes a write before it looks at the condition, which never holds.
                    self._transact([has_revision(key, -1)], [put_request(key, "")])
            except MembershipStoreError:
                pauses.grow()
            else:
                pauses.reset()
                self._on_change()


def _check_readable(state: JobState, key: str) -> None:
    """Raise a ConfigError if a key cannot be read without which no node can join."""
    if (problem := state.unreadable.get(key)) is not None:
        raise ConfigError(
            f"{problem}; go on with the version of megatron-hetero that began the job, or write the key again as it "
            "was, or give up what the job has and delete its keys (hetero elastic forget)"
        )
