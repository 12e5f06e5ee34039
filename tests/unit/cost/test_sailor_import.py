"""The importer, on tables of a few rows."""

from pathlib import Path

import pytest

from hetero.cli import main
from hetero.data import PublishedLinks
from hetero.data.sailor import ISOLATION_S, PROVENANCE, read_all_reduce, read_links, read_profiles
from hetero.errors import ConfigError
from hetero.serialization import load
from hetero.spec.profile import Profile
from tests.helpers.sailor_tables import write_table, write_tables


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """OPT-350M on GH200 at tp 1; a model and a device that nobody knows; two nodes."""
    write_tables(tmp_path)
    return tmp_path


@pytest.fixture
def profile(tables: Path) -> Profile:
    (only,) = read_profiles(tables)
    return only


def test_unknown_models_and_devices_are_left_out(profile: Profile) -> None:
    assert (profile.model, profile.device, profile.precision) == ("OPT-350M", "GH200", "fp32")
    assert profile.isolation_s == ISOLATION_S


def test_layers_become_kinds_and_blocks_their_median(profile: Profile) -> None:
    times = {time.kind: (time.forward_s, time.backward_s) for time in profile.times}
    assert times == {"embedding": (0.001, 0.0), "block": (0.002, 0.004), "head": (0.003, 0.005)}


def test_an_update_is_shared_out_by_parameters(profile: Profile) -> None:
    """4 x 10 ms for an embedding, a head and the two blocks whose times differ: 140 million parameters."""
    updates = {update.kind: update.update_s for update in profile.updates}
    assert updates == pytest.approx({"embedding": 0.01714, "block": 0.002857, "head": 0.01714}, rel=1e-3)


def test_memory_is_per_kind(profile: Profile) -> None:
    block = profile.memory_of("block", tp=1)
    assert block is not None
    assert (block.parameters, block.saved_bytes, block.output_bytes) == (10_000_000, 300, 100)
    assert profile.head_has_projection


def test_a_block_that_beats_the_fp32_peak_was_in_tf32(tables: Path) -> None:
    """69 Gflop in 2 ms are 34 Tflop/s, below the 67 of fp32; in 0.5 ms they are above."""
    (slow,) = read_profiles(tables)
    path = tables / "layer_profiles.csv"
    path.write_text(path.read_text().replace(",0.002,", ",0.0005,"))
    (fast,) = read_profiles(tables)
    assert (slow.arithmetic, fast.arithmetic) == ("fp32", "tf32")


def test_collectives_are_bus_bandwidths_without_those_that_failed(tables: Path) -> None:
    (group,) = read_all_reduce(tables)["GH-96"]
    assert group.size == 4
    assert group.bus.bandwidth_gb_per_s == ((10**6, 30.0), (100 * 10**6, 300.0))


def test_links_inside_and_between_nodes(tables: Path) -> None:
    links = read_links(tables)
    gh200 = links.of("GH200")
    assert gh200.inside_node.bandwidth_gb_per_s == ((10**6, 10.0), (64 * 10**6, 100.0))
    assert gh200.between_nodes is not None
    assert gh200.between_nodes.bytes_per_s(10**6) == 10e9
    assert gh200.between_nodes.bytes_per_s(8 * 10**6) == 25e9
    assert gh200.between_nodes.bytes_per_s(10**9) == 40e9, "never above the stated maximum"
    assert gh200.nics_per_node == 4


def test_a_fit_below_nothing_is_left_out(tables: Path) -> None:
    (pair,) = read_links(tables).pairs
    assert pair.node_types == ("A100-40", "GH200")
    assert pair.link.bandwidth_gb_per_s[0] == (16 * 10**6, 1.0)


def test_the_line_between_regions(tables: Path) -> None:
    (zones,) = read_links(tables).zones
    assert (zones.zones, zones.link.bytes_per_s(10**8)) == (("us-central1", "us-west1"), 0.5e9)


FITS = "scope,src_zone,src_gpu,src_gpus,dst_zone,dst_gpu,dst_gpus,c2,c1,c0,max_bytes_per_s"

ZONE = "us-central1-a"


def fit_row(src: str, dst: str, gpus: int, gb_per_s: float) -> str:
    return f"inter,{ZONE},{src},{gpus},{ZONE},{dst},{gpus},0,0,{gb_per_s},{gb_per_s * 1e9}"


def links_of_pairs(tables: Path, *rows: str) -> tuple[dict[tuple[str, str], float], tuple[str, ...]]:
    """GB/s of a large message by pair of devices, and what the importer says beside its usual notes."""
    write_table(tables, "network_fits.csv", FITS, *rows)
    links = read_links(tables)
    found = {pair.node_types: pair.link.bytes_per_s(10**9) / 1e9 for pair in links.pairs}
    return found, links.provenance.notes[len(PROVENANCE.notes) :]


