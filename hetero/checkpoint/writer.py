"""Saves a run's state from all ranks while training goes on."""

import datetime
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from hetero.checkpoint import folder as folders
from hetero.checkpoint.manifest import Shard, TensorInfo, block_key, merge
from hetero.checkpoint.shards import tensor_infos, write_shard
from hetero.checkpoint.state import CheckpointState
from hetero.errors import CheckpointError
from hetero.runtime.sharded_state import TensorSlice

T = TypeVar("T")

_SLOWEST_SAVE = datetime.timedelta(hours=6)
"""The first rank that has written its shard waits this long for the last."""


class CheckpointWriter:
    """Saves the checkpoints of one run in one folder, which all hosts see and no other run writes to.

    A save is: every rank copies its slices to host memory and, in the background if ``asynchronous``, writes them to
    its own shard of a hidden folder; when all shards are on the disk, rank 0 renames the folder and deletes the
    oldest checkpoints. Killed at any point, it leaves the checkpoints that were there.

    Args:
        start_step: where this run starts; its checkpoint, if there is one, is never deleted by this writer.
        keep_last: how many of the newest checkpoints to keep besides, ``None`` for all.
        keeps_later: checkpoints of later steps than ``start_step`` are this run's own, which has lost those steps:
            they stay, and are not saved again.
        asynchronous: return from :meth:`save` once the state has been copied. The copies stay allocated (pinned, for
            a GPU's): host memory for this rank's state once more.
        say: told of every checkpoint on rank 0 once it can be loaded, maybe by a thread in the background.

    Constructing it is collective over ``world`` (a new gloo group, broadcast).

    Raises:
        CheckpointError: the folder cannot be written or holds later checkpoints; the same on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: dist.ProcessGroup,
        start_step: int,
        keep_last: int | None,
        asynchronous: bool,
        keeps_later: bool = False,
        say: Callable[[str], None] = lambda news: None,
    ) -> None:
        assert keep_last is None or keep_last >= 1, keep_last
        self._folder = folder
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._say = say
        # Its own: collectives of the background may not mix with those of the step.
        ranks = dist.get_process_group_ranks(world)
        self._group = dist.new_group(ranks, backend="gloo", timeout=_SLOWEST_SAVE)
        self._rank = self._group.rank()
        self._background: _Background | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        _on_rank_0(self._group, lambda: folders.prepare(folder, start_step=None if keeps_later else start_step))
        self._published = frozenset(_from_rank_0(self._group, folders.published_steps(folder)))
        self._start_step = start_step
        self._last_step = start_step - 1

    def save(
        self,
        *,
        step: int,
        slices: Sequence[TensorSlice],
        state: CheckpointState,
        rank_state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Save the state after ``step``; a step that has been saved is not saved again.

        Collective over the world: one gather and one broadcast, in the background if asynchronous. Waits for the
        save before this one.

        Args:
            slices: what this rank owns; the blocks of all ranks tile every tensor exactly once.
            rank_state: tensors that only this rank of only this plan can use again.

        Raises:
            CheckpointError: this save, or an asynchronous one before it, failed; the same on all ranks.
        """
        self.wait()
        assert state.step == step >= self._last_step, (step, state.step, self._last_step)
        if step == self._last_step or step in self._published:
            return
        staged = self._staged(slices)
        extras = {
            name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in (rank_state or {}).items()
        }
        self._background = _Background(lambda: self._write(staged, state, extras), step)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is published. Call it once before the end: the background does not outlive it.

        Raises:
            CheckpointError: the last save failed; the same on all ranks.
        """
        if self._background is not None:
            background, self._background = self._background, None
            background.join()
            self._last_step = background.step
            if not self._asynchronous:
                self._buffers.clear()

    def _staged(self, slices: Sequence[TensorSlice]) -> list[TensorSlice]:
        """Copies on the host, which the next step cannot change. Their memory is used again by the next save."""
        staged = []
        for each in slices:
            if each.tensor.numel() == 0:
                continue
            key = block_key(each.name, each.offsets, each.tensor.shape)
            source, buffer = each.tensor.detach(), self._buffers.get(key)
            if buffer is None:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._buffers[key] = buffer
            buffer.copy_(source, non_blocking=True)
            staged.append(TensorSlice(name=each.name, shape=each.shape, offsets=each.offsets, tensor=buffer))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return staged

    def _write(self, staged: list[TensorSlice], state: CheckpointState, rank_state: dict[str, torch.Tensor]) -> None:
        """Gather (to rank 0) of what each rank wrote or of its error; broadcast of the outcome."""
        partial = folders.partial_folder(self._folder, state.step)
        written: tuple[Shard, dict[str, TensorInfo]] | str
        try:
            partial.mkdir(exist_ok=True)
            shard = write_shard(
                partial / f"rank_{self._rank:05d}.safetensors", staged, rank=self._rank, rank_state=rank_state
            )
            written = (shard, tensor_infos(staged))
        except OSError as error:
            written = f"on rank {self._rank}: {error}; {partial.parent} has to be on a file system that all hosts see"
        except CheckpointError as error:
            written = f"on rank {self._rank}: {error}"
        gathered: list[tuple[Shard, dict[str, TensorInfo]] | str] | None = None
        if self._rank == 0:
            gathered = [""] * self._group.size()
        dist.gather_object(written, gathered, group=self._group, group_dst=0)
        _on_rank_0(self._group, lambda: self._publish(gathered or [], state))

    def _publish(self, gathered: list[tuple[Shard, dict[str, TensorInfo]] | str], state: CheckpointState) -> None:
        partial = folders.partial_folder(self._folder, state.step)
        try:
            if errors := [each for each in gathered if isinstance(each, str)]:
                raise CheckpointError(f"step {state.step} was not saved: {'; '.join(errors)}")
            manifest = merge([each for each in gathered if not isinstance(each, str)], state.model)
            path = folders.publish(self._folder, step=state.step, state=state, manifest=manifest)
        except (OSError, CheckpointError):
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if self._keep_last is not None:
            folders.keep_newest(self._folder, self._keep_last, protected_step=self._start_step)
        self._say(f"saved to {path}")


class _Background:
    """Runs a call on a thread of its own. A daemon: an end of the process does not wait for ranks that are gone."""

    def __init__(self, call: Callable[[], None], step: int) -> None:
        self.step = step
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name=f"save-{step}", daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  (raised again by whoever waits)
            self._error = error

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _on_rank_0(group: dist.ProcessGroup, step: Callable[[], None]) -> None:
    """Call ``step`` on rank 0. Broadcast over ``group``; its error is raised on all ranks."""
    error = None
    if group.rank() == 0:
        try:
            step()
        except (OSError, CheckpointError) as raised:
            error = str(raised)
    if (error := _from_rank_0(group, error)) is not None:
        raise CheckpointError(error)


def _from_rank_0(group: dist.ProcessGroup, value: T) -> T:
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]
