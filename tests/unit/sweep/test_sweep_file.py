"""What is wrong with a sweep file is told at once, before anything is planned."""

from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.sweep.combinations import Combination, read_sweep
from tests.unit.sweep.small import CLUSTER, SWEEP, write_small


def test_a_grid_stands_for_all_combinations_of_its_lists(tmp_path: Path) -> None:
    text = SWEEP + "    precisions: [fp32, fp16]\n    objectives: [time, money]\n"
    spec, found = read_sweep(write_small(tmp_path, text))
    assert spec.title == "Small"
    assert [(each.global_batch_size, each.precision, each.objective) for each in found] == [
        (batch, precision, objective)
        for batch in (4, 8)
        for precision in ("fp32", "fp16")
        for objective in ("time", "money")
    ]
    assert {(each.cluster_name, each.model_name, each.seq_length) for each in found} == {("four", "six-layers", 2048)}
    assert len({each.key for each in found}) == len(found)


def keys(folder: Path, sweep: str = SWEEP) -> list[str]:
    _, found = read_sweep(write_small(folder, sweep))
    return [each.key for each in found]


def test_a_key_is_that_of_the_contents_and_not_of_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys(tmp_path)
    (tmp_path / "other.yaml").write_text("# the same under another name\n" + CLUSTER, encoding="utf-8")
    assert keys(tmp_path, SWEEP.replace("four", "other")) == before
    (tmp_path / "other.yaml").write_text(CLUSTER.replace("price_per_hour: 2", "price_per_hour: 3"), encoding="utf-8")
    assert set(keys(tmp_path, SWEEP.replace("four", "other"))).isdisjoint(before)
    assert set(keys(tmp_path, SWEEP.replace("time_limit_s: 2", "time_limit_s: 3"))).isdisjoint(before)
    monkeypatch.setattr("hetero.sweep.combinations.VERSION", "another")
    assert set(keys(tmp_path)).isdisjoint(before)


def message(folder: Path, sweep: str, monkeypatch: pytest.MonkeyPatch) -> str:
    def planned(_: Combination) -> None:
        raise AssertionError("it was planned")

    monkeypatch.setattr("hetero.sweep.evaluate.plan_cluster", planned)
    path = write_small(folder, sweep)
    with pytest.raises(ConfigError) as caught:
        read_sweep(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    return said


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("batch_sizes", "batch_size", "unknown key 'grids.0.global_batch_size' (did you mean 'global_batch_sizes'?)"),
        ("title: Small", "colour: red", "unknown key 'colour' (known keys: grids, title, settings, emulation, launch)"),
        ("[4, 8]", "[4, 0]", "grids.0: global_batch_sizes lists 0, all must be at least 1"),
        ("[4, 8]", "[4, 4]", "grids.0: global_batch_sizes lists 4 more than once; once is enough"),
        ("[4, 8]", "[]", "grids.0: global_batch_sizes is empty, it must list at least one"),
        ("time_limit_s: 2", "time_limit_s: 0", "settings: time_limit_s is 0, must be above 0"),
        ("./four.yaml", "hapr_two_zones", "no cluster 'hapr_two_zones' ships (did you mean 'harp_two_zones'?)"),
        ("./six-layers.yaml", "./none.yaml", "none.yaml: no such file"),
        ("[4, 8]", "[4, 8]\n    seq_length: 4096", "four, six-layers, batch 4, fp32 and 1 more: planner: "),
        ("time_limit_s: 2", "profiles: [p.json]", "p.json: no such file"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, expected: str
) -> None:
    assert expected in message(tmp_path, SWEEP.replace(old, new), monkeypatch)


def test_all_mistakes_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SWEEP.replace("./four.yaml", "nowhere").replace("./six-layers.yaml", "opt-350n").replace("[4, 8]", "[-1]")
    said = message(tmp_path, text + "    precison: [fp32]\n", monkeypatch)
    assert "3 things are wrong with it, nothing was planned:\n" in said
    for part in ("no cluster 'nowhere'", "no model 'opt-350n' ships (did you mean 'opt-350m'?)", "grids.0.precison"):
        assert part in said


def test_money_needs_prices_and_a_combination_is_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "free.yaml").write_text(CLUSTER.replace("    price_per_hour: 2\n", ""), encoding="utf-8")
    grids = SWEEP.partition("grids:\n")[2]
    text = SWEEP.replace("./four.yaml", "./four.yaml, ./free.yaml") + "    objectives: [money]\n" + grids + grids
    said = message(tmp_path, text, monkeypatch)
    assert "free, six-layers, batch 4, fp32, by money and 1 more: cluster: node type 'slow' has no price" in said
    assert "two grids ask for four, six-layers, batch 8, fp32; take it out of one of them" in said
