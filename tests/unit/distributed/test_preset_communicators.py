"""How many communicators ranks get by plans of the preset clusters: counted, and made in torch's fake process group."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hetero.distributed.process_groups import create_groups
from hetero.plan.communicators import PlanCommunicators, max_communicators
from hetero.plan.ir import Plan
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import plan_cluster
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from tests.unit.planner.clusters import GPT_NEO, OPT_30B, OPT_350M, problem

PRESETS = Path(__file__).parents[3] / "scripts" / "presets"
AT_MOST = 24
"""What presets may need; the limit leaves room for plans that people write."""

MODELS = {"a100_v100": (GPT_NEO, 256), "a100_v100_192": (OPT_30B, 512)}
"""Model and batch of a cluster; all others train OPT-350M."""

COUNTED_S = 0.5
"""Of planning, in estimated seconds; more where there is no plan after that."""

MORE_COUNTED_S = {"four_types_4096": 1.0}

LARGE = ("a100_v100_gh200_128", "a100_v100_gh200_96", "a100_gh200_v100_512")
LARGEST = "four_types_4096"
FAST = "quickstart"


def planned(path: Path) -> Plan:
    """The best plan that a little counted work finds."""
    cluster = load(ClusterSpec, path)
    model, batch = model_of(path, cluster)
    counted_s = MORE_COUNTED_S.get(path.stem, COUNTED_S)
    question = problem(cluster, model, batch, time_limit_s=counted_s)
    return plan_cluster(question, deadline=Deadline(counted_s, CountedWork())).plan


def model_of(path: Path, cluster: ClusterSpec) -> tuple[ModelSpec, int]:
    return MODELS.get(path.stem, (OPT_350M, 8 * cluster.num_devices))


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _cases() -> Iterator[Any]:
    for path in sorted((PRESETS / "clusters").glob("*.yaml")):
        marks = [] if path.stem == FAST else [pytest.mark.slow]
        if path.stem == LARGEST:
            marks.append(pytest.mark.rotates(every=6, turn=2))
        elif path.stem != FAST:
            marks.append(pytest.mark.rotates("large" if path.stem in LARGE else "small"))
        yield pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", list(_cases()))
def test_ranks_of_a_preset_cluster_are_in_few(path: Path) -> None:
    made = planned(path)
    counts = PlanCommunicators(made).counts()
    rank, most = max(counts.items(), key=lambda each: each[1])
    assert most <= AT_MOST < max_communicators(made)
    assert groups_of_rank(made, rank) == most


def test_so_are_those_of_the_preset_plan() -> None:
    made = load(Plan, PRESETS / "plans" / "quickstart.json")
    assert [groups_of_rank(made, rank) for rank in range(made.world_size)] == [
        PlanCommunicators(made).counts()[rank] for rank in range(made.world_size)
    ]


def groups_of_rank(made: Plan, rank: int) -> int:
    """Groups of several ranks that torch makes for ``rank``, the world among them. Nobody else has to be there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=made.world_size)
    context = create_groups(made, device=torch.device("cpu"))
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
    dist.destroy_process_group()
    assert {*context.groups} >= {*groups}
    return len(groups)
