"""Saves a run's state from all ranks while training goes on."""

import shutil
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from hetero.checkpoint import folder as folders
from hetero.checkpoint.manifest import Shard, TensorInfo, block_key, merge
from hetero.checkpoint.shards import tensor_infos, write_shard
from hetero.checkpoint.slow_work import Advance, StalledError, work_together
from hetero.checkpoint.state import CheckpointState
from hetero.checkpoint.write_errors import write_error
from hetero.distributed.process_groups import create_group, time_limit
from hetero.distributed.rank_consensus import describe_errors
from hetero.errors import CheckpointError, ConfigError, MembershipError
from hetero.plan.stream_roles import StreamRole
from hetero.runtime.device_streams import has_streams
from hetero.runtime.host_copies import host_copies, memory_for_state
from hetero.runtime.sharded_state import TensorSlice

T = TypeVar("T")

_CPU = torch.device("cpu")

Written = tuple[Shard, dict[str, TensorInfo]]
"""What a rank has written, and of which tensors that is."""


class CheckpointWriter:
    """Saves the checkpoints of one run in one folder, which all hosts see and no other run writes to.

    A save is: every rank copies its slices to host memory and, in the background if ``asynchronous``, writes them to
    its own shard of a hidden folder; when all shards are on the disk, rank 0 renames the folder and deletes the
    oldest checkpoints. Killed at any point, it leaves the checkpoints that were there.

    Args:
        start_step: where this run starts; its checkpoint, if there is one, is never deleted by this writer.
        keep_last: how many of the newest checkpoints to keep besides, ``None`` for all.
        own: a state of this run, if it has been here before. Checkpoints of later steps are its own then, which has
            lost those steps since: they stay, and are saved again only where its flags have changed.
        asynchronous: return from :meth:`save` once the state has been copied. The copies stay allocated, and pinned for
            a GPU's: host memory for this rank's state once more. Otherwise they are pageable, and freed after a save.
        say: told of every checkpoint on rank 0 once it can be loaded, maybe by a thread in the background.

    Constructing it is collective over ``world`` (a new gloo group, broadcast).

    Raises:
        CheckpointError: the folder cannot be written; the same on all ranks.
        ConfigError: it holds later checkpoints of another run; the same on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: dist.ProcessGroup,
        start_step: int,
        keep_last: int | None,
        asynchronous: bool,
        own: CheckpointState | None = None,
        say: Callable[[str], None] = lambda news: None,
    ) -> None:
        assert keep_last is None or keep_last >= 1, keep_last
        self._folder = folder
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._say = say
        # Its own: collectives of the background may not mix with those of the step.
        self._group = create_group(dist.get_process_group_ranks(world), backend="gloo")
        limit = time_limit(self._group)
        assert limit is not None, "gloo has one"
        self._limit_s = limit.total_seconds()
        self._rank = self._group.rank()
        self._background: _Background | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        _on_rank_0(self._group, lambda: folders.prepare(folder, start_step=start_step, own=own))
        self._published = frozenset(_from_rank_0(self._group, folders.published_steps(folder)))
        self._start_step = start_step
        self._own = own
        self._last_step = start_step - 1

    def save(
        self,
        *,
        step: int,
        slices: Sequence[TensorSlice],
        state: CheckpointState,
        rank_state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Save the state after ``step``; a step that has been saved whole is not saved again.

        Collective over the world: a gather, a broadcast and the meetings of :func:`.work_together`, in the background
        if asynchronous. Waits for the save before this one. A rank may write for any time, as long as it gets on.

        Args:
            slices: what this rank owns; the blocks of all ranks tile every tensor exactly once.
            rank_state: tensors that only this rank of only this plan can use again.

        Raises:
            CheckpointError: this save, or an asynchronous one before it, failed; the same on all ranks.
            MembershipError: a rank has not written for as long as ranks wait for one another; the same on all ranks.
        """
        self.wait()
        assert state.step == step >= self._last_step, (step, state.step, self._last_step)
        if step == self._last_step or self._is_there(step):
            return
        staged = self._staged(slices)
        extras = {
            name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in (rank_state or {}).items()
        }
        self._background = _Background(lambda: self._write(staged, state, extras), step)
        if not self._asynchronous:
            self.wait()

    def has_saved(self, steps: range) -> bool:
        """Whether the run had a whole checkpoint of one of ``steps`` before this writer was made.

        Collective over the world (broadcasts).
        """
        return any(self._is_there(step) for step in steps if step in self._published)

    def _is_there(self, step: int) -> bool:
        """Whether a checkpoint of ``step`` need not be saved again; collective over the world if there is one."""
        if step not in self._published:
            return False
        saved = folders.whole_state(folders.step_folder(self._folder, step)) if self._rank == 0 else None
        return _from_rank_0(self._group, saved is not None and self._has_made(saved))

    def _has_made(self, saved: CheckpointState) -> bool:
        """Whether this run made a checkpoint; of a later step, with the flags that it has now."""
        if self._own is None:
            return True
        if saved.step > self._start_step:
            return saved.has_same_course(self._own)
        return saved.is_of_same_run(self._own)

    def wait(self) -> None:
        """Wait until the last save is published. Call it once before the end: the background does not outlive it.

        Raises:
            CheckpointError: the last save failed; the same on all ranks.
            MembershipError: as in :meth:`save`.
        """
        if self._background is not None:
            background, self._background = self._background, None
            background.join()
            self._last_step = background.step
            if not self._asynchronous:
                self._buffers.clear()

    def _staged(self, slices: Sequence[TensorSlice]) -> list[TensorSlice]:
        """Copies on the host, which the next step cannot change. Their memory is used again by the next save."""
        held = {block_key(each.name, each.offsets, each.tensor.shape): each for each in slices if each.tensor.numel()}
        new = {key: each.tensor.detach() for key, each in held.items() if key not in self._buffers}
        device = next((each.tensor.device for each in held.values() if has_streams(each.tensor.device)), _CPU)
        copies = host_copies(device)
        self._buffers |= zip(new, self._allocate(list(new.values())), strict=True)
        computed = copies.mark_computed()
        with copies.outwards(StreamRole.STATE_OUT):
            computed()
            for key, each in held.items():
                copies.copy(self._buffers[key], each.tensor.detach())
        return [
            TensorSlice(name=each.name, shape=each.shape, offsets=each.offsets, tensor=self._buffers[key])
            for key, each in held.items()
        ]

    def _allocate(self, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        # What is freed after one save is not worth pinning, which takes longer than the copy.
        return memory_for_state(likes) if self._asynchronous else [torch.empty_like(e, device=_CPU) for e in likes]

    def _write(self, staged: list[TensorSlice], state: CheckpointState, rank_state: dict[str, torch.Tensor]) -> None:
        """Gather (to rank 0) of what each rank wrote or of its error; broadcast of the outcome."""
        partial = folders.partial_folder(self._folder, state.step)

        def write(advance: Advance) -> Written:
            partial.mkdir(exist_ok=True)
            path = partial / f"rank_{self._rank:05d}.safetensors"
            shard = write_shard(path, staged, rank=self._rank, rank_state=rank_state, advance=advance)
            return shard, tensor_infos(staged)

        written = self._done_together(write, step=state.step)
        gathered: list[Written | Exception] | None = None
        if self._rank == 0:
            gathered = [written] * self._group.size()
        dist.gather_object(written, gathered, group=self._group, group_dst=0)

        def publish(advance: Advance) -> None:
            # Rank 0 alone has something to publish.
            if gathered is not None:
                self._publish(gathered, state, advance)

        _raise_on_all(self._group, self._done_together(publish, step=state.step))

    def _done_together(self, work: Callable[[Advance], T], *, step: int) -> T | Exception:
        """Do a part of a save, and return its result or its error when all ranks have done theirs."""
        try:
            return work_together(work, group=self._group, limit_s=self._limit_s)
        except StalledError:
            return MembershipError(
                f"rank {self._rank} (on {socket.gethostname()}) stood still: saving step {step}, it has not written to "
                f"{self._folder} for {self._limit_s:g} s; look at that file system, or raise "
                "--distributed-timeout-minutes if it only needs longer"
            )
        except OSError as error:
            return write_error(self._folder, error)
        except (CheckpointError, MembershipError) as error:
            return error

    def _publish(self, gathered: Sequence[Written | Exception], state: CheckpointState, advance: Advance) -> None:
        # What hangs in the file system would hold up its cleaning, too.
        if stalled := [str(each) for each in gathered if isinstance(each, MembershipError)]:
            raise MembershipError("; ".join(stalled))
        partial = folders.partial_folder(self._folder, state.step)
        try:
            errors = [str(each) if isinstance(each, Exception) else None for each in gathered]
            if any(errors):
                raise CheckpointError(f"step {state.step} was not saved: {describe_errors(errors)}")
            manifest = merge([each for each in gathered if not isinstance(each, Exception)], state.model)
            path = folders.publish(self._folder, step=state.step, state=state, manifest=manifest)
        except (OSError, CheckpointError):
            # What cannot be deleted now, the next run deletes.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        advance()
        if self._keep_last is not None:
            protected = (self._start_step, state.step)
            folders.keep_newest(self._folder, self._keep_last, protected_steps=protected, advance=advance)
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
    error: Exception | None = None
    if group.rank() == 0:
        try:
            step()
        except (ConfigError, CheckpointError) as raised:
            error = raised
    _raise_on_all(group, error)


def _raise_on_all(group: dist.ProcessGroup, error: Exception | None) -> None:
    """Raise the error of rank 0 on all ranks, if it has one. Broadcast over ``group``."""
    error = _from_rank_0(group, error)
    if error is not None:
        raise error


def _from_rank_0(group: dist.ProcessGroup, value: T) -> T:
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]
