"""Numbers with units, as people write them, wherever a link's bandwidth or latency stands."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.quantities import BANDWIDTHS, LATENCIES, bandwidth_gb_per_s, latency_us
from hetero.serialization import load, save
from hetero.spec.cluster import ClusterSpec
from hetero.spec.host import HostProfile
from hetero.spec.link import Link

NUMBERS = st.floats(min_value=1e-6, max_value=1e12)
SPACES = st.sampled_from(["", " ", "  "])


@pytest.mark.parametrize(
    ("text", "gb_per_s"),
    [
        ("200Gbps", 25),
        ("200 Gbit/s", 25),
        ("200 Gb/s", 25),
        ("25 GB/s", 25),
        ("25GB/s", 25),
        (" 25.0 GB/s ", 25),
        ("2.5e1 GB/s", 25),
        ("1 GiB/s", 1.073741824),
        ("800 Mbps", 0.1),
        ("0.4 Tbps", 50),
        ("-1 GB/s", -1),
    ],
)
def test_bandwidths(text: str, gb_per_s: float) -> None:
    assert bandwidth_gb_per_s(text) == gb_per_s


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("50us", 50),
        ("0.3us", 0.3),
        ("50 \u00b5s", 50),
        ("50\u03bcs", 50),
        ("0.05ms", 50),
        ("1s", 1e6),
        ("1500 ns", 1.5),
    ],
)
def test_latencies(text: str, us: float) -> None:
    assert latency_us(text) == us


@given(number=NUMBERS, space=SPACES, unit=st.sampled_from(sorted(BANDWIDTHS)))
def test_a_bandwidth_comes_back_from_every_unit(number: float, space: str, unit: str) -> None:
    """``number``, in GB/s, written in ``unit``."""
    written = f"{number / float(BANDWIDTHS[unit])!r}{space}{unit}"
    assert bandwidth_gb_per_s(written) == pytest.approx(number, rel=1e-14)


@given(number=NUMBERS, space=SPACES, unit=st.sampled_from(sorted(LATENCIES)))
def test_a_latency_comes_back_from_every_unit(number: float, space: str, unit: str) -> None:
    """``number``, in microseconds, written in ``unit``."""
    written = f"{number / float(LATENCIES[unit])!r}{space}{unit}"
    assert latency_us(written) == pytest.approx(number, rel=1e-14)


def said(read: Callable[[str], float], text: str) -> float | str:
    try:
        return read(text)
    except ConfigError as error:
        return str(error)


@given(st.text(alphabet="0123456789.eE+- GMKibBpt/usmn\u00b5"))
def test_any_text_is_a_number_or_one_message(text: str) -> None:
    for read in (bandwidth_gb_per_s, latency_us):
        match said(read, text):
            case float(value):
                assert math.isfinite(value)
            case str(message):
                assert "; write " in message


CLUSTER = """
node_types:
  - name: a
    device: A100-40
    gpus_per_node: 8
    inside_node: {{bandwidth_gb_per_s: {bandwidth}, latency_us: {latency}}}
    host:
      source: nobody
      memory_gib: 64
      to_device: {{bandwidth_gb_per_s: 200Gbps, latency_us: 0.01 ms}}
      to_host: {{bandwidth_gb_per_s: 25, latency_us: 10}}
"""


def loaded(folder: Path, bandwidth: str, latency: str = "10") -> ClusterSpec:
    path = folder / "c.yaml"
    path.write_text(CLUSTER.format(bandwidth=bandwidth, latency=latency))
    return load(ClusterSpec, path)


@pytest.mark.parametrize("bandwidth", ["200Gbps", "25 GB/s", "25", '"200 Gbit/s"'])
def test_a_file_says_the_same_in_any_unit(bandwidth: str, tmp_path: Path) -> None:
    """Also under ``host``; what a machine writes are numbers."""
    cluster = loaded(tmp_path, bandwidth, "10us")
    assert cluster == loaded(tmp_path, "25", "10")
    host = cluster.node_types[0].host
    assert host is not None
    assert host.to_device == host.to_host == Link(bandwidth_gb_per_s=25.0, latency_us=10.0)
    save(host, tmp_path / "host.json")
    assert "Gbps" not in (tmp_path / "host.json").read_text()
    assert load(HostProfile, tmp_path / "host.json") == host


def test_pairs_of_size_and_bandwidth_have_units_too(tmp_path: Path) -> None:
    (node,) = loaded(tmp_path, "[[1_000_000, 112 Gbps], [64_000_000, 59]]").node_types
    assert node.inside_node == Link(bandwidth_gb_per_s=((1_000_000, 14.0), (64_000_000, 59.0)), latency_us=10.0)


@pytest.mark.parametrize(
    ("bandwidth", "latency", "message"),
    [
        (
            "200gb/s",
            "10",
            "bandwidth_gb_per_s: '200gb/s': 'gb/s' is no unit of bandwidth (did you mean 'Gb/s' or 'GB/s'?)",
        ),
        ("50us", "10", "bandwidth_gb_per_s: '50us': 'us' is no unit of bandwidth; write 25 GB/s,"),
        ("fast", "10", "bandwidth_gb_per_s: 'fast' is no number with a unit; write 25 GB/s,"),
        ('"25"', "10", "bandwidth_gb_per_s: '25' is a text without a unit; write 25 GB/s,"),
        ("1e999 Gbps", "10", "bandwidth_gb_per_s: '1e999 Gbps' is too large for a bandwidth"),
        ("[[1000, 9 GBs]]", "10", "bandwidth_gb_per_s: '9 GBs': 'GBs' is no unit of bandwidth; write 25 GB/s,"),
        ("0 Gbps", "10", "inside_node: link: bandwidth_gb_per_s is 0.0, must be above 0"),
        ("25", "10 GB/s", "latency_us: '10 GB/s': 'GB/s' is no unit of time; write 50us,"),
    ],
)
def test_wrong_units_are_one_message(bandwidth: str, latency: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, bandwidth, latency)
    assert f"node_types.0.{'' if message.startswith('inside') else 'inside_node.'}{message}" in str(caught.value)
    assert str(caught.value).count("node_types") == 1
