"""What the kernel lists of networks, read from folders that look like ``/sys`` of hosts that nobody has here."""

import socket
from pathlib import Path

import pytest

from hetero.doctor.facts import InfinibandPort
from hetero.doctor.host_facts import infiniband_ports, listening_addresses


def test_ports_that_speak_rdma(tmp_path: Path) -> None:
    for device, state, rate in [
        ("mlx5_1", "1: DOWN", "40 Gb/sec (4X QDR)"),
        ("mlx5_0", "4: ACTIVE", "200 Gb/sec (4X HDR)"),
    ]:
        port = tmp_path / "sys/class/infiniband" / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert infiniband_ports(tmp_path) == (
        InfinibandPort(device="mlx5_0", port=1, state="ACTIVE", rate="200 Gb/sec (4X HDR)"),
        InfinibandPort(device="mlx5_1", port=1, state="DOWN", rate="40 Gb/sec (4X QDR)"),
    )
    assert infiniband_ports(tmp_path / "elsewhere") == ()


@pytest.mark.parametrize(
    ("family", "host", "address"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "", "0.0.0.0"),
        (socket.AF_INET6, "", "::"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_addresses_on_which_something_listens_at_a_port(family: int, host: str, address: str) -> None:
    with socket.create_server((host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        port = str(listener.getsockname()[1])
        assert listening_addresses(port) == (address,)
    assert listening_addresses(port) == ()


def test_a_port_that_is_no_number_has_no_listener() -> None:
    assert listening_addresses("") == ()
