"""What the kernel lists of networks, read from folders that look like ``/sys`` of hosts that nobody has here."""

from pathlib import Path

from hetero.doctor.facts import InfinibandPort
from hetero.doctor.host_facts import infiniband_ports


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
