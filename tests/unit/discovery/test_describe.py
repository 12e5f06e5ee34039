"""Nodes become a cluster: alike ones one type, links as their hardware is made for, and what nobody knows is said."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero.discovery.cluster_yaml import cluster_yaml
from hetero.discovery.describe import describe
from hetero.discovery.described import DescribedCluster
from hetero.discovery.facts import NodeFacts, nodes_of
from hetero.errors import ConfigError
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec, NodePair
from hetero.spec.devices import DeviceType
from hetero.spec.link import Link
from hetero.units import GIB
from tests.unit.discovery.samples import (
    EIGHT_A100,
    FOUR_V100,
    T4,
    UNKNOWN,
    VETH,
    cpu_node,
    gpu_node,
    ports,
    seated,
    topology,
)
from tests.unit.doctor.samples import A100, V100, torch_of

DATE = "2026-11-23"


def described(*ranks: NodeFacts, allocated: Sequence[str] = ()) -> DescribedCluster:
    return describe(nodes_of(ranks), date=DATE, allocated=allocated, command="srun it again")


def written(found: DescribedCluster, folder: Path) -> tuple[str, ClusterSpec]:
    """The text of the file, and what it loads as."""
    path = folder / "cluster.yaml"
    path.write_text(cluster_yaml(found, heading="Found."))
    return path.read_text(), load(ClusterSpec, path)


def test_alike_nodes_are_one_type_and_others_their_own(tmp_path: Path) -> None:
    """Memory of hosts of one kind differs by a little."""
    found = described(
        gpu_node("a1", *EIGHT_A100),
        gpu_node("v1", *FOUR_V100, topology=topology(4, "SYS"), pcie_gb_per_s={}),
        gpu_node("a2", *EIGHT_A100, memory_bytes=504 * GIB),
        gpu_node("a3", *EIGHT_A100, memory_bytes=1024 * GIB),
    )
    assert {each.name: each.nodes for each in found.cluster.node_types} == {
        "A100-40-x8": ("a1", "a2"),
        "V100-16-x4": ("v1",),
        "A100-40-x8-2": ("a3",),
    }
    (fast, slow, large) = found.cluster.node_types
    assert (fast.device, fast.gpus_per_node, fast.count) == ("A100-40", 8, 2)
    assert fast.host is not None
    assert (fast.host.memory_gib, fast.host.numa_nodes, fast.host.device) == (504, 2, A100.name)
    assert fast.host.source == f"hetero discover, {DATE}"
    assert fast.inside_node == large.inside_node == Link(bandwidth_gb_per_s=300.0, latency_us=10.0)
    # No PCIe link says what it can do.
    assert slow.inside_node == Link(bandwidth_gb_per_s=15.75, latency_us=20.0)
    assert found.cluster.links.between_nodes == Link(bandwidth_gb_per_s=12.5, latency_us=50.0)
    assert found.cluster.links.node_pairs == ()
    text, loaded = written(found, tmp_path)
    assert loaded == found.cluster
    assert "\n    nodes: [a1, a2]\n" in text
    assert "28 NV12, 25 GB/s per link and direction" in " ".join(text.replace("#", "").split())


@pytest.mark.parametrize("strange", ["\n", "\x85", "\u2028", "\x1b[2J", "\u202e"])
def test_a_name_that_is_not_printable_is_refused(strange: str) -> None:
    """The name of a node comes from its host or from Slurm; YAML has more ends of lines than a shell."""
    with pytest.raises(
        ConfigError, match=r"the name of a node: 'a1.*links: 1' has the character U\+.*take it out"
    ) as caught:
        described(gpu_node(f"a1{strange}links: 1", *EIGHT_A100))
    assert str(caught.value).isprintable()


def test_names_of_nodes_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Those that YAML would take for a number or a truth value too, in lists that are longer than a line."""
    names = ["007", "1e5", "no", "true", "[x]", "a:b", *(f"rack-{i:03}.cluster" for i in range(40))]
    found = described(*(gpu_node(name, *EIGHT_A100) for name in names))
    text, loaded = written(found, tmp_path)
    assert loaded == found.cluster
    assert loaded.node_types[0].nodes == tuple(names)
    assert max(map(len, text.splitlines())) <= 120


def test_the_slowest_pair_counts_of_those_that_the_ranks_see() -> None:
    """A ring of two GPUs of an otherwise slower node is fast."""
    mixed = topology(4, "NV2", gb_per_s=25.0)
    rows = [list(row) for row in mixed.kinds]
    rows[0][1] = rows[1][0] = "NV4"
    mixed = dataclasses.replace(mixed, kinds=tuple(map(tuple, rows)))
    all_four = described(gpu_node("v", *FOUR_V100, topology=mixed))
    two = described(gpu_node("v", V100, V100, topology=mixed))
    assert [each.cluster.node_types[0].inside_node for each in (all_four, two)] == [
        Link(bandwidth_gb_per_s=50.0, latency_us=10.0),
        Link(bandwidth_gb_per_s=100.0, latency_us=10.0),
    ]


