"""Checks what the hosts of a launch have to have in common, and whether links of a kind are alike."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from hetero.distributed.shared_devices import can_share_devices, install_nccl, sharing_note
from hetero.doctor.facts import HostFacts
from hetero.doctor.findings import Finding, MeasuredLink, Severity
from hetero.text import number_ranges
from hetero.units import GB, US_PER_S

SLOW_LINK = 3.0
"""Heuristic: links of a kind differ by less, unless one of them is not what it should be."""

PER_HOST = ("_IFNAME", "_HCA", "NCCL_DEBUG", "NCCL_TOPO_FILE", "NCCL_CONF_FILE", "NCCL_HOSTID")
"""Ends or names of variables that hosts may have of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedVersion:
    """Something that all ranks are to have in one version, and how bad it is if they have not."""

    subject: str
    of: Callable[[HostFacts], str | None]
    severity: Severity
    todo: str


SHARED = (
    SharedVersion(
        subject="NCCL",
        of=lambda facts: facts.torch.nccl if facts.torch is not None else None,
        severity="problem",
        todo=(
            "NCCL refuses to connect other versions: install the same nvidia-nccl-cu12 or -cu13 on all hosts "
            "(docs/install.md)"
        ),
    ),
    SharedVersion(
        subject="torch",
        of=lambda facts: facts.torch.version.partition("+")[0] if facts.torch is not None else None,
        severity="problem",
        todo="install the same torch on all hosts; its CUDA may differ, as long as NCCL is one",
    ),
    SharedVersion(
        subject="megatron-core",
        of=lambda facts: facts.packages.get("megatron-core"),
        severity="problem",
        todo="install the same megatron-core on all hosts",
    ),
    SharedVersion(
        subject="megatron-hetero",
        of=lambda facts: facts.packages.get("megatron-hetero"),
        severity="problem",
        todo="install the same megatron-hetero on all hosts",
    ),
    SharedVersion(
        subject="Python",
        of=lambda facts: ".".join(facts.python.split(".")[:2]),
        severity="warning",
        todo="make the environments with one Python",
    ),
    SharedVersion(
        subject="TransformerEngine",
        of=lambda facts: facts.packages.get("transformer-engine"),
        severity="warning",
        todo="install the same TransformerEngine on all hosts whose devices run it",
    ),
)


def check_versions(ranks: Sequence[HostFacts]) -> Iterator[Finding]:
    """Compare the versions of all ranks; those that have none are left out, as devices differ in what they run.

    ranks: facts by rank.
    """
    for shared in SHARED:
        hosts_of: dict[str, dict[str, None]] = {}
        for facts in ranks:
            version = shared.of(facts)
            if version is not None:
                hosts_of.setdefault(version, {})[facts.host] = None
        if len(hosts_of) > 1:
            found = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in hosts_of.items())
            yield Finding(
                severity=shared.severity, subject=f"{shared.subject}, all hosts", found=found, todo=shared.todo
            )
        elif hosts_of:
            yield Finding(severity="ok", subject=f"{shared.subject}, all hosts", found=next(iter(hosts_of)))


def check_shared_variables(ranks: Sequence[HostFacts]) -> Iterator[Finding]:
    """Compare NCCL's variables but those that are a host's own: a transport that one side has cannot be used."""
    names = {name for facts in ranks for name in facts.environment if name.startswith("NCCL_")}
    for name in sorted(name for name in names if not any(part in name for part in PER_HOST)):
        hosts_of: dict[str | None, dict[str, None]] = {}
        for facts in ranks:
            hosts_of.setdefault(facts.environment.get(name), {})[facts.host] = None
        if len(hosts_of) > 1:
            found = "; ".join(f"{value or 'not set'} on {', '.join(hosts)}" for value, hosts in hosts_of.items())
            yield Finding(
                severity="warning", subject=f"{name}, all hosts", found=found, todo="set it on all hosts or on none"
            )


