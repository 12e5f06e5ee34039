"""Which device of a cluster file a rank of ``hetero profile run`` is."""

import dataclasses
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.profiling.run import device_in_cluster
from hetero.spec.cluster import ClusterSpec
from tests.unit.report.samples import cluster

FILE = Path("c.yaml")
MIXED = cluster(("fast", "A100-40", 4, 2), ("slow", "V100-16", 2, 1))
ALIKE = cluster(("fast", "A100-40", 4, 2), ("far", "A100-40", 4, 1, "zone"))
FAST, SLOW = ["A100-40"], ["V100-16"]


def names(spec: ClusterSpec, world_size: int) -> list[str]:
    return [device_in_cluster(spec, node="n", rank=r, world_size=world_size, source=FILE) for r in range(world_size)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (MIXED, 8 * FAST + 2 * SLOW),
        (MIXED, 2 * FAST + SLOW),
        (MIXED, FAST + SLOW),
        (ALIKE, 12 * FAST),
        (ALIKE, 3 * FAST),
        (ALIKE, FAST),
    ],
)
def test_ranks_are_in_the_order_of_the_file(spec: ClusterSpec, expected: list[str]) -> None:
    """A rank for each device, for each node, for each node type; and one alone where all devices are alike."""
    assert names(spec, len(expected)) == expected


@pytest.mark.parametrize("world_size", [1, 4])
def test_another_number_of_ranks_is_refused(world_size: int) -> None:
    message = rf"^--cluster c.yaml: it has 10 devices on 3 nodes of 2 node types, the launch has {world_size} ranks?; "
    with pytest.raises(ConfigError, match=message + "start a rank for each device"):
        names(MIXED, world_size)


def test_a_node_that_the_file_names_has_its_device_in_any_order_of_ranks() -> None:
    """Of Slurm's order the file knows nothing; a launch may have any number of ranks then."""
    types = [
        dataclasses.replace(each, nodes=tuple(f"{each.name}{i}" for i in range(each.count)))
        for each in MIXED.node_types
    ]
    spec = dataclasses.replace(MIXED, node_types=tuple(types))
    found = [
        device_in_cluster(spec, node=node, rank=rank, world_size=2, source=FILE)
        for rank, node in enumerate(("slow0", "fast1"))
    ]
    assert found == SLOW + FAST
