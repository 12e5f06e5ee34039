"""Measures links between the ranks of a launch by transfers of growing size, one group of ranks at a time."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from pydantic import ConfigDict

from hetero.distributed.process_groups import create_group
from hetero.doctor.links import round_trip_s
from hetero.errors import ConfigError
from hetero.profiling.figures import rounded
from hetero.profiling.measured_links import COLLECTIVES, MeasuredTransfer, Operation, fit_link
from hetero.serialization import STRICT
from hetero.text import number_ranges
from hetero.units import MIB

SIZES_BYTES = (1024, 16 * 1024, 256 * 1024, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""In powers of four; the first two are measured whatever time there is, as a line has two ends."""

NUM_REPETITIONS = 5
"""Of each size, beside one to warm up. The median counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDevice:
    """What a rank tells the others of itself.

    node: its name.
    device: its type; ``hardware`` is what it calls itself.
    uuid: of its GPU, or part of one (MIG); ``None`` of a processor.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    node: str
    device: str
    hardware: str
    uuid: str | None = None


def ranks_by_gpu(ranks: Sequence[RankDevice]) -> list[list[int]]:
    """Return the ranks of each GPU, of those that several ranks share."""
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(ranks):
        if each.uuid is not None:
            found.setdefault(each.uuid, []).append(rank)
    return [sharing for sharing in found.values() if len(sharing) > 1]


def check_shared_devices(ranks: Sequence[RankDevice]) -> None:
    """Check that no two ranks measure on one GPU.

    Raises:
        ConfigError: some do.
    """
    for sharing in ranks_by_gpu(ranks):
        on = ranks[sharing[0]]
        raise ConfigError(
            f"ranks {number_ranges(sharing)} are on one device of {on.node}, {on.hardware}: start one rank per device, "
            "or add --share-devices to try a launch out, whose times mean nothing"
        )


def measuring_ranks(ranks: Sequence[RankDevice]) -> dict[str, int]:
    """By device type, the rank that measures it: the first one that has it.

    Raises:
        ConfigError: two kinds of devices are called alike.
    """
    found: dict[str, int] = {}
    for rank, each in enumerate(ranks):
        first = found.setdefault(each.device, rank)
        if ranks[first].hardware != each.hardware:
            raise ConfigError(
                f"ranks {first} and {rank} are both called {each.device!r}, but are {ranks[first].hardware} and "
                f"{each.hardware}; measure them in launches of their own, each with its --device-type"
            )
    return found


class Task(NamedTuple):
    """An operation that is to be measured among these ranks."""

    operation: Operation
    ranks: tuple[int, ...]


def tasks(of_ranks: Sequence[RankDevice]) -> list[Task]:
    """What is measured of a launch: of all nodes of a kind one stands for all, the first.

    Inside a node with several ranks, a message between two, and every collective among all of them; all-reduces also
    among 2, 4, ... of them. Between nodes, a message between every two kinds of devices. Among all ranks, if they are
    on several nodes, every collective.
    """
    found: list[Task] = []
    by_node: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(of_ranks):
        by_node.setdefault((each.node, each.device), []).append(rank)
    firsts: dict[str, list[int]] = {}
    for (_, device), ranks in by_node.items():
        if len(ranks) > 1:
            firsts.setdefault(device, ranks)
    for ranks in firsts.values():
        found.append(Task("send", (ranks[0], ranks[1])))
        found += [Task("all_reduce", tuple(ranks[:size])) for size in _powers(len(ranks))]
        found += [Task(operation, tuple(ranks)) for operation in COLLECTIVES if operation != "all_reduce"]
    seen = set()
    for ((node_a, a), ranks_a), ((node_b, b), ranks_b) in itertools.combinations(by_node.items(), 2):
        pair = tuple(sorted((a, b)))
        if node_a != node_b and pair not in seen:
            seen.add(pair)
            found.append(Task("send", (ranks_a[0], ranks_b[0])))
    if len({each.node for each in of_ranks}) > 1:
        found += [Task(operation, tuple(range(len(of_ranks)))) for operation in COLLECTIVES]
    return found