@pytest.mark.parametrize(
    ("overrides", "gb_per_s", "said"),
    [
        ({}, 300.0, "25 GB/s per link and direction"),
        ({"topology": topology(2, "NV12")}, 300.0, "half of the data sheet's NVLink"),
        ({"topology": topology(2, "PHB")}, 31.51, "1 PHB; bandwidth: what their PCIe links are made for"),
        ({"topology": topology(2, "PHB"), "pcie_gb_per_s": {}}, 15.75, "the kernel does not tell what theirs is"),
        ({"topology": None}, 31.51, "nvidia-smi did not tell what connects the GPUs"),
        ({"topology": topology(1, "X")}, 31.51, "lists other GPUs than CUDA"),
    ],
)
def test_links_inside_a_node(overrides: dict[str, object], gb_per_s: float, said: str) -> None:
    found = described(gpu_node("a", A100, A100, **overrides))
    (node_type,) = found.cluster.node_types
    assert node_type.inside_node is not None
    assert node_type.inside_node.bandwidth_gb_per_s == gb_per_s
    (remark,) = [each for each in found.remarks if each.kind == "assumed"]
    assert remark.place == ("node_types", node_type.name, "inside_node")
    assert said in remark.text
    alone = "--rdzv-backend hetero-static --rdzv-endpoint localhost:0"
    assert remark.todo == f"torchrun {alone} --nproc-per-node gpu -m hetero doctor"


def test_one_device_alone_has_no_links() -> None:
    cluster = described(gpu_node("a", A100)).cluster
    assert (cluster.node_types[0].inside_node, cluster.links.between_nodes) == (None, None)


HDR, NDR = "200 Gb/sec (4X HDR)", "400 Gb/sec (4X NDR)"


