"""What ``nvidia-smi`` has printed on machines of people who showed it."""

from collections.abc import Sequence

import pytest

from hetero.discovery.nvidia_smi import gpu_topology, kernel_address, num_nvlinks, parse_matrix, parse_nvlink_rates

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""

H100_X4 = """\
        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    NIC2    NIC3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV6     NV6     NV6     PIX     SYS     SYS     SYS     6,14,22,30      3               N/A
GPU1    NV6      X      NV6     NV6     SYS     PIX     SYS     SYS     4,12,20,28      1               N/A
GPU2    NV6     NV6      X      NV6     SYS     SYS     PIX     SYS     7,15,23,31      7               N/A
GPU3    NV6     NV6     NV6      X      SYS     SYS     SYS     PIX     5,13,21,29      5               N/A
NIC0    PIX     SYS     SYS     SYS      X      SYS     SYS     SYS
NIC1    SYS     PIX     SYS     SYS     SYS      X      SYS     SYS
NIC2    SYS     SYS     PIX     SYS     SYS     SYS      X      SYS
NIC3    SYS     SYS     SYS     PIX     SYS     SYS     SYS      X
"""
"""github.com/NVIDIA/nccl/issues/1617."""

NIC_LEGEND = "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n  NIC2: mlx5_4\n  NIC3: mlx5_bond_0\n"
"""As newer drivers print it behind the other legend; the names are made up."""

TWO_3090 = (
    "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tPHB\t0-63\t0\t\tN/A\nGPU1\tPHB\t X \t0-63\t0\t\tN/A\n"
)
"""github.com/noonghunna/club-3090/issues/1229, with tabs as printed; underlined as a terminal gets it."""

DGX_2 = """\
        GPU0    GPU1    GPU2    mlx5_0  mlx5_1  CPU Affinity
GPU0     X      NV6     NV6     PIX     PXB     0-23,48-71
GPU1    NV6      X      NV6     PIX     PXB     0-23,48-71
GPU2    NV6     NV6      X      PXB     PIX     0-23,48-71
mlx5_0  PIX     PIX     PXB      X      PXB
mlx5_1  PXB     PXB     PIX     PXB      X
"""
"""Three of 16 GPUs and two of ten interfaces of github.com/NVIDIA/nccl-tests/issues/78, an older driver's; the rows of
the interfaces follow from those of the GPUs."""

V100_LINKS = """\
GPU 3: Tesla V100-SXM2-32GB (UUID: ...)
         Link 0: 25.781 GB/s
         Link 1: 25.781 GB/s
         Link 2: 25.781 GB/s
         Link 3: <inactive>
         Link 4: 25.781 GB/s
         Link 5: <inactive>
"""
"""github.com/Azure/azhpc-diagnostics/issues/73."""

GB200_LINKS = """\
GPU 0: NVIDIA GB200 (UUID: GPU-d1b93026-6d5b-03bd-3a71-f85b47a61bde)
         Link 0: 53.125 GB/s
         Link 1: 53.125 GB/s
GPU 1: NVIDIA GB200 (UUID: GPU-39ac7bce-e3d6-b426-008e-fa47897c72d5)
         Link 0: 53.125 GB/s
"""
"""The first links of github.com/NVIDIA/k8s-test-infra/issues/371."""


def test_nvlink_and_an_interface_beside_each_gpu() -> None:
    kinds, nics = parse_matrix(H100_X4 + LEGEND + NIC_LEGEND)
    assert kinds == (
        ("X", "NV6", "NV6", "NV6"),
        ("NV6", "X", "NV6", "NV6"),
        ("NV6", "NV6", "X", "NV6"),
        ("NV6", "NV6", "NV6", "X"),
    )
    assert nics == {
        "mlx5_0": ("PIX", "SYS", "SYS", "SYS"),
        "mlx5_1": ("SYS", "PIX", "SYS", "SYS"),
        "mlx5_4": ("SYS", "SYS", "PIX", "SYS"),
        "mlx5_bond_0": ("SYS", "SYS", "SYS", "PIX"),
    }


def test_without_a_legend_interfaces_keep_their_numbers() -> None:
    assert list(parse_matrix(H100_X4)[1]) == ["NIC0", "NIC1", "NIC2", "NIC3"]


def test_pcie_alone_in_a_terminal() -> None:
    assert parse_matrix(TWO_3090 + LEGEND) == ((("X", "PHB"), ("PHB", "X")), {})


def test_an_older_driver_names_interfaces_itself() -> None:
    kinds, nics = parse_matrix(DGX_2)
    assert [row.count("NV6") for row in kinds] == [2, 2, 2]
    assert nics == {"mlx5_0": ("PIX", "PIX", "PXB"), "mlx5_1": ("PXB", "PXB", "PIX")}


@pytest.mark.parametrize("text", ["", "No devices were found\n", LEGEND])
def test_nothing_to_read(text: str) -> None:
    assert parse_matrix(text) == ((), {})


def test_rates_are_those_of_active_links() -> None:
    assert parse_nvlink_rates(V100_LINKS) == {3: 25.781}
    assert parse_nvlink_rates(GB200_LINKS) == {0: 53.125, 1: 53.125}
    assert parse_nvlink_rates("GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-0)\n") == {}


@pytest.mark.parametrize(("kind", "number"), [("NV18", 18), ("NV1", 1), ("PIX", 0), ("NODE", 0), ("X", 0)])
def test_nvlinks_between_two(kind: str, number: int) -> None:
    assert num_nvlinks(kind) == number


def test_addresses_are_written_as_the_kernel_does() -> None:
    assert kernel_address("00000000:C1:00.0") == "0000:c1:00.0"
    assert kernel_address("00010000:07:00.0") == "10000:07:00.0"


ADDRESSES = "00000000:01:00.0\n00000000:02:00.0\n"


def driver(addresses: str | None, matrix: str | None, links: str | None = None) -> dict[str, str | None]:
    return {"--query-gpu=pci.bus_id": addresses, "topo": matrix, "nvlink": links}


@pytest.mark.parametrize(
    ("answers", "is_told"),
    [
        (driver(ADDRESSES, TWO_3090), True),
        (driver(None, None), False),
        (driver(ADDRESSES, None), False),
        (driver(ADDRESSES, "something else"), False),
        (driver("00000000:01:00.0\n", TWO_3090), False),
    ],
    ids=["two GPUs", "no driver", "no matrix", "unreadable", "other GPUs"],
)
def test_what_cannot_be_read_is_not_told(answers: dict[str, str | None], is_told: bool) -> None:
    def asked(command: Sequence[str]) -> str | None:
        return answers[command[1]]

    found = gpu_topology(asked)
    assert (found is not None) == is_told
    if found is not None:
        assert found.pci_addresses == ("0000:01:00.0", "0000:02:00.0")
        assert found.nvlink_gb_per_s == (None, None)
