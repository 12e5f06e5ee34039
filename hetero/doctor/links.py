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
    rank = dist.get_rank()
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
            measured = [_measured(pair, hosts, device, share[0])]
        dist.broadcast_object_list(measured, src=pair[0])
        assert measured[0] is not None, "the first of the pair has it"
        found.append(measured[0])
    return found


def _measured(pair: tuple[int, int], hosts: Sequence[str], device: torch.device, seconds: float) -> MeasuredLink | None:
    """Of both ranks of ``pair``; the first one measures and decides, the second one follows."""
    first = dist.get_rank() == pair[0]
    peer = pair[1] if first else pair[0]
    start = time.monotonic()
    # Connecting is no part of the latency.
    round_trip_s(peer, torch.zeros(1, device=device), first=first)
    small_s = min(
        round_trip_s(peer, torch.zeros(SMALLEST_BYTES // 4, device=device), first=first) for _ in range(NUM_SMALL)
    )
    best_s, num_bytes = small_s, SMALLEST_BYTES
    for size in SIZES_BYTES:
        # At the pace of the last size, twice to warm up and measure.
        expected_s = best_s / num_bytes * size * (1 + NUM_LARGE) if num_bytes > SMALLEST_BYTES else 0.0
        goes_on = torch.tensor(float(time.monotonic() - start + expected_s < seconds), device=device)
        _send(peer, goes_on) if first else _receive(peer, goes_on)
        if not goes_on.item():
            break
        message = torch.zeros(size // 4, device=device)
        round_trip_s(peer, message, first=first)
        best_s = min(round_trip_s(peer, message, first=first) for _ in range(NUM_LARGE))
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


def round_trip_s(peer: int, message: torch.Tensor, *, first: bool) -> float:
    """Seconds of ``message`` to ``peer`` and back; the other rank does the same, and ``first`` sends first."""
    start = time.perf_counter()
    for sends in (first, not first):
        _send(peer, message) if sends else _receive(peer, message)
    return time.perf_counter() - start


def _send(peer: int, message: torch.Tensor) -> None:
    _finish(dist.P2POp(dist.isend, message, peer))


def _receive(peer: int, message: torch.Tensor) -> None:
    _finish(dist.P2POp(dist.irecv, message, peer))


def _finish(operation: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv([operation]):
        work.wait()
    if operation.tensor.device.type == "cuda":
        # On NCCL, waiting has only ordered the stream.
        torch.cuda.synchronize()
