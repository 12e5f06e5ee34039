"""Copies what a rank owns beside the next step, has it copied by a node of another failure domain, and commits it.

After a step the state stays as it is until the next update. Meanwhile a thread writes it into one of two slots
(:mod:`.copy_folder`), from the live tensors on a CPU, from pinned memory on a GPU, and only the update waits for it.
What nobody else holds, a keeper on another node fetches. When all that a rank writes and keeps is whole, it votes so in
the all-reduce of a step (:mod:`.copy_protocol`).

A copy that cannot be made, because memory or a disk is full, stops nothing: it is said, given up by all ranks, and the
next one is tried.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from hetero.checkpoint.manifest import Shard, block_key
from hetero.checkpoint.shard_files import LocalShardFile, check_whole
from hetero.checkpoint.shards import tensor_infos
from hetero.checkpoint.state import CheckpointState
from hetero.distributed.process_groups import ParallelContext
from hetero.elastic.copy_client import CopyClient
from hetero.elastic.copy_folder import copy_path, remove_epochs_before, shard_path, slot_folder, write_copy
from hetero.elastic.copy_protocol import CopyProtocol
from hetero.elastic.copy_rates import CopyRates
from hetero.elastic.held_uploads import HeldUploads
from hetero.elastic.placement import CPU_TIME_SHARE, TIME_SHARE, check_announced
from hetero.elastic.placing import place_copies
from hetero.elastic.records import Copy, RankAssignment, Unit
from hetero.elastic.slot_files import ShardLayout, mapped_file
from hetero.errors import CheckpointError, ConfigError
from hetero.plan.stream_roles import StreamRole
from hetero.runtime.device_streams import has_streams, stream_for
from hetero.runtime.host_copies import memory_for_state
from hetero.runtime.sharded_state import TensorSlice
from hetero.runtime.trainer import Trainer

_PATIENCE_S = 2.0
"""For one question for another rank's copy, after which this rank looks whether anybody still wants it."""

_MAX_BAD_FETCHES = 3
"""After which the file itself is wrong, and not the way here."""

_LONGEST_COMMIT_S = 120.0
"""That a planned end waits for the last copy."""

_ASK_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class RunMoment:
    """What a copy holds beside the tensors: the scalars of the run, and what belongs to this rank alone."""

    state: CheckpointState
    rank_state: Mapping[str, torch.Tensor]