def _powers(most: int) -> list[int]:
    """2, 4, ... and ``most``."""
    return sorted({*(2**power for power in range(1, most.bit_length()) if 2**power <= most), most})


def measure_transfers(
    of_ranks: Sequence[RankDevice], *, device: torch.device, seconds: float, say: Callable[[str], None]
) -> list[MeasuredTransfer]:
    """Measure :func:`tasks`, each for its share of ``seconds``; the same list on every rank.

    Collective over the world, whose ranks wait while a group measures, so that nobody disturbs it.
    """
    rank, wanted = dist.get_rank(), tasks(of_ranks)
    # Every rank makes every group, in one order.
    groups = {ranks: create_group(ranks) for ranks in dict.fromkeys(task.ranks for task in wanted)}
    deadline = time.monotonic() + seconds
    found: list[MeasuredTransfer] = []
    for number, task in enumerate(wanted):
        measured: list[tuple[tuple[int, float], ...]] = [()]
        if rank in task.ranks:
            share_s = (deadline - time.monotonic()) / (len(wanted) - number)
            measured = [tuple(_measured(task, groups[task.ranks], device, share_s))]
        dist.broadcast_object_list(measured, src=task.ranks[0])
        link, worst = fit_link(measured[0])
        members = [of_ranks[each] for each in task.ranks]
        found.append(
            MeasuredTransfer(
                operation=task.operation,
                ranks=task.ranks,
                nodes=tuple(each.node for each in members),
                devices=tuple(each.device for each in members),
                times=measured[0],
                fit=link,
                worst_error=worst,
            )
        )
        say(
            f"[{number + 1}/{len(wanted)}] {task.operation} among ranks {', '.join(map(str, task.ranks))}: "
            f"{link.bandwidth_gb_per_s:g} GB/s, latency {link.latency_us:g} us (line off by up to {worst:z.0%})"
        )
    return found


def _measured(
    task: Task, group: dist.ProcessGroup, device: torch.device, seconds: float
) -> Iterator[tuple[int, float]]:
    """Bytes and seconds of each size, on all ranks of ``task``, as the clock of the first one has them and decides."""
    first, start = task.ranks[0] == dist.get_rank(), time.monotonic()
    last_s, last_bytes = 0.0, SIZES_BYTES[0]
    for number, size in enumerate(SIZES_BYTES):
        expected_s = last_s * size / last_bytes * (1 + NUM_REPETITIONS)
        in_time = time.monotonic() - start + expected_s < seconds
        goes_on = torch.tensor(float(number < 2 or in_time), device=device)
        dist.broadcast(goes_on, src=task.ranks[0], group=group)
        if not goes_on.item():
            return
        operation = _operation(task, group, device, size, first=first)
        operation()
        last_s, last_bytes = statistics.median(operation() for _ in range(NUM_REPETITIONS)), size
        yield size, rounded(last_s)


def _operation(
    task: Task, group: dist.ProcessGroup, device: torch.device, num_bytes: int, *, first: bool
) -> Callable[[], float]:
    """The operation on ``num_bytes``, which returns its seconds; all ranks begin it together.

    A message goes over the group of its two ranks too: NCCL would let them wait at one of more ranks, for the others.
    """
    numel = num_bytes // 4 // len(task.ranks) * len(task.ranks)
    whole = torch.zeros(numel, device=device)
    part = torch.zeros(numel // len(task.ranks), device=device)
    if task.operation == "send":
        peer = task.ranks[1] if first else task.ranks[0]
        return lambda: round_trip_s(peer, whole, group, first=first) / 2
    run: Callable[[], object] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, src=task.ranks[0], group=group),
    }[task.operation]

    def timed() -> float:
        dist.barrier(group=group)
        _finish(device)
        start = time.perf_counter()
        run()
        _finish(device)
        return time.perf_counter() - start

    return timed


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