def check_ranks(ranks: Sequence[HostFacts], *, shares_devices: bool) -> Iterator[Finding]:
    """No host starts more ranks than it has devices, or they may share them; the ranks of a host follow one another."""
    ranks_of: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        ranks_of.setdefault(facts.host, []).append(rank)
    said = "; ".join(f"{host}: {number_ranges(held)}" for host, held in ranks_of.items())
    for host, held in ranks_of.items():
        facts = ranks[held[0]]
        if 0 < len(facts.gpus) < len(held):
            yield dataclasses.replace(_sharing(facts, len(held), shares_devices=shares_devices), hosts=(host,))
        if held != list(range(held[0], held[0] + len(held))):
            yield Finding(
                severity="warning",
                subject="ranks",
                found=f"ranks {number_ranges(held)} are on it, others between them elsewhere",
                todo="give torchrun a --node-rank for every host: plans count the ranks of a host one after the other",
                hosts=(host,),
            )
    hosts = f"{len(ranks_of)} host{'s' if len(ranks_of) > 1 else ''}"
    yield Finding(severity="ok", subject="ranks", found=f"{len(ranks)} on {hosts} ({said})")


def _sharing(facts: HostFacts, num_ranks: int, *, shares_devices: bool) -> Finding:
    """Judge a host with more ranks than devices."""
    todo = "start one rank per device: torchrun --nproc-per-node"
    if not shares_devices:
        return Finding(
            severity="problem",
            subject="ranks",
            found=f"{num_ranks} ranks on {len(facts.gpus)} devices",
            todo=f"{todo}; or add --share-devices to try something out",
        )
    nccl, cuda = (facts.torch.nccl, facts.torch.cuda) if facts.torch is not None else (None, None)
    if not can_share_devices(nccl):
        return Finding(
            severity="problem",
            subject="ranks",
            found=f"{num_ranks} ranks share {len(facts.gpus)} devices, which NCCL {nccl} refuses",
            todo=f"run: {install_nccl(cuda)}; or {todo}",
        )
    return Finding(severity="warning", subject="ranks", found=sharing_note(num_ranks, len(facts.gpus)), todo=todo)


def sampled_pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of ranks whose link is worth measuring, the most telling first: there may not be time for all.

    One pair inside of each host, then the first ranks of each two hosts, nearest hosts first, then the other neighbours
    inside of hosts.

    hosts: by rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    inside = [list(pairwise(ranks)) for ranks in ranks_of.values()]
    firsts = [ranks[0] for ranks in ranks_of.values()]
    distant = sorted(combinations(range(len(firsts)), 2), key=lambda pair: pair[1] - pair[0])
    between = [(firsts[a], firsts[b]) for a, b in distant]
    return [pairs[0] for pairs in inside if pairs] + between + [pair for pairs in inside for pair in pairs[1:]]


def check_links(links: Sequence[MeasuredLink]) -> Iterator[Finding]:
    """Say how fast links are, and name those that are much slower than others of their kind."""
    for kind, inside in (("inside a host", True), ("between hosts", False)):
        alike = [link for link in links if link.is_inside_a_host == inside]
        if not alike:
            continue
        median = statistics.median(link.bytes_per_s for link in alike)
        yield Finding(
            severity="ok",
            subject=f"links {kind}",
            found=(
                f"{_range([f'{link.bytes_per_s / GB:.3g}' for link in alike])} GB/s, "
                f"{_range([f'{link.latency_s * US_PER_S:.0f}' for link in alike])} us"
            ),
        )
        for link in alike:
            if link.bytes_per_s * SLOW_LINK < median:
                yield Finding(
                    severity="warning",
                    subject=f"links {kind}",
                    found=(
                        f"ranks {link.ranks[0]} and {link.ranks[1]}: {link.bytes_per_s / GB:.3g} GB/s, "
                        f"the median is {median / GB:.3g}"
                    ),
                    todo=(
                        "look at nvidia-smi topo -m and NCCL_DEBUG=INFO: which transport does NCCL take there?"
                        if inside
                        else "look at the port, and at NCCL_SOCKET_IFNAME and NCCL_IB_HCA of both hosts"
                    ),
                    hosts=tuple(dict.fromkeys(link.hosts)),
                )


def _range(numbers: Sequence[str]) -> str:
    """From the least to the largest, once if they are equal."""
    least, largest = min(numbers, key=float), max(numbers, key=float)
    return least if least == largest else f"{least} to {largest}"


def check_world(ranks: Sequence[HostFacts], *, shares_devices: bool = False) -> tuple[Finding, ...]:
    """What follows from the facts of all ranks together.

    shares_devices: more ranks than devices of a host are meant to share them.
    """
    return (*check_ranks(ranks, shares_devices=shares_devices), *check_versions(ranks), *check_shared_variables(ranks))
