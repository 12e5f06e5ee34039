"""Measures links between ranks, one pair at a time, and stops when the time for it is over."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hetero.doctor.findings import MeasuredLink
from hetero.units import MIB

SMALLEST_BYTES = 4
NUM_SMALL = 10
"""Round trips of the smallest message; the fastest one counts."""

SIZES_BYTES = (MIB, 16 * MIB, 128 * MIB)
"""Of messages, growing; the last for which there is time says what the link can do."""

NUM_LARGE = 3


def measure_links(
    pairs: Sequence[tuple[int, int]], *, hosts: Sequence[str], device: torch.device, seconds: float
) -> list[MeasuredLink]:
    """What each of ``pairs`` measured, as long as there is time; the same on every rank.

    Collective over the world, whose ranks wait while a pair measures, so that nobody disturbs it.

    hosts: by rank.
    seconds: for all pairs together; a pair that has begun is brought to its end.
    """
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None, "init_process_group comes first"
    # NCCL creates a communicator with all of its ranks at the first call, and waits for them: a message has only two.
    dist.all_reduce(torch.zeros(1, device=device), group=world)
    deadline = time.monotonic() + seconds
    found: list[MeasuredLink] = []
    for number, pair in enumerate(pairs):
        # What is left is shared by the pairs that are left, and rank 0's clock decides.
        share = [(deadline - time.monotonic()) / (len(pairs) - number)]
        dist.broadcast_object_list(share, src=0)
        if share[0] <= 0:
            break
        measured: list[MeasuredLink | None] = [None]
        if rank in pair:
            measured = [_measured(pair, world, hosts, device, share[0])]
        dist.broadcast_object_list(measured, src=pair[0])
        assert measured[0] is not None, "the first of the pair has it"
        found.append(measured[0])
    return found


def _measured(
    pair: tuple[int, int], group: dist.ProcessGroup, hosts: Sequence[str], device: torch.device, seconds: float
) -> MeasuredLink | None:
    """Measure the link of ``pair``, on both of its ranks: the first one measures and decides, the second one follows.

    Args:
        group: over which messages go; all of its ranks have met.

    Returns:
        The link on the first rank, ``None`` on the second.
    """
    first = dist.get_rank() == pair[0]
    peer = pair[1] if first else pair[0]
    start = time.monotonic()
    # Connecting is no part of the latency.
    round_trip_s(peer, torch.zeros(1, device=device), group, first=first)
    small_s = min(
        round_trip_s(peer, torch.zeros(SMALLEST_BYTES // 4, device=device), group, first=first)
        for _ in range(NUM_SMALL)
    )
    best_s, num_bytes = small_s, SMALLEST_BYTES
    for size in SIZES_BYTES:
        # At the pace of the last size, twice to warm up and measure.
        expected_s = best_s / num_bytes * size * (1 + NUM_LARGE) if num_bytes > SMALLEST_BYTES else 0.0
        goes_on = torch.tensor(float(time.monotonic() - start + expected_s < seconds), device=device)
        _send(peer, goes_on, group) if first else _receive(peer, goes_on, group)
        if not goes_on.item():
            break
        message = torch.zeros(size // 4, device=device)
        round_trip_s(peer, message, group, first=first)
        best_s = min(round_trip_s(peer, message, group, first=first) for _ in range(NUM_LARGE))
        num_bytes = size
    if not first:
        return None
    return MeasuredLink(
        ranks=pair,
        hosts=(hosts[pair[0]], hosts[pair[1]]),
        bytes_per_s=2 * num_bytes / best_s,
        message_bytes=num_bytes,
        latency_s=small_s / 2,
    )


def round_trip_s(peer: int, message: torch.Tensor, group: dist.ProcessGroup, *, first: bool) -> float:
    """Return the seconds of ``message`` to ``peer`` and back; the other rank does the same.

    Args:
        peer: the other rank, by its number in the world.
        group: over which it goes; all of its ranks have met in a collective.
        first: whether this rank sends first.
    """
    start = time.perf_counter()
    for sends in (first, not first):
        _send(peer, message, group) if sends else _receive(peer, message, group)
    return time.perf_counter() - start


def _send(peer: int, message: torch.Tensor, group: dist.ProcessGroup) -> None:
    _finish(dist.P2POp(dist.isend, message, peer, group))


def _receive(peer: int, message: torch.Tensor, group: dist.ProcessGroup) -> None:
    _finish(dist.P2POp(dist.irecv, message, peer, group))


def _finish(operation: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv([operation]):
        work.wait()
    if operation.tensor.device.type == "cuda":
        # On NCCL, waiting has only ordered the stream.
        torch.cuda.synchronize()
