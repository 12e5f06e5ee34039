"""Four processes with unequal shares of a core, nothing emulated: discover, profile, plan, launch.

How long steps take is for tests/bench/bench_unequal_cpus.py: nothing is timed here.
"""

import dataclasses
import re
from pathlib import Path

import pytest

from hetero.plan.ir import Plan
from hetero.serialization import load
from hetero.spec.profile import Profile
from tests.bench.bench_unequal_cpus import MODEL, TRAINING
from tests.helpers.commands import Finished
from tests.helpers.cpu_quotas import mechanism, quotas
from tests.helpers.unequal_cpus import NO_DROPOUT, UnequalCpus, with_links

BY = mechanism()
CORES = (0.2, 0.2, 0.5, 0.5)
BATCH, STEPS = 16, 2

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        BY is None,
        reason="limits processes by quotas of control groups: root, and a writable cpu controller in /sys/fs/cgroup",
    ),
]


def losses(run: Finished) -> list[float]:
    return [float(loss) for loss in re.findall(r"\| loss ([\d.]+)", run.stdout)]


def work_of_ranks(plan: Plan) -> list[float]:
    """Layers times samples that each rank computes in a step."""
    work = [0.0] * len(CORES)
    for r, _, stage in plan.stages():
        for rank in stage.ranks:
            work[rank] += (stage.end_layer - stage.first_layer) * plan.replicas[r].num_samples / len(stage.ranks)
    return work


@pytest.mark.rotates(every=6, turn=3)
def test_from_discovery_to_training_on_unequal_shares_of_a_core(tmp_path: Path) -> None:
    """Each device is called by its share, measured in it, and given work by it; the losses are the uniform plan's."""
    print(f"shares by {BY}")
    with quotas(CORES) as nodes:
        chain = UnequalCpus(folder=tmp_path, nodes=nodes, model=dataclasses.replace(MODEL, num_layers=2))
        cluster = chain.discover()
        found = [(node_type.device, node_type.count) for node_type in cluster.node_types]
        assert found == [("cpu-0.2-cores", 2), ("cpu-0.5-cores", 2)]

        sizes = ("--micro-batch-size", "2", "4", "--recompute", "none")
        profiles, links = chain.profile(cluster, *sizes, budget_s=8, link_s=2, timeout_s=200)
        assert [load(Profile, path).device for path in profiles] == [device for device, _ in found]
        assert [each.devices for each in links.between_nodes] == [
            ("cpu-0.2-cores", "cpu-0.2-cores"),
            ("cpu-0.2-cores", "cpu-0.5-cores"),
            ("cpu-0.5-cores", "cpu-0.5-cores"),
        ]

        best, uniform = chain.plan(with_links(cluster, links), profiles, batch=BATCH, limit_s=5)
        slow_a, slow_b, fast_a, fast_b = work_of_ranks(load(Plan, best))
        assert max(slow_a, slow_b) < min(fast_a, fast_b)

        flags = ["--train-iters", str(STEPS), *TRAINING.split(), *NO_DROPOUT]
        flags += ["--distributed-backend", "gloo"]
        launched, alone = losses(chain.launch(best, *flags)), losses(chain.train(uniform, *flags))
    assert len(launched) == STEPS
    assert launched == pytest.approx(alone, rel=1e-5)