OWN = [fit_row("RTX-2080", "RTX-2080", 1, 2.8), fit_row("Titan-RTX", "Titan-RTX", 1, 2.9)]

ANOTHERS = fit_row("RTX-2080", "RTX-3090", 1, 0.115)

PLACEHOLDER = fit_row("RTX-2080", "Titan-RTX", 1, 0.115)


def test_a_fit_of_another_pair_is_replaced_by_the_pairs_own(tables: Path) -> None:
    """Of the two-GPU one in the other direction and the four-GPU one it takes the former: fewest GPUs."""
    rows = [fit_row("Titan-RTX", "RTX-2080", 2, 2.86), fit_row("RTX-2080", "Titan-RTX", 4, 2.7)]
    found, notes = links_of_pairs(tables, *OWN, ANOTHERS, PLACEHOLDER, *rows)
    assert found["RTX-2080Ti", "Titan-RTX"] == 2.86
    assert found["RTX-2080Ti", "RTX-3090"] == 0.115, "nothing else says what that pair has"
    assert notes == (
        "RTX-2080Ti with Titan-RTX, between nodes: the fit for one GPU (0.115 GB/s) is that of pairs with RTX-3090; "
        "replaced by the pair's own for 2 GPUs (2.86 GB/s)",
    )


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], id="no other fit says otherwise"),
        pytest.param([fit_row("RTX-2080", "Titan-RTX", 2, 0.15)], id="another fit says about the same"),
        pytest.param(
            [fit_row("RTX-2080", "Titan-RTX", 2, 2.8), fit_row("RTX-2080", "RTX-2080", 2, 0.115)],
            id="one of the two ends has it with its own kind",
        ),
    ],
)
def test_a_fit_that_may_be_the_pairs_own_stays(tables: Path, others: list[str]) -> None:
    found, notes = links_of_pairs(tables, *OWN, ANOTHERS, PLACEHOLDER, *others)
    assert found["RTX-2080Ti", "Titan-RTX"] == 0.115
    assert notes == ()


def test_a_fit_for_several_gpus_counts_per_interface(tables: Path) -> None:
    """Four transfers between nodes of three and four interfaces are three times one."""
    rows = [fit_row("A100-40", "V100-16", 4, 6.0), fit_row("A100-40", "V100-16", 1, 0.5)]
    found, notes = links_of_pairs(tables, *rows, fit_row("A100-40", "GH-96", 1, 0.5))
    assert found["A100-40", "V100-16"] == 2.0
    assert "replaced by the pair's own for 4 GPUs (2 GB/s)" in notes[0]


def test_the_command_says_what_it_replaced(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links_of_pairs(tables, *OWN, ANOTHERS, PLACEHOLDER, fit_row("RTX-2080", "Titan-RTX", 2, 2.86))
    assert main(["profile", "import", str(tables), "--out", str(tmp_path / "out")]) == 0
    assert "replaced by the pair's own for 2 GPUs (2.86 GB/s)" in capsys.readouterr().out
    written = load(PublishedLinks, tmp_path / "out" / "links.json")
    assert any("replaced by the pair's own" in note for note in written.provenance.notes)


def test_a_table_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layer_profiles\.csv: no such file; give the folder"):
        read_profiles(tmp_path)


@pytest.mark.parametrize("cell", ["x", "", "nan", "1e999", "-1", "9" * 5000])
def test_a_cell_that_is_no_time_is_refused_by_name(tables: Path, cell: str) -> None:
    path = tables / "layer_profiles.csv"
    path.write_text(path.read_text().replace("0.002", cell))
    with pytest.raises(ConfigError, match=str(tables)):
        read_profiles(tables)


def test_a_table_of_another_kind_is_refused(tables: Path) -> None:
    write_table(tables, "collectives.csv", "gpu,time", "GH-96,1")
    with pytest.raises(ConfigError, match=r"collectives\.csv: has no column collective, data_mb, gpus"):
        read_profiles(tables)


def test_the_command_writes_what_the_importer_reads(tables: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "here"
    assert main(["profile", "import", str(tables), "--out", str(out)]) == 0
    (expected,) = read_profiles(tables)
    assert load(Profile, out / "profiles" / "opt-350m.gh200.json") == expected
    assert load(PublishedLinks, out / "links.json") == read_links(tables)


def test_the_command_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "import", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "layer_profiles.csv: no such file; give the folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing is written before everything is read"