def test_interfaces_beside_gpus_carry_the_training(tmp_path: Path) -> None:
    """Four of 200 Gbit/s beside GPUs, one of 400 for storage, and one that is down."""
    nics = {f"mlx5_{i}": tuple("PXB" if i == j // 2 else "SYS" for j in range(8)) for i in range(4)}
    matrix = topology(8, "NV12", gb_per_s=25.0, **nics, mlx5_4=("SYS",) * 8, mlx5_5=("PIX",) * 8)
    down = dataclasses.replace(ports(NDR, state="DOWN")[0], device="mlx5_5")
    facts = {"infiniband": (*ports(HDR, HDR, HDR, HDR, NDR), down)}
    found = described(
        gpu_node("a", *EIGHT_A100, topology=matrix, facts=facts),
        gpu_node("b", *EIGHT_A100, topology=matrix, facts=facts),
        gpu_node("v", *FOUR_V100),
    )
    fast, slow = found.cluster.node_types
    assert (fast.nics_per_node, slow.nics_per_node) == (4, 1)
    # Between fast nodes by RDMA; to the slow one at its pace.
    assert found.cluster.links.between_nodes == Link(bandwidth_gb_per_s=12.5, latency_us=50.0)
    assert found.cluster.links.node_pairs == (
        NodePair(node_types=(fast.name, fast.name), link=Link(bandwidth_gb_per_s=25.0, latency_us=10.0)),
    )
    assert written(found, tmp_path)[1] == found.cluster


def test_without_a_matrix_the_fastest_active_ports_count() -> None:
    found = described(gpu_node("a", *EIGHT_A100, topology=None, facts={"infiniband": ports(HDR, NDR, NDR)}))
    assert found.cluster.node_types[0].nics_per_node == 2


def test_nobody_says_how_fast_the_network_is() -> None:
    """The end of a container says something that is not so."""
    found = described(*(gpu_node(name, A100, facts={"interfaces": VETH}) for name in ("a", "b")))
    assert found.cluster.links.between_nodes == Link(bandwidth_gb_per_s=1.25, latency_us=50.0)
    (remark,) = [each for each in found.remarks if each.place == ("links", "between_nodes")]
    assert "A100-40: no interface says its speed, taken for 10 Gbit/s" in remark.text
    assert remark.todo.startswith("torchrun --nnodes 2 ")


def test_what_a_launcher_shows_each_rank_alone_is_one_node() -> None:
    """Each rank has one GPU, as with ``srun --gpus-per-task 1``; and all ranks all, as under torchrun."""
    whole = gpu_node("a", *FOUR_V100)
    parts = [
        dataclasses.replace(whole, host=dataclasses.replace(whole.host, torch=torch_of(V100, gpus=(gpu,))))
        for gpu in seated(*FOUR_V100)
    ]
    assert described(*parts) == described(whole) == described(whole, whole)
    assert described(whole).cluster.num_devices == 4


def test_a_part_of_a_device_has_its_own_memory() -> None:
    part = dataclasses.replace(A100, name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", memory_bytes=int(19.5 * GIB))
    (node_type,) = described(gpu_node("a", part)).cluster.node_types
    assert (node_type.device, node_type.memory_gib) == ("A100-40", 19)


def test_a_gpu_that_nobody_described_is_described_by_what_cuda_says(tmp_path: Path) -> None:
    found = described(gpu_node("new", UNKNOWN, UNKNOWN))
    assert found.cluster.devices == (
        DeviceType(name=UNKNOWN.name, memory_gib=12, compute_capability=(8, 6), cuda_name="NVIDIA X1 [[]beta]"),
    )
    assert found.cluster.node_types[0].name == "NVIDIA-X1-beta-x2"
    text, loaded = written(found, tmp_path)
    assert loaded == found.cluster
    assert "NOT FOUND OUT: No data sheet of it ships" in text


def test_equal_processors_are_the_device_that_ships(tmp_path: Path) -> None:
    """Two ranks on each of two machines share their cores."""
    found = described(
        *(dataclasses.replace(cpu_node("a"), boot_id="1") for _ in range(2)),
        *(dataclasses.replace(cpu_node("b"), boot_id="2") for _ in range(2)),
    )
    (node_type,) = found.cluster.node_types
    assert (node_type.name, node_type.device, node_type.gpus_per_node, node_type.count) == ("cpu-x2", "cpu", 2, 2)
    assert written(found, tmp_path)[1] == found.cluster


def test_unequal_shares_of_a_machine_are_devices_of_their_own(tmp_path: Path) -> None:
    """Four nodes on one machine of four cores: bound to one, to the three others, to all, and with a quota."""
    nodes = [
        cpu_node("one", cores=(0,), boot_id="1"),
        cpu_node("three", cores=(1, 2, 3), boot_id="1"),
        cpu_node("all", cores=(0, 1, 2, 3), boot_id="1"),
        cpu_node("quota", cores=(4,), core_quota=0.25, boot_id="1"),
    ]
    found = described(*nodes)
    assert [each.device for each in found.cluster.node_types] == [
        "cpu-0.5-cores",
        "cpu-1.5-cores",
        "cpu-2-cores",
        "cpu-0.2-cores",
    ]
    assert written(found, tmp_path)[1] == found.cluster
    assert found.cluster.device_types.of("cpu-2-cores") == DeviceType(name="cpu-2-cores")


def test_nodes_of_the_job_that_did_not_take_part_are_named() -> None:
    first = described(gpu_node("a", A100), allocated=["a", "b", "c"]).remarks[0]
    assert first.text == "The job has 3 nodes; no task described b, c."
    assert first.todo == "srun it again"
    many = described(gpu_node("a", A100), allocated=["a", *(f"n{i}" for i in range(20))]).remarks[0]
    assert many.text.endswith("no task described n0, n1, n2, n3, n4, n5, n6, n7 and 12 others.")
    assert described(gpu_node("a", A100), allocated=["a"]).remarks[0].place != ()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [gpu_node("mixed", A100, T4, A100)],
            "node 'mixed': it has 2 x A100-40, 1 x T4, and a cluster file has one device type per node; show its ranks",
        ),
        (
            [gpu_node("localhost", A100), gpu_node("localhost", V100)],
            "node 'localhost': 2 machines are called so; give each a host name of its own",
        ),
        (
            [gpu_node("old", A100, facts={"torch": torch_of(A100, gpus=())})],
            f"node 'old': it has NVIDIA's driver 580.95.05, but torch {torch_of(A100).version} sees no GPU; "
            "run `hetero doctor`",
        ),
        (
            [gpu_node("bare", A100, facts={"torch": None})],
            "node 'bare': it has NVIDIA's driver 580.95.05, but no torch to ask for GPUs; run `hetero doctor`",
        ),
        (
            [cpu_node("cpu", cores=(0,), boot_id="1"), cpu_node("cpu", cores=(1, 2), boot_id="1")],
            "node 'cpu': its ranks have 1, 2 cores, so that they are different devices, and a cluster file has one",
        ),
    ],
    ids=["two types in a node", "two hosts of one name", "torch without CUDA", "no torch", "unequal ranks"],
)
def test_what_a_cluster_file_cannot_say(ranks: list[NodeFacts], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        described(*ranks)
    assert str(caught.value).startswith(message)


def test_processors_beside_gpus_are_described_if_they_are_meant() -> None:
    found = described(
        gpu_node("old", A100, facts={"torch": None, "environment": {"CUDA_VISIBLE_DEVICES": ""}}),
    )
    assert found.cluster.node_types[0].device == "cpu"
