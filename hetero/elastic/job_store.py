"""Reads the keys that an elastic job has in etcd, and writes those that need no lease.

    /hetero/JOB/token            what readers of copies show; written once, by the first agent
    /hetero/JOB/settings         JobSettings, what has to be the same everywhere
    /hetero/JOB/nodes/NAME       NodeInfo, on the lease of the node
    /hetero/JOB/leader           incarnation of the node that leads, on its lease
    /hetero/JOB/epoch            Epoch, written by the leader as long as it leads, in one transaction
    /hetero/JOB/broken/E         why epoch E cannot go on; the first who notices says so
    /hetero/JOB/stop/E           why epoch E is to end after the step in hand
    /hetero/JOB/stop/E/for_good  is there if no node stays, so that the ranks save that step and the job is over
    /hetero/JOB/reports/NAME     NodeReport, on the lease of the node
    /hetero/JOB/committed        the newest committed step that any rank reported; it outlives all nodes
    /hetero/JOB/notices/NAME     Notice
    /hetero/JOB/stored           RestorePoint, the newest step that this job has put into the object store
    /hetero/JOB/bad/COPY         a copy that its node is to delete
    /hetero/JOB/finished         Outcome
    /hetero/JOB/forgotten/MARK   newest epoch of a forgotten job of this name, by its token: its copies may be deleted

Each value is read by itself. One that cannot be read is named in ``JobState.unreadable`` and does not stop the rest.
"""

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hetero.elastic.etcd import (
    EtcdAddress,
    EtcdConnection,
    MemberOrder,
    StoredKeys,
    StoredValue,
    TransactionResult,
    delete_all_but,
    delete_request,
    is_absent,
    put_request,
)
from hetero.elastic.records import Epoch, JobSettings, NodeInfo, NodeReport, Notice, Outcome, RestorePoint
from hetero.elastic.recovery import BadCopy
from hetero.errors import CheckpointError, ConfigError
from hetero.printable import printable
from hetero.serialization import from_json, parse_json, to_json

_ROOT = "/hetero"

STEP_DIGITS = 20
"""Digits of ``committed``: always as many, so that the order of texts is that of numbers."""

_MAX_SHOWN = 80
"""Characters of a key, or of a wrong value, that a message repeats."""

_MAX_WORDS_BYTES = 4096
"""Of a text for people; the rest of a longer one is left out."""

_NO_REASON = "no reason was given"
"""Stands for an empty text under ``broken/`` or ``stop/``: that the key is there is what counts."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What the store says about a job at one moment.

    leader: incarnation of the node that leads; ``None`` also if the key names no node that is there.
    broken, stop: reasons, of the epoch that is in ``epoch``.
    is_stop_for_good: its ranks are asked to save the step in hand, as no node stays.
    committed: the newest step that was committed, within a second; 0 for none.
    bad_copies: as ranks report them (:class:`hetero.elastic.recovery.BadCopy`), until their node has deleted them.
    stored: the newest step that the job has put into the object store.
    forgotten: by mark (:func:`token_mark`) the newest epoch of each forgotten job of this name.
    unreadable: by key, without the job's prefix, why its value cannot be read, as a sentence for people. Of ``token``,
        ``settings``, ``epoch``, ``committed``, ``stored`` and ``finished`` the last value that could be read stays.
    revision: of the store when this was read.
    revisions: of the store when each key was last written, by key.
    """

    token: str | None = None
    settings: JobSettings | None = None
    nodes: Mapping[str, NodeInfo] = field(default_factory=dict)
    leader: str | None = None
    epoch: Epoch | None = None
    broken: str | None = None
    stop: str | None = None
    is_stop_for_good: bool = False
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    notices: Mapping[str, Notice] = field(default_factory=dict)
    committed: int = 0
    bad_copies: frozenset[str] = frozenset()
    stored: RestorePoint | None = None
    outcome: Outcome | None = None
    forgotten: Mapping[str, int] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    revision: int = 0
    revisions: Mapping[str, int] = field(default_factory=dict)

    @property
    def epoch_revision(self) -> int:
        """Revision of the store when the epoch was written, 0 without one."""
        return self.revisions.get("epoch", 0)

    @property
    def outcome_revision(self) -> int:
        """Revision of the store when the outcome was written, 0 without one."""
        return self.revisions.get("finished", 0)

    @property
    def newest_number(self) -> int:
        """The highest number of an epoch of this job, and of forgotten ones of its name; 0 without one."""
        return max([0 if self.epoch is None else self.epoch.number, *self.forgotten.values()])

    def stays_without(self, name: str) -> bool:
        """Whether another node than ``name`` is there and does not leave."""
        return any(other not in self.notices for other in self.nodes if other != name)

    def goes_on_without(self, name: str) -> bool:
        """Whether the epoch has none of this node's ranks, and has what it restored on its own nodes.

        Before the first epoch there is nothing to hand over: another node that stays is enough.
        """
        if self.epoch is None:
            return self.stays_without(name)
        if any(each.node.name == name for each in self.epoch.nodes):
            return False
        ranks = [rank for each in self.reports.values() for rank in each.ranks if rank.epoch == self.epoch.number]
        return self.epoch.start.step == 0 or any(rank.committed >= self.epoch.start.step for rank in ranks)


