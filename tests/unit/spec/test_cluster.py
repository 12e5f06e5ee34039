"""Clusters: numbering, links, and what is said about a description that is wrong."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.serialization import from_json, load, to_json
from hetero.spec.cluster import ClusterSpec, Links, NodePair, NodeType, ZonePair
from hetero.spec.devices import DeviceType
from hetero.spec.link import GroupLink, Link

PAGE = Path(__file__).parents[3] / "docs" / "cluster.md"
ROOT = Path(__file__).parents[3]
PRESETS = sorted(
    {
        path.resolve()
        for folder in ("scripts/presets", "hetero/data")
        for path in (ROOT / folder / "clusters").glob("*.yaml")
    }
)


def speed(bandwidth_gb_per_s: float | tuple[tuple[int, float], ...], latency_us: float = 0.0) -> Link:
    return Link(bandwidth_gb_per_s=bandwidth_gb_per_s, latency_us=latency_us)


NVLINK, PCIE, ETHERNET, MIXED, WAN = speed(200.0), speed(16.0), speed(3.0), speed(2.0), speed(0.5, 1000.0)

FAST = NodeType(name="fast", device="A100-40", gpus_per_node=2, count=2, zone="east", inside_node=NVLINK)
SLOW = NodeType(name="slow", device="V100-16", gpus_per_node=2, count=1, zone="east", inside_node=PCIE)
FAR = NodeType(name="far", device="RTX-3090", gpus_per_node=1, count=2, zone="west", memory_gib=20)

CLUSTER = ClusterSpec(
    node_types=(FAST, SLOW, FAR),
    links=Links(
        between_nodes=ETHERNET,
        node_pairs=(NodePair(node_types=("slow", "fast"), link=MIXED),),
        zone_pairs=(ZonePair(zones=("west", "east"), link=WAN),),
    ),
)


def test_ranks_and_nodes_are_numbered_in_file_order() -> None:
    ranks = range(CLUSTER.num_devices)
    assert [CLUSTER.node_type_of_rank(rank).name for rank in ranks] == ["fast"] * 4 + ["slow"] * 2 + ["far"] * 2
    assert [CLUSTER.node_of_rank(rank) for rank in ranks] == [0, 0, 1, 1, 2, 2, 3, 4]
    assert [CLUSTER.device_of_rank(rank).name for rank in (0, 4, 7)] == ["A100-40", "V100-16", "RTX-3090"]


def test_memory_is_the_nominal_one_unless_the_file_says_otherwise() -> None:
    assert CLUSTER.device_of_rank(0).memory_gib == 40
    assert CLUSTER.device_of_rank(7).memory_gib == 20, "an RTX-3090 has 24"


@pytest.mark.parametrize("rank", [-1, 8])
def test_no_such_rank(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"no rank {rank}, its 8 devices are 0 to 7"):
        CLUSTER.node_of_rank(rank)


@pytest.mark.parametrize(
    ("rank_a", "rank_b", "link"),
    [
        (0, 1, NVLINK),
        (4, 5, PCIE),
        (0, 2, ETHERNET),
        (1, 4, MIXED),
        (6, 7, ETHERNET),
        (3, 7, WAN),
        (5, 6, WAN),
    ],
    ids=["node", "other node", "same type", "pair of types", "far room", "zones", "zones again"],
)
def test_the_link_between_two_ranks(rank_a: int, rank_b: int, link: Link) -> None:
    assert CLUSTER.link_between(rank_a, rank_b) is link
    assert CLUSTER.link_between(rank_b, rank_a) is link


def test_a_pair_of_one_type_overrides_the_default() -> None:
    links = Links(between_nodes=ETHERNET, node_pairs=(NodePair(node_types=("fast", "fast"), link=MIXED),))
    assert ClusterSpec(node_types=(FAST,), links=links).link_between(0, 2) is MIXED


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 2), "between ranks 0 (node 0, fast, zone east) and 2 (node 1, fast, zone east); add links.between_nodes"),
        ((0, 4), "and 4 (node 2, slow, zone east); add links.between_nodes, or [fast, slow] under links.node_pairs"),
        ((4, 6), "and 6 (node 3, far, zone west); add [east, west] under links.zone_pairs"),
        ((8, 9), "(node 5, odd, zone east); add inside_node of node type 'odd'"),
    ],
)
def test_a_missing_link_is_named_with_the_key_to_add(ranks: tuple[int, int], message: str) -> None:
    odd = NodeType(name="odd", device="cpu", gpus_per_node=2, zone="east")
    with pytest.raises(ConfigError, match=re.escape(message)):
        ClusterSpec(node_types=(FAST, SLOW, FAR, odd)).link_between(*ranks)


def test_a_rank_has_no_link_to_itself() -> None:
    with pytest.raises(ConfigError, match="rank 3 has no link to itself"):
        CLUSTER.link_between(3, 3)


@pytest.mark.parametrize(
    ("num_bytes", "gb_per_s"),
    [(1, 1.0), (1_000, 1.0), (10_000, 2.0), (100_000, 4.0), (1_000_000, 8.0), (10**12, 8.0)],
)
def test_a_table_is_a_power_law_inside_and_constant_outside(num_bytes: int, gb_per_s: float) -> None:
    """Ten times the bytes double the bandwidth from one measured size to the other, and no further."""
    table = speed(((1_000, 1.0), (1_000_000, 8.0)))
    assert table.bytes_per_s(num_bytes) == pytest.approx(gb_per_s * 1e9)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_larger_message_never_arrives_sooner(data: st.DataObject) -> None:
    """...as long as that is what was measured. Steep tables are where other interpolations fail."""
    sizes = sorted(data.draw(st.sets(st.integers(1, 10**9), min_size=2, max_size=5)))
    seconds = sorted(data.draw(st.lists(st.floats(1e-6, 1.0), min_size=len(sizes), max_size=len(sizes))))
    table = speed(tuple((size, size / s / 1e9) for size, s in zip(sizes, seconds, strict=True)), 5.0)
    small, large = sorted(data.draw(st.lists(st.integers(0, 2 * 10**9), min_size=2, max_size=2)))
    assert small / table.bytes_per_s(small) <= large / table.bytes_per_s(large) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("bandwidth", "latency_us", "message"),
    [
        (0.0, 1.0, r"bandwidth_gb_per_s is 0\.0, must be above 0"),
        (-3.0, 1.0, r"bandwidth_gb_per_s is -3\.0, must be above 0"),
        (1.0, -2.0, r"latency_us is -2\.0, must be at least 0"),
        ((), 1.0, "bandwidth_gb_per_s is an empty table"),
        (((0, 1.0),), 1.0, "a message of 0 bytes, must be at least 1"),
        (((10, 1.0), (5, 2.0)), 1.0, "lists 5 bytes after 10; sort the pairs"),
        (((10, 1.0), (10, 2.0)), 1.0, "lists 10 bytes after 10; sort the pairs"),
        (((10, 1.0), (20, -2.0)), 1.0, r"bandwidth_gb_per_s is -2\.0, must be above 0"),
    ],
)
def test_impossible_links_are_refused(bandwidth: Any, latency_us: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speed(bandwidth, latency_us)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus_per_node": 0}, "'a': gpus_per_node is 0, must be at least 1"),
        ({"count": -1}, "'a': count is -1, must be at least 1"),
        ({"memory_gib": 0}, "'a': memory_gib is 0, must be at least 1"),
        ({"host_memory_gib": -4}, "'a': host_memory_gib is -4, must be at least 1"),
        ({"price_per_hour": -0.5}, r"'a': price_per_hour is -0\.5, must be at least 0"),
    ],
)
def test_impossible_nodes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NodeType(**{"name": "a", "device": "A100-40", "gpus_per_node": 8, **fields})


def pairs_of_nodes(*names: tuple[str, str]) -> Links:
    return Links(node_pairs=tuple(NodePair(node_types=pair, link=ETHERNET) for pair in names))


def pairs_of_zones(*names: tuple[str, str]) -> Links:
    return Links(zone_pairs=tuple(ZonePair(zones=pair, link=WAN) for pair in names))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (pairs_of_nodes(("fast", "slwo")), r"node_pairs\.0: unknown node type 'slwo' \(did you mean 'slow'\?\)"),
        (pairs_of_nodes(("fast", "slow"), ("slow", "fast")), r"node_pairs\.1: lists 'slow' and 'fast' a second time"),
        (pairs_of_nodes(("fast", "far")), "'fast' is in zone 'east', 'far' in zone 'west'; describe .*zone_pairs"),
        (pairs_of_zones(("east", "wets")), r"zone_pairs\.0: unknown zone 'wets' \(did you mean 'west'\?\)"),
        (pairs_of_zones(("east", "moon")), r"zone_pairs\.0: unknown zone 'moon' \(known: east, west\)"),
        (pairs_of_zones(("east", "east")), r"zone_pairs\.0: names zone 'east' twice"),
        (pairs_of_zones(("east", "west"), ("east", "west")), r"zone_pairs\.1: lists 'east' and 'west' a second time"),
    ],
)
def test_links_between_the_wrong_things_are_refused(links: Links, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterSpec(node_types=(FAST, SLOW, FAR), links=links)


def test_node_types_need_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match="lists 'fast' more than once"):
        ClusterSpec(node_types=(FAST, SLOW, FAST))


def node_of(device: str) -> NodeType:
    return NodeType(name="a", device=device, gpus_per_node=2)


def test_an_unknown_device_is_refused() -> None:
    expected = r"'a': unknown device type 'V100' \(did you mean 'V100-16' or 'V100-32' or 'V100S-32'\?\); a cluster"
    with pytest.raises(ConfigError, match=expected):
        ClusterSpec(node_types=(node_of("V100"),))


DESCRIBED = """
devices:
  - name: RTX-A4000
    memory_gib: 16
    compute_capability: [8, 6]
    data_sheet: {memory_gb_per_s: 448, fp32_tflops: 19.2, tf32_tflops: 38.4, bf16_tflops: 76.7, fp16_tflops: 76.7,
                 source: NVIDIA RTX A4000 data sheet}
