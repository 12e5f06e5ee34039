"""Runs ``hetero doctor`` as a rank of a launch: all ranks tell their facts, join one process group, and try it."""

import datetime
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hetero.distributed.environment import local_place
from hetero.distributed.launch_store import launch_store
from hetero.distributed.shared_devices import index_of_device
from hetero.distributed.world import join_world
from hetero.doctor.facts import HostFacts
from hetero.doctor.findings import Diagnosis
from hetero.doctor.world import (
    TRY_S,
    Trial,
    check_facts,
    collected,
    exchanged_facts,
    try_together,
    world_findings,
)
from hetero.plan.ir import Plan


def look_together(
    facts: HostFacts, *, plan: Plan | None, link_seconds: float, shares_devices: bool
) -> Iterator[Diagnosis]:
    """Look at all hosts; collective over the launch. Yields on rank 0 alone.

    First what the facts of all ranks say, so that it has been told if the network then stands still, then what came of
    meeting.

    Raises:
        MembershipError: some rank did not arrive, or none reaches the store; on those that did.
    """
    store, rank, world_size = launch_store("doctor")
    ranks = exchanged_facts(store, facts, rank=rank, world_size=world_size)
    hosts = tuple({each.host: each for each in reversed(ranks)}.values())[::-1]
    if rank == 0:
        yield Diagnosis(hosts=hosts, findings=check_facts(ranks, shares_devices=shares_devices))
    trial = Trial(facts.host)
    device = _device(ranks, rank, shares_devices=shares_devices)

    def joins() -> str:
        join_world(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("world", store),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=TRY_S),
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return f"{world_size} ranks"

    trial.attempt("process group", joins, todo="set GLOO_SOCKET_IFNAME; look for a firewall between the hosts")
    links = try_together(trial, ranks, device, plan=plan, link_seconds=link_seconds)
    found = Diagnosis(hosts=(), findings=tuple(trial.findings), links=tuple(links))
    of_ranks = list(collected(store, found, rank=rank, world_size=world_size))
    if rank == 0:
        findings = world_findings(of_ranks, num_hosts=len(hosts))
        yield Diagnosis(hosts=(), findings=findings, links=tuple(links))
    if dist.is_initialized() and not trial.failed:
        dist.destroy_process_group()


def _device(ranks: Sequence[HostFacts], rank: int, *, shares_devices: bool) -> torch.device:
    """Return the device of this rank if all ranks have one, else the processor."""
    indices = [
        index_of_device(local_place(facts.environment)[0], len(facts.gpus), shares_devices=shares_devices)
        for facts in ranks
    ]
    index = indices[rank]
    return torch.device("cpu") if index is None or None in indices else torch.device("cuda", index)