@dataclass(frozen=True, slots=True)
class _ParsedValue:
    """A value as it was read at a revision. If ``problem`` is set, it is the last that could be read, or ``None``."""

    revision: int
    value: Any
    problem: str = ""


def token_mark(token: str) -> str:
    """Return what shows by which token copies were made, without opening them."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


class JobStore:
    """The keys of one job: reads them, and writes those that need no lease. One thread at a time may call."""

    def __init__(self, address: EtcdAddress, job: str, *, order: MemberOrder | None = None) -> None:
        if not job or not all(each.isalnum() or each in "-_." for each in job):
            raise ConfigError(f"job {job!r}: its name takes letters, digits, '-', '_' and '.' only; give another --job")
        self._etcd = EtcdConnection(address, order=order)
        self._prefix = f"{_ROOT}/{job}/"
        self._parsed: dict[str, _ParsedValue] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Drop the connection."""
        self._etcd.close()

    def read(self) -> JobState:
        """Read everything at one revision of the store, each value by itself.

        Raises:
            MembershipStoreError: etcd is away, or refuses.
        """
        with self._lock:
            keys = self._etcd.read(self._prefix)
            self._parsed = {key: parsed for key, parsed in self._parsed.items() if key in keys.values}
            return self._state(keys)

    def put_notice(self, notice: Notice) -> None:
        """Say that a node will leave."""
        self.write([], [put_request(self.key(f"notices/{notice.node}"), to_json(notice))])

    def withdraw_notice(self, node: str) -> None:
        """Delete the notice of a node: it has left, or is back."""
        self.write([], [delete_request(self.key(f"notices/{node}"))])

    def forget(self) -> bool:
        """Delete what etcd has of the job, in one transaction, unless a node is in it; returns whether none was."""
        return self.write([self.has_no_node()], self.forgetting(self.read())).succeeded

    def has_no_node(self) -> dict[str, Any]:
        """The condition of a transaction that no node is in the job."""
        return is_absent(self.key("nodes/"), prefix=True)

    def forgetting(self, state: JobState) -> list[dict[str, Any]]:
        """The parts of a transaction that delete all keys of the job, which has this state.

        What stays are marks that copies of this job, and of earlier ones of its name, may be deleted.
        """
        # etcd takes no transaction that deletes a key and writes it.
        deleted = delete_all_but(self.key(""), kept=self.key("forgotten/"))
        if state.token is None:
            return deleted
        return [*deleted, put_request(self.key(f"forgotten/{token_mark(state.token)}"), str(state.newest_number))]

    def key(self, name: str) -> str:
        """The whole name of a key of this job."""
        return f"{self._prefix}{name}"

    def write(self, conditions: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]) -> TransactionResult:
        """Make one transaction."""
        with self._lock:
            return self._etcd.transaction(conditions=conditions, then=then)

    def _state(self, keys: StoredKeys) -> JobState:
        reading = _Reading(keys.values, self._prefix, self._parsed)
        epoch = reading.single("epoch", Epoch)
        number = epoch.number if epoch is not None else 0
        nodes = reading.of_nodes("nodes/", NodeInfo, lambda node: node.name)
        leader = reading.words("leader")
        committed = reading.value("committed", _number) or 0
        if "committed" in reading.unreadable:
            # That the key is there means that something was committed.
            committed = max(committed, 1)
        return JobState(
            token=reading.value("token", _token),
            settings=reading.single("settings", JobSettings),
            nodes=nodes,
            leader=leader if any(node.incarnation == leader for node in nodes.values()) else None,
            epoch=epoch,
            broken=reading.words(f"broken/{number}"),
            stop=reading.words(f"stop/{number}"),
            is_stop_for_good=f"stop/{number}/for_good" in keys.values,
            reports=reading.of_nodes("reports/", NodeReport, lambda report: report.node),
            notices=reading.of_nodes("notices/", Notice, lambda notice: notice.node),
            committed=committed,
            bad_copies=frozenset(reading.bad_copies()),
            stored=reading.single("stored", RestorePoint),
            outcome=reading.single("finished", Outcome),
            forgotten=reading.forgotten(),
            unreadable=reading.unreadable,
            revision=keys.revision,
            revisions={key: stored.revision for key, stored in keys.values.items()},
        )


