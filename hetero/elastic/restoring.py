"""Fills a rank's state from the nearest copies: its own node's, another node's, then the object store's.

The units of a step together are a checkpoint (:mod:`hetero.checkpoint`), whose shards lie on several nodes.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hetero.checkpoint.manifest import check_manifest, merge
from hetero.checkpoint.reader import ShardedTensors, ShardSource
from hetero.checkpoint.shard_files import LocalShardFile
from hetero.checkpoint.state import CheckpointState
from hetero.elastic.copy_client import CopyClient
from hetero.elastic.copy_folder import find_copy, shard_path
from hetero.elastic.records import Copy, RankAssignment
from hetero.elastic.recovery import OBJECT_STORE
from hetero.errors import CheckpointError, SourceLostError
from hetero.runtime.sharded_state import TensorSlice

if TYPE_CHECKING:
    from hetero.elastic.stored_step import StoredStep


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredState:
    """What the copies of a step hold beside the slices that were filled from them.

    rank_state: what this rank had of its own; ``None`` where another plan was copied.
    """

    state: CheckpointState
    rank_state: dict[str, torch.Tensor] | None


BadCopyReport = Callable[[str], None]
"""Is told of each bad copy as ``NODE/EPOCH/STEP/UNIT``."""


def restore(
    assignment: RankAssignment,
    *,
    rank: int,
    slices: Sequence[TensorSlice],
    report_bad: BadCopyReport,
    check: Callable[[str, CheckpointState], None] = lambda where, state: None,
) -> RestoredState:
    """Fill ``slices`` with the state that this epoch starts from, whatever plan copied it.

    No collective inside. Only the blocks that are wanted are read, each verified before it is copied.

    Args:
        check: raises if the run that was copied, named for messages, is not this one; before anything large is read.

    Raises:
        CheckpointError: something that is wanted is nowhere whole.
    """
    start = assignment.epoch.start
    where = f"copies of step {start.step} of epoch {start.epoch}"
    sources = _Sources(assignment, rank=rank, report_bad=report_bad)
    try:
        firsts, rests = {}, {}
        for unit in sorted(assignment.epoch.sources):
            found = sources.of(unit)
            first = next(found, None)
            if first is None:
                raise CheckpointError(f"{where}: nobody has {unit} any more{sources.why()}")
            firsts[unit] = first
            rests[first.source.shard.file] = itertools.chain([first.source], (each.source for each in found))
        copies = [each.copy for each in firsts.values()]
        state = copies[0].state
        for copy in copies:
            if copy.state != state:
                raise CheckpointError(f"{where}: {copy.unit} has other numbers of the run than {copies[0].unit}")
        check(where, state)
        manifest = merge([(copy.shard, copy.tensors) for copy in copies], state.model)
        check_manifest(manifest, source=where)
        saved = ShardedTensors(where, manifest, rests, discarded=sources.discarded)
        is_same_plan = state.plan == assignment.epoch.plan
        rank_state = saved.rank_state(rank) if is_same_plan else None
        saved.fill(slices)
        return RestoredState(state=state, rank_state=rank_state)
    finally:
        sources.close()


@dataclass(frozen=True, slots=True)
class _Found:
    copy: Copy
    source: ShardSource


class _Sources:
    """Looks for the units of the step that is restored, the nearest place first; several threads ask, each for one."""

    def __init__(self, assignment: RankAssignment, *, rank: int, report_bad: BadCopyReport) -> None:
        self._assignment = assignment
        self._rank = rank
        self._report_bad = report_bad
        epoch = assignment.epoch
        self._nodes = {node.name: node for node in (*(each.node for each in epoch.nodes), *epoch.others)}
        self._clients: dict[str, CopyClient] = {}
        self._name_of: dict[int, tuple[str, str]] = {}
        self._yielded: list[ShardSource] = []
        self._stored_step: StoredStep | None = None
        self._store_error: CheckpointError | None = None
        self._errors: list[str] = []
        self._lock = threading.Lock()

    def of(self, unit: str) -> Iterator[_Found]:
        """The places that have a unit, as they are asked for."""
        names = self._assignment.epoch.sources[unit]
        own = [name for name in names if name == self._assignment.node]
        others = [name for name in names if name != self._assignment.node and name in self._nodes]
        # The ranks do not all begin with the same node.
        turn = self._rank % len(others) if others else 0
        for name in [*own, *others[turn:], *others[:turn]]:
            try:
                found = self._local(unit) if name in own else self._remote(name, unit)
            except CheckpointError as error:
                self._errors.append(str(error))
                continue
            if found is None:
                self._errors.append(f"node {name} has no {unit}")
                continue
            yield self._noted(found, name, unit)
        if (stored := self._stored(unit)) is not None:
            yield self._noted(stored, OBJECT_STORE, unit)

    def discarded(self, source: ShardSource, error: CheckpointError) -> None:
        """Take note of a place that had a unit, but not whole."""
        name, unit = self._name_of[id(source)]
        start = self._assignment.epoch.start
        self._errors.append(str(error))
        if not isinstance(error, SourceLostError):
            self._report_bad(f"{name}/{start.epoch}/{start.step}/{unit}")

    def why(self) -> str:
        """What went wrong so far, for a message."""
        return "".join(f"; {error}" for error in self._errors)

    def close(self) -> None:
        """End all connections."""
        for client in self._clients.values():
            client.close()

    def _noted(self, found: _Found, name: str, unit: str) -> _Found:
        self._name_of[id(found.source)] = name, unit
        self._yielded.append(found.source)
        return found

    def _stored(self, unit: str) -> _Found | None:
        """What the object store has of a unit; what it has at all is asked when the first one is wanted."""
        url, start = self._assignment.object_store, self._assignment.epoch.start
        if url is None:
            return None
        # Training without a store, and without agents, is installed without obstore.
        from hetero.elastic.object_store import ObjectStore  # noqa: PLC0415

        with self._lock:
            if self._stored_step is None and self._store_error is None:
                try:
                    self._stored_step = ObjectStore(url).step(start.step)
                except CheckpointError as error:
                    self._store_error = error
                    self._errors.append(str(error))
        copy = None if self._stored_step is None else self._stored_step.copy(unit, epoch=start.epoch)
        if copy is not None and self._stored_step is not None:
            return _Found(copy, ShardSource(copy.shard, self._stored_step.file(copy)))
        if not isinstance(self._store_error, SourceLostError):
            self._report_bad(f"{OBJECT_STORE}/{start.epoch}/{start.step}/{unit}")
        return None

    def _local(self, unit: str) -> _Found | None:
        start = self._assignment.epoch.start
        found = find_copy(Path(self._assignment.folder), epoch=start.epoch, step=start.step, unit=unit)
        if found is None:
            return None
        slot, copy = found
        return _Found(copy, ShardSource(copy.shard, LocalShardFile(shard_path(slot, unit))))

    def _remote(self, name: str, unit: str) -> _Found | None:
        start = self._assignment.epoch.start
        with self._lock:
            if name not in self._clients:
                self._clients[name] = CopyClient(
                    self._nodes[name],
                    job=self._assignment.job,
                    token=self._assignment.token,
                    trust=self._assignment.trust,
                )
        copy = self._clients[name].copy(epoch=start.epoch, step=start.step, unit=unit)
        return None if copy is None else _Found(copy, ShardSource(copy.shard, self._clients[name].file(copy)))