class CopyWriter:
    """Makes the copies of one rank in one epoch. Implements :class:`hetero.runtime.trainer.BackgroundCopies`.

    Collective over the world: to be made on all ranks, after the state has been restored.

    Args:
        moment: of the run as it is when it is called, after a step.
        start_step: which was restored, 0 for the initial weights.
        every: after every how many steps copies are made, ``None`` to choose by what they take.
        say: takes what people should know.

    Raises:
        CheckpointError: the folder has no room for two copies, or cannot be written; on every rank.
        ConfigError: hosts preview updates.
    """

    def __init__(
        self,
        assignment: RankAssignment,
        context: ParallelContext,
        trainer: Trainer,
        *,
        moment: Callable[[int], RunMoment],
        start_step: int,
        every: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._assignment = assignment
        self._context = context
        self._moment = moment
        self._say = say
        self._folder = Path(assignment.folder)
        self._trainer = trainer
        if trainer.optimizer.moves_state:
            raise ConfigError(
                "copies for recovery: the plan lets hosts preview updates (offload.speculate), and the state of the "
                "optimizer then lies elsewhere from step to step, which copies cannot follow; set speculate to false"
            )
        self._placed = place_copies(assignment, context, trainer.optimizer)
        self._protocol = CopyProtocol(start_step=start_step, world_size=context.plan.world_size)
        self._rates = CopyRates(
            self._placed.traffic,
            self._placed.link_bytes_per_s,
            world_size=context.plan.world_size,
            time_share=TIME_SHARE if context.device.type == "cuda" else CPU_TIME_SHARE,
            every=every,
        )
        self._units = [
            _WrittenUnit(unit, slices, rank_state=unit.owner == context.rank and not unit.held)
            for unit, slices in self._placed.written(trainer.optimizer)
        ]
        self._uploads = HeldUploads(
            assignment,
            units=[each.unit.name for each in self._units if each.unit.owner == context.rank],
            world_size=context.plan.world_size,
        )
        self._staging = _Staging(context.device, [each for unit in self._units for each in unit.slices])
        self._in_hand: _CopyInHand | None = None
        self._said: set[str] = set()
        trainer.attach(self)

    @property
    def committed(self) -> int:
        """The newest step of this epoch that all ranks know to be whole on two failure domains; 0 for none."""
        return self._protocol.committed

    @property
    def every(self) -> int:
        """After every how many steps copies are made."""
        return self._rates.interval.every

    def after_step(self, step: int, *, last: bool = False) -> None:
        """Begin to copy the state after ``step``, if it is due; before the first step, what was restored.

        Args:
            last: the run ends here, as planned.
        """
        if not self._protocol.wants_copy(step, every=self.every, last=last):
            return
        # What hosts update beside the next step has to be there first.
        self._trainer.finish_host_updates()
        before = self._in_hand
        if before is not None:
            before.cancel()
            before.read.wait()
        slot = slot_folder(self._folder, self._assignment.epoch.number, self._protocol.begin(step))
        in_hand = _CopyInHand(step, slot)
        self._in_hand = in_hand
        moment = self._moment(step)
        tensors = self._staging.stage()
        for work, name in ((self._write, "write"), (self._fetch, "fetch")):
            arguments = (work, in_hand, before, moment, tensors)
            # A daemon: an end of the process does not wait for ranks that are gone.
            threading.Thread(target=self._guarded, args=arguments, name=f"copy-{name}", daemon=True).start()

    def votes(self) -> Sequence[float]:
        """Whether all that this rank writes and keeps is whole, an upload, and seconds."""
        write_s, fetch_s = (0.0, 0.0) if self._in_hand is None else (self._in_hand.write_s, self._in_hand.fetch_s)
        upload = self._uploads.vote(self._protocol.pending)
        return [self._vote(), upload, *self._rates.measured(write_s=write_s, fetch_s=fetch_s)]

    def decided(self, sums: Sequence[float]) -> None:
        """Commit the pending step if all ranks have it whole, give it up if one failed."""
        votes, upload, *seconds = sums
        is_new = self._settle(votes)
        if is_new and self._in_hand is not None:
            self._uploads.decide(upload, step=self.committed, slot=self._in_hand.slot)
        if (news := self._rates.agreed(seconds, of_copy=is_new)) and self._context.rank == 0:
            self._say(news)

    def _vote(self) -> float:
        in_hand = self._in_hand
        if in_hand is None:
            return self._protocol.vote(None)
        # The pending step is the one in hand: both change in one place.
        return self._protocol.vote(in_hand.step if in_hand.is_whole else None, failed=in_hand.error is not None)

    def _settle(self, votes: float) -> bool:
        """Take the sum of all votes; whether the pending step is committed now."""
        is_first, pending = self.committed == 0, self._protocol.pending
        if self._protocol.decide(votes) is not None:
            if is_first and self._placed.is_first_of_node:
                # What it went on from is not needed any more, and its memory may be.
                arguments = (self._folder, self._assignment.epoch.number)
                threading.Thread(target=remove_epochs_before, args=arguments, daemon=True).start()
            return True
        if self._protocol.pending != pending and self._in_hand is not None:
            # Given up: nobody is waited for any more.
            self._in_hand.cancel()
        return False

    def wait_until_read(self) -> None:
        """Come back when the state may change."""
        if self._in_hand is not None:
            self._staging.wait(self._in_hand.read)

    def commit(self) -> bool:
        """Wait for the copy in hand and commit it: collective over the world, for a planned end; whether it worked."""
        deadline = time.monotonic() + _LONGEST_COMMIT_S
        while self._protocol.pending is not None:
            if self._in_hand is not None:
                self._in_hand.ended.wait(_ASK_AGAIN_S)
            sums = torch.tensor(
                [self._vote(), float(time.monotonic() > deadline)], dtype=torch.float64, device=self._context.device
            )
            dist.all_reduce(sums, group=self._context.world)
            votes, late = sums.tolist()
            if not self._settle(votes) and late:
                return False
        return self._in_hand is not None and self.committed == self._in_hand.step

    def close(self) -> None:
        """Stop copying; what is whole stays."""
        if self._in_hand is not None:
            self._in_hand.cancel()
            self._in_hand.ended.wait(_PATIENCE_S)

    def _guarded(
        self,
        work: Callable[["_CopyInHand", RunMoment, Mapping[int, torch.Tensor]], None],
        in_hand: "_CopyInHand",
        before: "_CopyInHand | None",
        moment: RunMoment,
        tensors: Mapping[int, torch.Tensor],
    ) -> None:
        """Run a part of a copy, once the copy before has ended, and take note of how it went."""
        try:
            if before is not None:
                before.ended.wait()
            work(in_hand, moment, tensors)
        except (OSError, CheckpointError) as error:
            in_hand.error = str(error)
            if not in_hand.cancelled.is_set():
                self._complain(f"step {in_hand.step} was not copied: {error}")
        finally:
            in_hand.part_is_over()

    def _complain(self, message: str) -> None:
        """Say once what goes wrong; the next copies may have the same trouble."""
        kind = message.partition(":")[2]
        if kind not in self._said:
            self._said.add(kind)
            sys.stderr.write(
                f"hetero: rank {self._context.rank}: {message}; training goes on, and the next copy is tried\n"
            )

    def _write(self, in_hand: "_CopyInHand", moment: RunMoment, tensors: Mapping[int, torch.Tensor]) -> None:
        try:
            for unit in self._units:
                copy_path(in_hand.slot, unit.unit.name).unlink(missing_ok=True)
            self._staging.wait_until_staged()
            began_s = time.monotonic()
            for unit in self._units:
                path = shard_path(in_hand.slot, unit.unit.name)
                self._uploads.leave_to_upload(path)
                shard = unit.write(path, tensors, moment.rank_state)
                write_copy(in_hand.slot, self._describe(unit, in_hand.step, shard, moment.state))
            in_hand.write_s = time.monotonic() - began_s
        finally:
            in_hand.read.set()

    def _describe(self, unit: "_WrittenUnit", step: int, shard: Shard, state: CheckpointState) -> Copy:
        return Copy(
            epoch=self._assignment.epoch.number,
            step=step,
            unit=unit.unit.name,
            shard=shard,
            tensors=tensor_infos(unit.slices),
            state=state,
        )

    def _fetch(self, in_hand: "_CopyInHand", moment: RunMoment, tensors: Mapping[int, torch.Tensor]) -> None:
        for unit in self._placed.fetched:
            copy_path(in_hand.slot, unit.name).unlink(missing_ok=True)
        for unit in self._placed.fetched:
            client = CopyClient(
                self._placed.node_of_rank[unit.owner],
                job=self._assignment.job,
                token=self._assignment.token,
                trust=self._assignment.trust,
            )
            in_hand.client = client
            try:
                self._fetch_unit(in_hand, unit, client)
            finally:
                in_hand.client = None
                client.close()

    def _fetch_unit(self, in_hand: "_CopyInHand", unit: Unit, client: CopyClient) -> None:
        path, bad = shard_path(in_hand.slot, unit.name), 0
        while (copy := self._announced(in_hand, unit, client)) is not None:
            check_announced(copy, unit, where=client.where)
            began_s = time.monotonic()
            try:
                with mapped_file(path, copy.shard.size_bytes) as memory:
                    client.file(copy).read_into(memory, start=0)
            except CheckpointError:
                # Its node may be slow, or lost: then this epoch ends. Nothing is known to be wrong with the copy.
                in_hand.cancelled.wait(_ASK_AGAIN_S * 10)
                continue
            try:
                check_whole(LocalShardFile(path), copy.shard)
            except CheckpointError:
                bad += 1
                if bad == _MAX_BAD_FETCHES:
                    raise
                continue
            write_copy(in_hand.slot, copy)
            in_hand.fetch_s += time.monotonic() - began_s
            return
        raise CheckpointError(f"{unit.name}: given up before {client.where} had it")

    def _announced(self, in_hand: "_CopyInHand", unit: Unit, client: CopyClient) -> Copy | None:
        """What a node says of a unit, as soon as it has it; ``None`` if nobody wants it any more."""
        epoch = self._assignment.epoch.number
        while not in_hand.cancelled.is_set():
            try:
                copy = client.copy(epoch=epoch, step=in_hand.step, unit=unit.name, wait_s=_PATIENCE_S)
            except CheckpointError:
                # As above: slow, or lost.
                in_hand.cancelled.wait(_ASK_AGAIN_S * 10)
                continue
            if copy is not None:
                return copy
        return None


class _CopyInHand:
    """The copy of one step on one rank.

    read: all of the state has been read that was to be copied.
    ended: written and fetched, or failed.
    client: by which a unit is being fetched.
    write_s, fetch_s: what that took, without waiting for others.
    """

    def __init__(self, step: int, slot: Path) -> None:
        self.step = step
        self.slot = slot
        self.read = threading.Event()
        self.ended = threading.Event()
        self.cancelled = threading.Event()
        self.error: str | None = None
        self.client: CopyClient | None = None
        self.write_s = 0.0
        self.fetch_s = 0.0
        self._lock = threading.Lock()
        self._parts_left = 2

    @property
    def is_whole(self) -> bool:
        return self.ended.is_set() and self.error is None

    def cancel(self) -> None:
        """Stop waiting for others."""
        self.cancelled.set()
        if (client := self.client) is not None:
            client.interrupt()

    def part_is_over(self) -> None:
        """Writing or fetching has come to an end."""
        with self._lock:
            self._parts_left -= 1
            if not self._parts_left:
                self.ended.set()


@dataclass(slots=True)
class _WrittenUnit:
    """A unit that this rank writes, and its file's layout once that is known."""

    unit: Unit
    slices: Sequence[TensorSlice]
    rank_state: bool
    layout: ShardLayout | None = field(default=None)

    def write(self, path: Path, tensors: Mapping[int, torch.Tensor], rank_state: Mapping[str, torch.Tensor]) -> Shard:
        extras = rank_state if self.rank_state else {}
        if self.layout is None:
            self.layout = ShardLayout(self.slices, rank_state=extras, rank=self.unit.owner)
        by_key = {block_key(each.name, each.offsets, each.tensor.shape): tensors[id(each)] for each in self.slices}
        return self.layout.write(path, by_key, extras)


class _Staging:
    """Where tensors are copied from: a CPU's as they are, a GPU's from pinned memory that a stream fills."""

    def __init__(self, device: torch.device, slices: Sequence[TensorSlice]) -> None:
        self._slices = slices
        self._device = device
        tensors = [each.tensor for each in slices]
        buffers = memory_for_state(tensors) if has_streams(device) else tensors
        self._buffers = {id(each): buffer for each, buffer in zip(slices, buffers, strict=True)}
        self._stream = stream_for(device, StreamRole.STATE_OUT) if has_streams(device) else None
        self._staged: torch.cuda.Event | None = None

    def stage(self) -> Mapping[int, torch.Tensor]:
        """The tensors on the host, by the identity of their slices; a GPU's are on their way."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for each in self._slices:
                    self._buffers[id(each)].copy_(each.tensor.detach(), non_blocking=True)
            self._staged = self._stream.record_event()
        return self._buffers

    def wait_until_staged(self) -> None:
        """Wait, in the background, until what :meth:`stage` began is on the host."""
        if self._staged is not None:
            self._staged.synchronize()

    def wait(self, read: threading.Event) -> None:
        """Let the next update wait: the device for what leaves it, and the host where it is read itself."""
        if self._staged is None:
            read.wait()
        else:
            torch.cuda.current_stream(self._device).wait_event(self._staged)