class _Reading:
    """Parses the values of one read, each by itself; what was parsed before is not parsed again.

    Attributes:
        unreadable: by key, why its value cannot be read.
    """

    def __init__(self, values: Mapping[str, StoredValue], prefix: str, parsed: dict[str, _ParsedValue]) -> None:
        self.unreadable: dict[str, str] = {}
        self._values = values
        self._prefix = prefix
        self._parsed = parsed

    def single(self, key: str, kind: type[T]) -> T | None:
        """The value of a key as a ``kind``, or the last that could be read."""
        return self.value(key, lambda text, source: from_json(kind, text, source=source))

    def of_nodes(self, prefix: str, kind: type[T], name_of: Callable[[T], str]) -> dict[str, T]:
        """The values of all keys with a prefix, by node, without those that cannot be read."""

        def parse(name: str, text: str, source: str) -> T:
            try:
                value = from_json(kind, text, source=source)
            except ConfigError as error:
                raise ConfigError(f"{error}{_written_by(text)}") from None
            if name_of(value) != name:
                raise ConfigError(f"{source}: its value is of node {name_of(value)[:_MAX_SHOWN]!r}")
            return value

        values = {
            name: self.value(f"{prefix}{name}", functools.partial(parse, name)) for name in self._names_under(prefix)
        }
        return {
            name: value
            for name, value in values.items()
            if value is not None and f"{prefix}{name}" not in self.unreadable
        }

    def bad_copies(self) -> Iterator[str]:
        """The copies that are named as bad."""
        for name in self._names_under("bad/"):
            try:
                BadCopy.parse(name)
            except CheckpointError:
                self.unreadable[f"bad/{name}"] = (
                    f"{self._source(f'bad/{name}')}: it does not end with NODE/EPOCH/STEP/UNIT"
                )
            else:
                yield name

    def forgotten(self) -> dict[str, int]:
        """The newest epoch of each forgotten job, 0 where it cannot be read: that the mark is there is what counts."""
        marks = self._names_under("forgotten/")
        return {mark: self.value(f"forgotten/{mark}", _number) or 0 for mark in marks}

    def words(self, key: str) -> str | None:
        """A text for people: any bytes are one."""
        if (stored := self._values.get(key)) is None:
            return None
        return stored.data[:_MAX_WORDS_BYTES].decode(errors="replace") or _NO_REASON

    def value(self, key: str, parse: Callable[[str, str], T]) -> T | None:
        """The value of a key, parsed from its text and the name of its source, or the last that could be read."""
        if (stored := self._values.get(key)) is None:
            return None
        known = self._parsed.get(key)
        if known is None or known.revision != stored.revision:
            source = self._source(key)
            try:
                known = _ParsedValue(stored.revision, parse(_text(stored.data, source), source))
            except ConfigError as error:
                known = _ParsedValue(stored.revision, None if known is None else known.value, str(error))
            self._parsed[key] = known
        if known.problem:
            self.unreadable[key] = known.problem
        value: T | None = known.value
        return value

    def _source(self, key: str) -> str:
        return printable(f"etcd {self._prefix}{key[:_MAX_SHOWN]}")

    def _names_under(self, prefix: str) -> list[str]:
        return [key[len(prefix) :] for key in sorted(self._values) if key.startswith(prefix)]


def _written_by(text: str) -> str:
    """The version of the program that wrote a value, if the value carries one."""
    with contextlib.suppress(ConfigError, TypeError, LookupError):
        version = printable(str(parse_json(text, source="")["version"])[:_MAX_SHOWN])
        return f"; version {version} of megatron-hetero wrote it"
    return ""


def _text(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: no text in UTF-8: {error}") from None


def _token(text: str, source: str) -> str:
    if not text:
        raise ConfigError(f"{source}: it is empty")
    if not (text.isascii() and text.isprintable()):
        # It is sent in the head of a request. As a secret it is not shown.
        raise ConfigError(f"{source}: it has other characters than printable ones of ASCII")
    return text


def _number(text: str, source: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= STEP_DIGITS):
        raise ConfigError(f"{source}: no number: {text[:_MAX_SHOWN]!r}")
    return int(text)
