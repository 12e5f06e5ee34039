"""What ships has an origin, and fits together."""

import pytest

from hetero.data.presets import PresetKind, cluster_origins, is_name, preset_names, preset_path
from hetero.errors import ConfigError
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.sweep.combinations import read_sweep


def test_every_cluster_says_where_it_is_from() -> None:
    origins = cluster_origins()
    assert tuple(origins) == preset_names("cluster")
    for name, origin in origins.items():
        cluster = load(ClusterSpec, preset_path("cluster", name))
        priced = {each.price_per_hour is not None for each in cluster.node_types}
        assert priced == {origin.prices != ""}, name


@pytest.mark.parametrize("name", preset_names("sweep"))
def test_shipped_sweeps_can_be_planned(name: str) -> None:
    _, combinations = read_sweep(preset_path("sweep", name))
    assert len(combinations) == {"published": 24, "quick": 2}[name]
    if name == "published":
        assert {each.cluster_name for each in combinations} == set(preset_names("cluster"))


@pytest.mark.parametrize(
    ("text", "expected"), [("gpt-2.6b", True), ("./gpt-2.6b", False), ("mine.yaml", False), ("a/b", False)]
)
def test_a_name_is_told_from_a_path(text: str, expected: bool) -> None:
    assert is_name(text) is expected


@pytest.mark.parametrize("kind", ["cluster", "model", "sweep"])
def test_what_does_not_ship_is_refused(kind: PresetKind) -> None:
    with pytest.raises(ConfigError, match=rf"no {kind} 'quicc' ships.*; for a file of yours write a path, such as "):
        preset_path(kind, "quicc")
