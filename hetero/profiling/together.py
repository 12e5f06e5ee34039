"""Measures as the ranks of a launch: one rank of each kind of device its profiles, then all together their links."""

import argparse
import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hetero.distributed.launch_store import launch_store, read_text, tell, told_by_all
from hetero.distributed.shared_devices import check_nccl_of_shared_devices, sharing_note
from hetero.distributed.world import join_world
from hetero.errors import HeteroError, MembershipError
from hetero.profiling.device_run import keep_busy, measure_device
from hetero.profiling.measured_links import MeasuredLinks, measured_links
from hetero.profiling.rank_links import (
    RankDevice,
    check_shared_devices,
    measure_transfers,
    measuring_ranks,
    ranks_by_gpu,
)
from hetero.profiling.requested_profiles import ProfiledDevice, versions_of
from hetero.serialization import save
from hetero.spec.profile import Provenance

SLACK_S = 300.0
"""Beyond the budget, for libraries to load, to warm up, and for the last point, until a rank counts as lost."""

LINKS = "links.json"

DONE = "done"


def measure_together(
    args: argparse.Namespace, on: ProfiledDevice, *, date: str, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Measure as a rank of a launch; collective over it. Rank 0 writes the links, each measuring rank its profiles.

    Returns:
        On rank 0 the files, as ``profiles`` and ``links``, which may be ``None``; nothing elsewhere.

    Raises:
        ConfigError: as :func:`.measure_device`, on the rank that measures; or ranks are on one device, on all ranks.
        MembershipError: another rank did not arrive, or could not measure.
    """
    store, rank, world_size = launch_store("profile")
    tell(store, RankDevice(node=on.node, device=on.type.name, hardware=on.hardware, uuid=_uuid(on.device)), rank=rank)
    ranks = told_by_all(store, RankDevice, world_size=world_size)
    if not args.share_devices:
        check_shared_devices(ranks)
    elif on.device.type == "cuda" and args.link_seconds > 0:
        check_nccl_of_shared_devices(flag="--share-devices", cuda=torch.version.cuda)
    if rank == 0 and (sharing := ranks_by_gpu(ranks)):
        say(f"devices: {sharing_note(sum(map(len, sharing)), len(sharing))}")
    measuring = measuring_ranks(ranks)
    last_measured_by_s = time.monotonic() + args.budget_seconds + SLACK_S
    on = dataclasses.replace(on, num_beside=world_size - 1, is_shared=bool(ranks_by_gpu(ranks)))
    if rank in measuring.values():
        outcome = "it ended"
        try:
            written = measure_device(args, on, date=date, say=say)
            store.set(f"profiles/{rank}", "\n".join(map(str, written)))
            outcome = DONE
        except HeteroError as error:
            outcome = str(error)
            raise
        finally:
            store.set(f"measured/{rank}", outcome)
    else:
        all_measured = [f"measured/{each}" for each in measuring.values()]
        keep_busy(
            args, on, date=date, is_over=lambda: store.check(all_measured) or time.monotonic() > last_measured_by_s
        )
    _wait(store, measuring, until_s=last_measured_by_s)
    if args.link_seconds > 0:
        links = _links(
            args,
            on,
            ranks,
            dist.PrefixStore("links", store),
            rank=rank,
            say=say if rank == 0 else lambda _: None,
            date=date,
        )
        if rank == 0:
            _write(links, args, say)
    if rank > 0:
        return None
    profiles = [path for each in measuring.values() for path in read_text(store, f"profiles/{each}").split("\n")]
    return {"profiles": profiles, "links": str(args.out / LINKS) if args.link_seconds > 0 else None}


def _uuid(device: torch.device) -> str | None:
    """Return what CUDA calls a GPU, different for parts of one (MIG); ``None`` of a processor."""
    if device.type != "cuda":
        return None
    # torch's stubs do not know it.
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)


def _wait(store: dist.Store, measuring: Mapping[str, int], *, until_s: float) -> None:
    for device, rank in measuring.items():
        seconds = max(1.0, until_s - time.monotonic())
        try:
            store.wait([f"measured/{rank}"], datetime.timedelta(seconds=seconds))
            said = read_text(store, f"measured/{rank}")
        except dist.DistError:
            said = "it has not been heard of in its time"
        if said != DONE:
            raise MembershipError(f"rank {rank}, which measures {device}: {said}")


def _links(
    args: argparse.Namespace,
    on: ProfiledDevice,
    ranks: Sequence[RankDevice],
    store: dist.Store,
    *,
    rank: int,
    say: Callable[[str], None],
    date: str,
) -> MeasuredLinks:
    device = on.device
    join_world(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=len(ranks),
        timeout=datetime.timedelta(seconds=args.link_seconds + SLACK_S),
    )
    transfers = measure_transfers(ranks, device=device, seconds=args.link_seconds, say=say)
    dist.barrier()
    dist.destroy_process_group()
    return measured_links(
        transfers,
        Provenance(
            measured_by="hetero profile run",
            source=f"hetero profile run, {date}, on {', '.join(dict.fromkeys(each.node for each in ranks))}",
            licence="that of whoever measured",
            date=date,
            command=args.command_line,
            versions=versions_of(on.facts),
        ),
    )


def _write(links: MeasuredLinks, args: argparse.Namespace, say: Callable[[str], None]) -> None:
    path = args.out / LINKS
    save(links, path)
    say(f"{path}: {len(links.transfers)} operations; into the cluster file go")
    for inside in links.inside_nodes:
        link = inside.inside_node
        say(
            f"  inside_node: {{bandwidth_gb_per_s: {link.bandwidth_gb_per_s:g}, latency_us: {link.latency_us:g}}}"
            f"  # of node types with {inside.device}; all_reduce_inside_node is in the file"
        )
    for between in links.between_nodes:
        link = between.link
        say(
            f"  link: {{bandwidth_gb_per_s: {link.bandwidth_gb_per_s:g}, latency_us: {link.latency_us:g}}}"
            f"  # between nodes with {' and '.join(between.devices)}"
        )
