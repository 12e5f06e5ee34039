"""What ``hetero doctor`` says of sockets that would listen on hosts that were made up."""

import dataclasses
from typing import Any

import pytest

from hetero.doctor.facts import NetworkInterface
from hetero.doctor.findings import Finding
from hetero.doctor.listening_checks import check_listening
from hetero.listening import LISTENING_SOCKETS
from tests.unit.doctor.samples import host, rank_of

ETH0 = NetworkInterface(name="eth0", address="10.0.0.1")
IB0 = NetworkInterface(name="ib0", address="10.1.0.1")
DOCKER = NetworkInterface(name="docker0", address="172.17.0.1")
OPEN = NetworkInterface(name="wan0", address="8.8.8.8")
"""An address of the internet: those of documentation count as private."""


def finding(subject: str, **changes: Any) -> Finding:
    facts = dataclasses.replace(host(), **{"interfaces": (ETH0, IB0, DOCKER, OPEN), **changes})
    (found,) = (each for each in check_listening(facts) if each.subject == f"sockets: {subject}")
    return found


@pytest.mark.parametrize(
    ("changes", "severity", "says"),
    [
        ({}, "ok", "host's name, 10.0.0.1: every host of that network reaches it"),
        ({"address": "127.0.1.1"}, "ok", "127.0.1.1: loopback alone"),
        ({"address": None}, "ok", "loopback: loopback alone"),
        ({"address": "8.8.8.8"}, "warning", "8.8.8.8 is an address of the internet"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, "ok", "on ib0 (GLOO_SOCKET_IFNAME): every host"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "lo"}}, "ok", "on lo (GLOO_SOCKET_IFNAME): loopback alone"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "ib0,wan0"}}, "warning", "8.8.8.8 is an address of the internet"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "ib7"}}, "problem", "names ib7, which this host does not have"),
    ],
)
def test_gloo(changes: dict[str, Any], severity: str, says: str) -> None:
    found = finding("gloo", **changes)
    assert (found.severity, bool(found.todo)) == (severity, severity != "ok"), found
    assert says in found.found


@pytest.mark.parametrize(
    ("given", "severity", "says"),
    [
        ("", "ok", "would listen, in a run over several hosts, on ib0 (NCCL_SOCKET_IFNAME is not set): every host"),
        ("eth", "ok", "would listen on eth0 (NCCL_SOCKET_IFNAME)"),
        ("=eth", "ok", "would listen on loopback (NCCL_SOCKET_IFNAME)"),
        ("^ib,docker", "warning", "would listen on eth0, wan0 (NCCL_SOCKET_IFNAME): 8.8.8.8 is an address"),
        ("^=eth0,wan0", "ok", "would listen on ib0, docker0"),
    ],
)
def test_nccl(given: str, severity: str, says: str) -> None:
    found = finding("NCCL", environment={"NCCL_SOCKET_IFNAME": given})
    assert found.severity == severity
    assert says in found.found


@pytest.mark.parametrize("name", ["gloo", "NCCL"])
@pytest.mark.parametrize(
    ("world_size", "says"), [(8, ": loopback alone"), (16, ": every host of that network reaches it")]
)
def test_ranks_of_one_host_listen_on_loopback(name: str, world_size: int, says: str) -> None:
    """What :mod:`hetero.distributed.world` does when ranks join holds for what is said as well."""
    launched = rank_of(host(), 0, world_size=world_size, local_world_size=8)
    found = finding(name, environment=launched.environment)
    assert found.severity == "ok"
    assert found.found.endswith(says)


def test_nccl_listens_on_hosts_with_gpus_alone() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        finding("NCCL", torch=None)


@pytest.mark.parametrize(
    ("address", "severity", "says"),
    [
        ("::", "warning", "all interfaces, port 29500: who reaches it owns the run"),
        ("0.0.0.0", "warning", "all interfaces"),
        ("10.0.0.1", "ok", "listens on 10.0.0.1, port 29500: every host of that network reaches it"),
        ("127.0.0.1", "ok", "loopback alone"),
        ("8.8.8.8", "warning", "an address of the internet"),
    ],
)
def test_the_store_of_this_launch(address: str, severity: str, says: str) -> None:
    found = finding("store", store_addresses=(address,), environment={"MASTER_PORT": "29500"})
    assert (found.severity, bool(found.todo)) == (severity, severity != "ok")
    assert says in found.found


def test_all_that_listens_inside_is_named() -> None:
    found = finding("others")
    assert found.severity == "ok"
    for row in LISTENING_SOCKETS:
        assert (row.name in found.found.partition(": ")[2].split(", ")) == (row.reach in ("loopback", "one user"))