node_types:
  - {name: a, device: RTX-A4000, gpus_per_node: 2}
  - {name: b, device: RTX-A4000, gpus_per_node: 2, memory_gib: 12}
  - {name: c, device: A100-40, gpus_per_node: 1}
"""


def test_a_cluster_describes_devices_that_do_not_ship(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(DESCRIBED)
    cluster = load(ClusterSpec, path)
    assert [cluster.device_of_rank(rank).memory_gib for rank in range(5)] == [16, 16, 12, 12, 40]
    assert cluster.device_of_rank(0) == cluster.device_types.of("RTX-A4000") == cluster.devices[0]
    assert from_json(ClusterSpec, to_json(cluster), source="memory") == cluster


def test_a_device_is_described_once_and_not_if_it_ships() -> None:
    mine = DeviceType(name="mine", memory_gib=16, compute_capability=(8, 6))
    with pytest.raises(ConfigError, match="devices: it describes 'mine' more than once"):
        ClusterSpec(devices=(mine, mine), node_types=(node_of("mine"),))
    with pytest.raises(ConfigError, match=r"describes 'A100-40', which ships with figures of its own .*another name"):
        ClusterSpec(devices=(DeviceType(name="A100-40"),), node_types=(node_of("A100-40"),))


def test_a_cluster_without_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="node_types is empty"):
        ClusterSpec(node_types=())


def test_the_cluster_round_trips() -> None:
    assert from_json(ClusterSpec, to_json(CLUSTER), source="memory") == CLUSTER


def named(node_type: NodeType, *nodes: str) -> NodeType:
    return dataclasses.replace(node_type, nodes=nodes)


def test_nodes_may_be_named(tmp_path: Path) -> None:
    """By YAML and by JSON, in which plans carry their cluster; a plan depends on everything else."""
    (tmp_path / "c.yaml").write_text(
        "node_types: [{name: a, device: A100-40, gpus_per_node: 8, count: 2, nodes: [gpu-7, gpu-3]}]"
    )
    cluster = load(ClusterSpec, tmp_path / "c.yaml")
    assert cluster.node_types[0].nodes == ("gpu-7", "gpu-3")
    assert from_json(ClusterSpec, to_json(cluster), source="memory") == cluster
    others = dataclasses.replace(cluster, node_types=(named(cluster.node_types[0], "gpu-1", "gpu-2"),))
    assert cluster != others
    assert cluster.without_node_names() == others.without_node_names()


def test_a_name_for_every_node_or_for_none() -> None:
    with pytest.raises(ConfigError, match=r"'fast': nodes lists 1 name, count is 2; name every node once, or leave"):
        named(FAST, "a")
    with pytest.raises(ConfigError, match=r"'fast': nodes lists 3 names, count is 2"):
        named(FAST, "a", "b", "c")
    for name in ("", "a b"):
        with pytest.raises(ConfigError, match=rf"'slow': nodes lists '{name}', which is no name of a node; write it"):
            named(SLOW, name)


def test_no_node_is_there_twice() -> None:
    with pytest.raises(ConfigError, match=r"nodes lists 'b' twice, in node type 'fast' and 'slow'; .*take it out of"):
        ClusterSpec(node_types=(named(FAST, "a", "b"), named(SLOW, "b")))
    with pytest.raises(ConfigError, match=r"nodes lists 'a' twice, in node type 'fast'; "):
        ClusterSpec(node_types=(named(FAST, "a", "a"),))


def test_names_of_nodes_are_printable(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(to_json(ClusterSpec(node_types=(named(SLOW, "gpu\x1b[2J"),))))
    with pytest.raises(
        ConfigError, match=r"c\.json: node_types\.0\.nodes\.0: 'gpu\\x1b\[2J' has the character U\+001B"
    ):
        load(ClusterSpec, tmp_path / "c.json")


def test_yaml_names_the_place_of_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("node_types: [{name: a, device: A100-40, gpus_per_nod: 8}]")
    expected = r"missing key 'node_types\.0\.gpus_per_node'; unknown key .*gpus_per_nod' \(did you mean 'gpus_per_node'"
    with pytest.raises(ConfigError, match=expected):
        load(ClusterSpec, path)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_describe_every_link(path: Path) -> None:
    """Inside a node, between two nodes of a type, and between types: nodes of a type are alike."""
    cluster = load(ClusterSpec, path)
    ranks, first = [], 0
    for node_type in cluster.node_types:
        ranks += [first + n for n in (0, 1, node_type.gpus_per_node) if n < node_type.num_devices]
        first += node_type.num_devices
    for a, b in itertools.combinations(sorted(set(ranks)), 2):
        assert cluster.link_between(a, b).bytes_per_s(10**6) > 0


def test_there_are_presets() -> None:
    assert {path.stem for path in PRESETS} >= {"one_room", "sailor_two_zones"}


def test_all_reduces_inside_nodes_by_device() -> None:
    """Measured ones, else a ring over the links of all devices; nothing of nodes with one device or unknown links."""
    measured = (GroupLink(size=2, bus=MIXED), GroupLink(size=4, bus=PCIE))
    nodes = (
        FAST,
        NodeType(name="later", device="A100-40", gpus_per_node=8, inside_node=PCIE),
        NodeType(
            name="measured", device="V100-16", gpus_per_node=4, inside_node=NVLINK, all_reduce_inside_node=measured
        ),
        FAR,
        NodeType(name="alone", device="T4", gpus_per_node=1, inside_node=PCIE),
    )
    found = ClusterSpec(node_types=nodes, links=Links(between_nodes=ETHERNET)).all_reduce_of_devices
    assert found == {"A100-40": (GroupLink(size=2, bus=NVLINK),), "V100-16": measured}


def test_more_devices_than_can_be_counted_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"it has 8,000,000,000,000 devices, at most 200,000 .*'a' has count 1(,000){4} x"
    ):
        ClusterSpec(node_types=(NodeType(name="a", device="A100-40", gpus_per_node=8, count=10**12),))


def test_the_page_about_cluster_files_has_every_field(tmp_path: Path) -> None:
    """And the example on it loads."""
    page = PAGE.read_text(encoding="utf-8")
    (tmp_path / "c.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert load(ClusterSpec, tmp_path / "c.yaml").num_devices == 20
    for described in (ClusterSpec, NodeType, Link, Links):
        for field in dataclasses.fields(described):
            assert f"`{field.name}`" in page, f"{described.__name__}.{field.name}"
