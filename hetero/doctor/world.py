"""Looks at all hosts of a launch together: what they tell of themselves, and how they reach one another.

Facts and findings travel through the launcher's store, so that a network that does not work can be told.
"""

import dataclasses
import datetime
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from hetero.distributed.launch_store import read_text, tell, told_by_all
from hetero.doctor.channels import first_messages
from hetero.doctor.facts import HostFacts
from hetero.doctor.findings import Diagnosis, Finding, MeasuredLink, merged
from hetero.doctor.host_checks import check_host
from hetero.doctor.links import measure_links
from hetero.doctor.world_checks import check_links, check_world, sampled_pairs
from hetero.errors import ConfigError, HeteroError
from hetero.plan.ir import Plan
from hetero.serialization import from_json, to_json

TRY_S = 60.0
"""For one thing that ranks do together; where one of them cannot, the others wait for it as long as this."""


def exchanged_facts(store: dist.Store, facts: HostFacts, *, rank: int, world_size: int) -> list[HostFacts]:
    """The facts of all ranks; collective over the launch.

    Raises:
        MembershipError: some rank has not told its own in time.
    """
    tell(store, facts, rank=rank)
    return told_by_all(store, HostFacts, world_size=world_size)


def check_facts(ranks: Sequence[HostFacts], *, shares_devices: bool = False) -> tuple[Finding, ...]:
    """What the facts of all ranks say, before any of them has talked to another but through the store.

    shares_devices: more ranks than devices of a host are meant to share them.
    """
    by_host = {facts.host: facts for facts in reversed(ranks)}
    findings: list[Finding] = []
    for facts in reversed(by_host.values()):
        findings += [_of_host(finding, facts.host) for finding in check_host(facts)]
    return (*merged(findings, num_hosts=len(by_host)), *check_world(ranks, shares_devices=shares_devices))


class Trial:
    """Lets ranks try things together, one after the other, and keeps what came of them on this rank.

    Once something has failed on a rank nothing more is tried there: the others would be left waiting in other places.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self.findings: list[Finding] = []
        self.failed = False

    def attempt(self, subject: str, action: Callable[[], str], *, todo: str) -> None:
        """Do ``action``, which returns what was found; whatever it raises becomes a problem."""
        if self.failed:
            return
        try:
            said = action()
        except Exception as error:  # noqa: BLE001  (whatever it is, it is what the user wants to know)
            self.failed = True
            detail = str(error).strip() or type(error).__name__
            if not isinstance(error, HeteroError):
                traceback.print_exception(error)
                detail = detail.splitlines()[0]
            self.findings.append(
                Finding(severity="problem", subject=subject, found=detail, todo=todo, hosts=(self._host,))
            )
        else:
            self.findings.append(Finding(severity="ok", subject=subject, found=said, hosts=(self._host,)))


def try_together(
    trial: Trial, ranks: Sequence[HostFacts], device: torch.device, *, plan: Plan | None, link_seconds: float
) -> list[MeasuredLink]:
    """Sum over all ranks, measure links and send first messages; collective over the world, which has been joined.

    Returns the links, as all ranks know them.
    """
    links: list[MeasuredLink] = []
    hosts = [facts.host for facts in ranks]
    pairs = sampled_pairs(hosts)

    def sums(on: torch.device) -> str:
        total = torch.ones(1, device=on)
        dist.all_reduce(total)
        if int(total.item()) != len(ranks):
            raise RuntimeError(f"a sum of ones over {len(ranks)} ranks gave {total.item():g}")
        return f"a sum over {len(ranks)} ranks"

    def measures() -> str:
        links.extend(measure_links(pairs, hosts=hosts, device=device, seconds=link_seconds))
        return f"{len(links)} of {len(pairs)} sampled pairs of ranks measured"

    def connects(wanted: Plan) -> str:
        if wanted.world_size != len(ranks):
            raise ConfigError(f"--plan: it is for {wanted.world_size} ranks, this launch has {len(ranks)}")
        first_messages(wanted, device=device)
        boundaries = sum(len(replica.stages) - 1 for replica in wanted.replicas)
        return f"a first message went over both directions of {boundaries} boundaries"

    debug = "run it again with NCCL_DEBUG=INFO"
    trial.attempt("gloo", lambda: sums(torch.device("cpu")), todo="set GLOO_SOCKET_IFNAME; look for a firewall")
    if device.type == "cuda":
        trial.attempt("NCCL", lambda: sums(device), todo=debug)
    if link_seconds > 0 and pairs:
        trial.attempt("links", measures, todo=debug)
    if plan is not None:
        trial.attempt("channels of the plan", lambda: connects(plan), todo=debug)
    return links


def collected(store: dist.Store, found: Diagnosis, *, rank: int, world_size: int) -> Iterator[Diagnosis]:
    """On rank 0, what every rank has found; the others tell it and get nothing."""
    store.set(f"found/{rank}", to_json(found))
    if rank == 0:
        for each in range(world_size):
            key = f"found/{each}"
            try:
                # A rank may still wait for another that has failed.
                store.wait([key], datetime.timedelta(seconds=2 * TRY_S))
            except dist.DistError:
                lost = Finding(severity="problem", subject=f"rank {each}", found="it died while ranks met")
                yield Diagnosis(hosts=(), findings=(lost,))
            else:
                yield from_json(Diagnosis, read_text(store, key), source=f"rank {each}")


def world_findings(of_ranks: Sequence[Diagnosis], *, num_hosts: int) -> tuple[Finding, ...]:
    """What came of meeting: findings that hosts share once, and links held against one another."""
    links = next((found.links for found in of_ranks if found.links), ())
    findings = merged((each for found in of_ranks for each in found.findings), num_hosts=num_hosts)
    return (*findings, *check_links(links))


def _of_host(finding: Finding, host: str) -> Finding:
    return dataclasses.replace(finding, hosts=(host,))
