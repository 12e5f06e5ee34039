"""Tensor-parallel groups of ranks on one machine that exchange tensors by shared memory.

A step of a tensor-parallel layout has some hundred collectives of a few kilobytes. gloo hands each from thread to
thread and from socket to socket, which takes more seconds of a core than what is computed between them. Here a rank
writes its part into a file that all of the group have mapped, tells each of the others by a semaphore, waits for
theirs, and reads. A collective is over when its call returns. Its sum is made in the order of ranks on each of them,
so that all have the same bits. What the plan's own runtime sends, sums and gathers stays on gloo.

A slot is written again two collectives later. By then all have read it: each has come to the collective in between.
"""

import dataclasses
import datetime
import mmap
import os
import tempfile
from _multiprocessing import SemLock, sem_unlink  # type: ignore[import-not-found]  # nobody has a stub of it
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined,unused-ignore]  # not in torch 2.13's stub
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions, Work
from torch.futures import Future

from hetero.distributed.process_groups import ParallelContext, StageContext
from hetero.plan.communicators import PlanCommunicators

BACKEND = "shared_memory"
_SLOT_BYTES = 1 << 20
"""The most that a rank gives to a collective. Pages that nobody writes take no memory."""

_SEMAPHORE = 1
"""The kind of a ``SemLock`` that anyone may release; the other one is a lock of its thread."""

_MOST_AHEAD = 4
"""Nobody comes to a collective before all have come to the one before the last."""

_REDUCTIONS: Sequence[tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
)


class SharedMemoryGroup(dist.ProcessGroup):
    """The collectives that megatron-core's tensor parallelism calls.

    Args:
        store: of this group alone, over which its ranks find one another.
        timeout: how long a rank waits for the others in a collective.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg,unused-ignore]  # torch 2.13's stub knows those with a store only
        self._place = rank
        self._timeout_s = timeout.total_seconds()
        if rank == 0:
            descriptor, path = tempfile.mkstemp(prefix="group-", dir="/dev/shm")
            os.truncate(path, 2 * world_size * _SLOT_BYTES)
            os.close(descriptor)
            for pair in _pairs(world_size):
                SemLock(_SEMAPHORE, 0, _MOST_AHEAD, _name(path, *pair), False)
            store.set("path", path)
        path = store.get("path").decode()
        with Path(path).open("r+b") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        self._slots = memory.view(2, world_size, _SLOT_BYTES)
        others = [other for other in range(world_size) if other != rank]
        # The handle is one of Windows, and semaphores are opened by their name.
        opened = {pair: SemLock._rebuild(0, _SEMAPHORE, _MOST_AHEAD, _name(path, *pair)) for pair in _pairs(world_size)}
        self._told = [opened[rank, other] for other in others]
        self._hears = [(other, opened[other, rank]) for other in others]
        self._turn = 0
        future: Future[None] = Future()
        future.set_result(None)
        self._over: Work = _create_work_from_future(future)
        if store.add("opened", 1) == world_size:
            store.set("all opened", "")
        store.wait(["all opened"])
        if rank == 0:
            Path(path).unlink()
            for pair in _pairs(world_size):
                sem_unlink(_name(path, *pair))

    def getBackendName(self) -> str:
        return BACKEND

    # Of the forms in its stub, only that with options ever comes to a group that is made here.
    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions | None = None) -> Work:  # type: ignore[override]
        (tensor,) = tensors
        return self._give(tensor, _reduced(self._parts(tensor), opts))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        return self._give(output, torch.cat(self._parts(input)))

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        own = slice(self._place * output.numel(), (self._place + 1) * output.numel())
        return self._give(output, _reduced([part[own] for part in self._parts(input)], opts))

    # What torch 2.10 to 2.12 call them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # its arguments have other names

    def _give(self, output: torch.Tensor, result: torch.Tensor) -> Work:
        """``result`` in the form of ``output``, and the collective is over."""
        output.copy_(result.view_as(output))
        return self._over

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What each rank gave, flat, by rank; to be read before the next collective."""
        num_bytes = tensor.numel() * tensor.element_size()
        assert num_bytes <= _SLOT_BYTES, f"a tensor of {num_bytes} bytes, a slot has {_SLOT_BYTES}"
        parts = [slot[:num_bytes].view(tensor.dtype) for slot in self._slots[self._turn]]
        self._turn = 1 - self._turn
        parts[self._place].copy_(tensor.detach().reshape(-1))
        for told in self._told:
            told.release()
        for other, heard in self._hears:
            if not heard.acquire(True, self._timeout_s):
                raise TimeoutError(f"rank {other} of the group came to no collective within {self._timeout_s:g} s")
        return parts


def _reduced(parts: Sequence[torch.Tensor], opts: AllreduceOptions | ReduceScatterOptions | None) -> torch.Tensor:
    """In the order of ``parts``; without options the sum, as everywhere in torch."""
    operation = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    reduce = next(function for each, function in _REDUCTIONS if operation == each)
    total = parts[0]
    for part in parts[1:]:
        total = reduce(total, part)
    return total


def _pairs(size: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(size) for b in range(size) if a != b]


def _name(path: str, teller: int, told: int) -> str:
    """Of the semaphore by which one rank tells another that it has written."""
    return f"/{Path(path).name}-{teller}-{told}"


dist.Backend.register_backend(BACKEND, SharedMemoryGroup, devices=["cpu"])


def with_shared_memory(context: ParallelContext) -> ParallelContext:
    """``context`` whose tensor-parallel groups exchange tensors by shared memory; collective over the world.

    Every rank makes every group, its own or not: torch calls a group by how many the process has made.
    """
    groups = {
        ranks: cast(dist.ProcessGroup, dist.new_group(list(ranks), backend=BACKEND))  # noqa: TID251
        for ranks in PlanCommunicators(context.plan).tp
    }

    def group_of(work: StageContext) -> dist.ProcessGroup:
        return groups[tuple(dist.get_process_group_ranks(work.tp))] if work.stage.tp > 1 else work.tp

    stages = tuple(dataclasses.replace(work, tp=group_of(work)) for work in context.stages)
    return dataclasses.replace(context, stages=stages)
