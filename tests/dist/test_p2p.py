"""Channels between unequal stages move the right cells over gloo, in both directions at once."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero.distributed.p2p import Channel, Pending
from hetero.plan.ir import Stage
from tests.helpers.cells import Boxes, boxes
from tests.helpers.plans import stage
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]

SEQ_LENGTH = 8
HIDDEN = 3


def one(*ranks: int, tp: int = 1, dp: int = 1, mbs: int = 1, sp: bool = False) -> Stage:
    return stage(layers=(0, 1), ranks=ranks, tp=tp, dp=dp, mbs=mbs, sp=sp, depth=1)


PAIRS = {
    "alike": (one(0), one(1)),
    "coarse-to-fine": (one(0, mbs=4), one(1)),
    "fine-to-coarse": (one(0), one(1, mbs=4)),
    "tp2-to-tp4": (one(0, 1, tp=2), one(2, 3, 4, 5, tp=4)),
    "tp4-to-tp2": (one(0, 1, 2, 3, tp=4), one(4, 5, tp=2)),
    "tp2sp-to-tp4sp": (one(0, 1, tp=2, sp=True), one(2, 3, 4, 5, tp=4, sp=True)),
    "tp4sp-to-tp1": (one(0, 1, 2, 3, tp=4, sp=True), one(4)),
    "tp2-to-tp2sp": (one(0, 1, tp=2), one(2, 3, tp=2, sp=True)),
    "dp3-to-dp2": (one(0, 1, 2, dp=3, mbs=2), one(3, 4, dp=2, mbs=3)),
    "shuffled-ranks": (one(5, 0, tp=2, sp=True), one(3, 1, 4, 2, tp=2, dp=2)),
    "everything": (one(0, 1, 2, 3, tp=2, dp=2, mbs=2, sp=True), one(4, 5, 6, tp=1, dp=3, mbs=4)),
}


def exchange(rank: int, here: Stage, after: Stage, num_samples: int) -> tuple[Boxes, Boxes]:
    """Post all receives of ``num_samples`` samples, start all sends, then wait, the last slice first.

    The forward direction carries the numbers of cells, the backward one the same numbers negated. Returns what
    ``rank`` received of each, checked to be the same in every hidden channel.
    """
    ranks = sorted(here.ranks + after.ranks)
    directions = [(here, after, dist.new_group(ranks), 1), (after, here, dist.new_group(ranks), -1)]  # noqa: TID251
    size = min(s.micro_batch_size * s.dp for s in (here, after))
    received: list[dict[tuple[int, int], torch.Tensor]] = [{}, {}]
    under_way: list[Pending] = []
    for (sender, receiver, group, _), into in zip(directions, received, strict=True):
        if rank not in receiver.ranks:
            continue
        channel = Channel(sender=sender, receiver=receiver, rank=rank, seq_length=SEQ_LENGTH, group=group)
        for i in range(num_samples // size):
            key = rank, i * size // (receiver.micro_batch_size * receiver.dp)
            shape = boxes(receiver, num_samples, seq_length=SEQ_LENGTH)[key].shape
            into.setdefault(key, torch.full((*shape, HIDDEN), torch.nan))
            under_way.append(channel.receive(into[key], number=i))
    for sender, receiver, group, sign in directions:
        if rank not in sender.ranks:
            continue
        channel = Channel(sender=sender, receiver=receiver, rank=rank, seq_length=SEQ_LENGTH, group=group)
        held = boxes(sender, num_samples, seq_length=SEQ_LENGTH)
        for i in range(num_samples // size):
            numbers = held[rank, i * size // (sender.micro_batch_size * sender.dp)]
            under_way.append(channel.send(sign * with_hidden(numbers), number=i))
    for pending in reversed(under_way):
        pending.wait()
    forward, backward = (
        {key: without_hidden(tensor_SBH) for key, tensor_SBH in direction.items()} for direction in received
    )
    return forward, backward


def with_hidden(numbers: np.ndarray) -> torch.Tensor:
    """[S, B] -> [S, B, H], each channel offset by its own fraction."""
    return torch.tensor(numbers, dtype=torch.float32)[..., None] * (1 + torch.arange(HIDDEN))


def without_hidden(tensor_SBH: torch.Tensor) -> np.ndarray:
    torch.testing.assert_close(
        tensor_SBH, tensor_SBH[..., :1] * (1 + torch.arange(HIDDEN)), rtol=0, atol=0, equal_nan=True
    )
    return tensor_SBH[..., 0].numpy()


@pytest.mark.parametrize(("here", "after"), PAIRS.values(), ids=PAIRS.keys())
def test_each_cell_arrives_where_it_belongs(here: Stage, after: Stage) -> None:
    """Two coarse microbatches and their gradients, all slices in flight at once."""
    num_samples = 2 * max(s.micro_batch_size * s.dp for s in (here, after))
    by_rank = run_ranks(exchange, len(here.ranks + after.ranks), here, after, num_samples)
    for direction, receiver, sign in ((0, after, 1), (1, here, -1)):
        wanted = boxes(receiver, num_samples, seq_length=SEQ_LENGTH)
        got: Boxes = {}
        for received in by_rank:
            got |= received[direction]
        assert got.keys() == wanted.keys()
        for key, box in wanted.items():
            np.testing.assert_array_equal(got[key], sign * box, f"direction {direction}, rank and microbatch {key}")


def overwrite_after_start(rank: int) -> float:
    """Send a part of a microbatch that is not contiguous, and overwrite the microbatch before it can have arrived."""
    coarse, fine = one(0, mbs=2), one(1)
    channel = Channel(sender=coarse, receiver=fine, rank=rank, seq_length=SEQ_LENGTH, group=dist.group.WORLD)
    if rank == 0:
        microbatch_SBH = torch.ones(SEQ_LENGTH, 2, HIDDEN)
        pending = channel.send(microbatch_SBH, number=0)
        microbatch_SBH.zero_()
        dist.barrier()
        pending.wait()
        return 0.0
    dist.barrier()
    received_SBH = torch.full((SEQ_LENGTH, 1, HIDDEN), torch.nan)
    channel.receive(received_SBH, number=0).wait()
    return received_SBH.mean().item()


def test_a_slice_is_a_copy_of_its_part() -> None:
    """The runtime hands the rest of a microbatch on while a slice of it is under way."""
    assert run_ranks(overwrite_after_start, 2) == [0.0, 1.0]


def wait_twice(rank: int) -> tuple[bool, int]:
    channel = Channel(sender=one(0), receiver=one(1), rank=rank, seq_length=SEQ_LENGTH, group=dist.group.WORLD)
    tensor_SBH = torch.full((SEQ_LENGTH, 1, HIDDEN), float(rank))
    pending = channel.send(tensor_SBH, number=0) if rank == 0 else channel.receive(tensor_SBH, number=0)
    pending.wait()
    tensor_SBH.add_(5)
    pending.wait()
    return pending.finish_if_done(), int(tensor_SBH.sum().item()) // tensor_SBH.numel()


def test_waiting_again_does_nothing() -> None:
    assert run_ranks(wait_twice, 2) == [(True, 5), (True, 5)]


def idle_neighbour(rank: int) -> int:
    """Without sequence parallelism one of two equal senders has nothing to send to a single receiver."""
    channel = Channel(sender=one(0, 1, tp=2), receiver=one(2), rank=rank, seq_length=SEQ_LENGTH, group=dist.group.WORLD)
    tensor_SBH = torch.zeros(SEQ_LENGTH, 1, HIDDEN)
    pending = channel.receive(tensor_SBH, number=0) if rank == 2 else channel.send(tensor_SBH, number=0)
    messages = len(pending.works)
    pending.wait()
    return messages


def test_a_rank_without_messages_starts_none() -> None:
    assert run_ranks(idle_neighbour, 3) == [1, 0, 1]
