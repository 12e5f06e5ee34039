"""What a host does for its devices: rates by threads, what is said about wrong figures, and where it stands."""

import dataclasses
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.serialization import from_json, load, to_json
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link

PCIE = Link(bandwidth_gb_per_s=((1_000_000, 12.0), (64_000_000, 25.0)), latency_us=9.0)

HOST = HostProfile(
    source="a test",
    memory_gib=503.5,
    updates=(
        UpdateRate(threads=1, elements_per_s=2e8, spread=0.01),
        UpdateRate(threads=4, elements_per_s=8e8),
        UpdateRate(threads=16, elements_per_s=1.4e9),
    ),
    memory_copy_gb_per_s=80.0,
    to_device=PCIE,
    to_host=Link(bandwidth_gb_per_s=26.0, latency_us=8.0),
    gpus_per_switch=2,
    numa_nodes=2,
    processor="a processor",
    device="a device",
    versions={"torch": "2.13.0"},
)


def node_type(**fields: Any) -> NodeType:
    return NodeType(**{"name": "a", "device": "A100-40", "gpus_per_node": 8, **fields})


@pytest.mark.parametrize(
    ("threads", "ranks", "elements_per_s"),
    [
        (1, 1, 2e8),
        (2, 1, 4e8),
        (4, 1, 8e8),
        (10, 1, 1.1e9),
        (16, 1, 1.4e9),
        (64, 1, 1.4e9),
        (2, 2, 4e8),
        (16, 8, 1.75e8),
    ],
)
def test_the_rate_is_on_straight_lines_and_shared_by_ranks(threads: int, ranks: int, elements_per_s: float) -> None:
    assert HOST.elements_per_s(threads=threads, ranks=ranks) == pytest.approx(elements_per_s)


def test_fewer_threads_than_were_measured_reach_their_part() -> None:
    host = dataclasses.replace(HOST, updates=HOST.updates[1:])
    assert host.elements_per_s(threads=1) == pytest.approx(2e8)


@given(
    st.dictionaries(st.integers(1, 256), st.floats(1e6, 1e11), min_size=1, max_size=5),
    st.integers(1, 64),
    st.integers(1, 16),
)
def test_no_rate_is_beyond_what_was_measured(measured: dict[int, float], threads: int, ranks: int) -> None:
    rates = tuple(UpdateRate(threads=each, elements_per_s=measured[each]) for each in sorted(measured))
    host = HostProfile(source="a test", memory_gib=1, updates=rates)
    together = host.elements_per_s(threads=threads, ranks=ranks) * ranks
    assert 0 < together <= max(measured.values()) * (1 + 1e-9)
    if threads * ranks in measured:
        assert together == pytest.approx(measured[threads * ranks])


def test_a_rate_that_nobody_measured() -> None:
    host = HostProfile(source="a test", memory_gib=8)
    with pytest.raises(ConfigError, match="it has no updates; measure them with `hetero profile host`"):
        host.elements_per_s(threads=1)
    with pytest.raises(ConfigError, match="an update by 1 ranks with 0 threads"):
        HOST.elements_per_s(threads=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_gib": 0.0}, "memory_gib is 0, must be above 0 and at most 1,000,000; is it in another unit?"),
        ({"memory_gib": 1e308}, "memory_gib is 1e+308, must be above 0 and at most 1,000,000"),
        ({"memory_copy_gb_per_s": -1.0}, "memory_copy_gb_per_s is -1, must be at least 1e-09 and at most 1e+09"),
        ({"memory_copy_gb_per_s": 1e300}, "memory_copy_gb_per_s is 1e+300, must be at least 1e-09"),
        ({"gpus_per_switch": 0}, "gpus_per_switch is 0, must be at least 1"),
        ({"numa_nodes": 0}, "numa_nodes is 0, must be at least 1"),
        ({"updates": HOST.updates[::-1]}, "updates has threads [16, 4, 1]; list each number once, ascending"),
        ({"updates": HOST.updates[:1] * 2}, "updates has threads [1, 1]; list each number once, ascending"),
        ({"to_host": None}, "it has to_device and no to_host; give both directions, or neither"),
        ({"to_device": None}, "it has to_host and no to_device; give both directions, or neither"),
    ],
)
def test_impossible_hosts_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataclasses.replace(HOST, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threads": 0}, "updates has 0 threads, must be at least 1"),
        ({"elements_per_s": 0.0}, "elements_per_s of the update with 2 threads is 0, must be at least 1 and at most"),
        ({"elements_per_s": 1e300}, "elements_per_s of the update with 2 threads is 1e+300, must be at least 1"),
        ({"spread": -0.1}, "spread of the update with 2 threads is -0.1, must be at least 0"),
    ],
)
def test_impossible_rates_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        UpdateRate(**{"threads": 2, "elements_per_s": 1.0, **fields})


def test_a_host_comes_back_from_its_file() -> None:
    assert from_json(HostProfile, to_json(HOST), source="file") == HOST


def test_what_was_measured_goes_under_host_of_a_node_type(tmp_path: Path) -> None:
    """As it is: JSON inside of YAML, indented."""
    path = tmp_path / "cluster.yaml"
    pasted = textwrap.indent(to_json(HOST), " " * 6)
    path.write_text(f"node_types:\n  - name: a\n    device: A100-40\n    gpus_per_node: 8\n    host:\n{pasted}")
    assert load(ClusterSpec, path).node_types == (node_type(host=HOST),)


def test_the_example_of_the_module_is_read(tmp_path: Path) -> None:
    from_docstring = (Path(__file__).parents[3] / "hetero/spec/host.py").read_text().split('"""')[1]
    example = from_docstring.partition("    host:\n")[2]
    path = tmp_path / "host.yaml"
    path.write_text(textwrap.dedent(example))
    host = load(HostProfile, path)
    assert (host.gpus_per_switch, host.numa_nodes, len(host.updates)) == (2, 2, 2)


def test_an_unknown_key_is_refused_with_the_near_one() -> None:
    data = json.loads(to_json(HOST)) | {"numa_node": 2}
    with pytest.raises(ConfigError, match=r"unknown key .numa_node.*did you mean .numa_nodes"):
        from_json(HostProfile, json.dumps(data), source="file")


def test_memory_that_training_may_use() -> None:
    assert node_type().usable_host_memory_gib is None
    assert node_type(host_memory_gib=256).usable_host_memory_gib == 256
    assert node_type(host=HOST).usable_host_memory_gib == 503.5
    assert node_type(host=HOST, host_memory_gib=256).usable_host_memory_gib == 256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"host_memory_gib": 504},
            "node type 'a': host_memory_gib is 504, its host has memory_gib 503.5; lower the former",
        ),
        (
            {"gpus_per_node": 1},
            "node type 'a': gpus_per_switch of its host is 2, must be at most gpus_per_node, which is 1",
        ),
    ],
)
def test_a_node_type_that_contradicts_its_host_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        node_type(host=HOST, **fields)
