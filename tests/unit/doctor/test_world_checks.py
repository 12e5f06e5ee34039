"""What hosts have to have in common is compared, and differences are named with their hosts."""

import dataclasses

import pytest

from hetero.doctor.facts import HostFacts
from hetero.doctor.findings import Diagnosis, Finding, MeasuredLink, joined, merged
from hetero.doctor.world_checks import check_links, check_world, sampled_pairs
from hetero.serialization import from_json, to_json
from tests.unit.doctor.samples import A100, V100, host, rank_of, torch_of


def launch(*hosts: HostFacts, per_host: int = 2) -> list[HostFacts]:
    """As many ranks on each."""
    world_size = per_host * len(hosts)
    return [
        rank_of(hosts[rank // per_host], rank, world_size=world_size, local_world_size=per_host)
        for rank in range(world_size)
    ]


def faults(ranks: list[HostFacts]) -> list[Finding]:
    return [finding for finding in check_world(ranks) if finding.severity != "ok"]


SLOW = host(V100, host="slow")


def test_unlike_devices_with_one_nccl_are_fine() -> None:
    """The V100's torch is of another CUDA, and has no TransformerEngine: neither has to be the same."""
    assert faults(launch(host(), SLOW)) == []


@pytest.mark.parametrize(
    ("other", "severity", "subject", "says"),
    [
        (
            dataclasses.replace(SLOW, torch=torch_of(V100, nccl="2.29.3")),
            "problem",
            "NCCL, all hosts",
            "2.29.7 on fast; 2.29.3 on slow",
        ),
        (
            dataclasses.replace(SLOW, torch=torch_of(V100, version="2.12.0+cu126")),
            "problem",
            "torch, all hosts",
            "2.11.0 on fast; 2.12.0 on slow",
        ),
        (
            dataclasses.replace(SLOW, packages={**SLOW.packages, "megatron-hetero": "0.1.0"}),
            "problem",
            "megatron-hetero, all hosts",
            "0.2.0 on fast; 0.1.0 on slow",
        ),
        (dataclasses.replace(SLOW, python="3.11.9"), "warning", "Python, all hosts", "3.12 on fast; 3.11 on slow"),
        (
            dataclasses.replace(SLOW, environment={"NCCL_ALGO": "Ring"}),
            "warning",
            "NCCL_ALGO, all hosts",
            "not set on fast; Ring on slow",
        ),
    ],
)
def test_what_differs_is_named_by_host(other: HostFacts, severity: str, subject: str, says: str) -> None:
    (found,) = faults(launch(host(), other))
    assert (found.severity, found.subject, found.found) == (severity, subject, says)
    assert found.todo


def test_a_host_may_have_interfaces_of_its_own() -> None:
    other = dataclasses.replace(SLOW, environment={"NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "mlx5_1"})
    assert faults(launch(host(environment={"NCCL_SOCKET_IFNAME": "eth0"}), other)) == []


def test_more_ranks_than_devices_are_a_problem() -> None:
    (found,) = faults(launch(host(), dataclasses.replace(SLOW, torch=torch_of(V100, num_gpus=1))))
    assert (found.severity, found.hosts) == ("problem", ("slow",))
    assert "--share-devices" in found.todo


@pytest.mark.parametrize(
    ("nccl", "severity", "says"),
    [
        ("2.30.7", "warning", "2 ranks share 1 device: times of this run mean nothing"),
        ("2.28.9", "problem", "2 ranks share 1 devices, which NCCL 2.28.9 refuses"),
    ],
)
def test_ranks_may_share_devices_where_nccl_lets_them(nccl: str, severity: str, says: str) -> None:
    one = dataclasses.replace(SLOW, torch=torch_of(V100, num_gpus=1, nccl=nccl))
    found = [each for each in check_world(launch(one), shares_devices=True) if each.severity != "ok"]
    assert [(each.severity, each.hosts) for each in found] == [(severity, ("slow",))]
    assert found[0].found.startswith(says)
    assert ("nvidia-nccl-cu12>=2.30" in found[0].todo) == (severity == "problem")


def test_ranks_of_a_host_follow_one_another() -> None:
    first, second = launch(host(), SLOW, per_host=1)
    (found,) = faults([first, second, first])
    assert (found.severity, found.hosts) == ("warning", ("fast",))
    assert "--node-rank" in found.todo


def test_pairs_are_sampled_inside_and_between_hosts() -> None:
    assert sampled_pairs(["a", "a", "a", "b", "b", "c"]) == [(0, 1), (3, 4), (0, 3), (3, 5), (0, 5), (1, 2)]
    assert sampled_pairs(["a"]) == []


def link(ranks: tuple[int, int], hosts: tuple[str, str], gb_per_s: float) -> MeasuredLink:
    return MeasuredLink(ranks=ranks, hosts=hosts, bytes_per_s=gb_per_s * 1e9, message_bytes=2**24, latency_s=2e-5)


def test_a_link_that_is_slower_than_others_of_its_kind_is_named() -> None:
    links = [link((r, r + 1), ("a", "a"), 200 if r != 2 else 12) for r in range(4)]
    links += [link((0, 8), ("a", "b"), 12), link((0, 16), ("a", "c"), 11)]
    (slow,) = [finding for finding in check_links(links) if finding.severity != "ok"]
    assert slow.severity == "warning"
    assert "ranks 2 and 3: 12 GB/s, the median is 200" in slow.found
    assert [(each.subject, each.found) for each in check_links(links) if each.severity == "ok"] == [
        ("links inside a host", "12 to 200 GB/s, 20 us"),
        ("links between hosts", "11 to 12 GB/s, 20 us"),
    ]


def test_a_finding_of_all_hosts_is_told_once() -> None:
    def found(what: str, host: str) -> Finding:
        return Finding(severity="ok", subject="driver", found=what, hosts=(host,))

    told = merged([found("580", "a"), found("580", "b"), found("570", "c")], num_hosts=3)
    assert [(each.found, each.hosts) for each in told] == [("580", ("a", "b")), ("570", ("c",))]
    assert merged([found("580", "a"), found("580", "b")], num_hosts=2)[0].hosts == ()


def test_a_diagnosis_comes_back_from_json() -> None:
    """Ranks exchange it, and people paste it."""
    facts = host()
    part = Diagnosis(hosts=(facts,), findings=check_world([facts]), links=(link((0, 1), ("a", "a"), 3.0),))
    assert from_json(Diagnosis, to_json(part), source="a test") == part
    assert joined([part, part]).findings == part.findings * 2
    assert from_json(HostFacts, to_json(host(A100)), source="a test") == host(A100)
