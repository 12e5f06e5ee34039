"""A rank that has trained leaves no process group behind: their threads abort a process that ends beside them.

gloo's threads live as long as their group does in C++, whoever holds it, so they are what is counted.
"""

import dataclasses
from pathlib import Path

import pytest

from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.serialization import save
from tests.helpers.commands import MODEL, command_line
from tests.helpers.forked_launch import forked
from tests.helpers.plans import plan, replica, sharded, stage

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LOOKS_BACK = """
import contextlib, gc, sys, time
from pathlib import Path
import pretrain_gpt
from hetero.runtime import cpu_backend
cpu_backend.install()
import megatron.pretrain.launch as launch

def threads_of_groups():
    count = 0
    for task in Path("/proc/self/task").iterdir():
        # Others end while these are counted.
        with contextlib.suppress(OSError):
            count += (task / "comm").read_text().strip() == "pt_gloo_runloop"
    return count

leave_world = launch.leave_world

def counted(**options):
    print(f"groups have {threads_of_groups()} threads")
    leave_world(**options)

launch.leave_world = counted
code = pretrain_gpt.main(sys.argv[1:])
# As the interpreter does when it ends; what the training has frozen stays.
gc.collect()
# A thread that is just ending may hold the last reference; what is left behind for good does not go away.
deadline = time.monotonic() + 5
while threads_of_groups() and time.monotonic() < deadline:
    time.sleep(0.01)
print(f"groups have left {threads_of_groups()} threads")
sys.exit(code)
"""


def interleaved() -> Plan:
    """Stages in turns, beside a replica with tensor parallelism in a domain of its own: a thread runs their sums."""
    first = replica(*(stage(layers=(n, n + 1), ranks=(n % 2,)) for n in range(4)), num_samples=3)
    made = plan(MODEL, [first, replica(stage(layers=(0, 4), ranks=(2, 3), tp=2, sp=True), num_samples=3)])
    return dataclasses.replace(made, gradient_sync=GradientSyncPlan(domains=((0, 1), (2, 3))))


def delayed() -> Plan:
    """Split backwards, a shared optimizer, and weights that are gathered beside the next step."""
    stages = stage(layers=(0, 2), ranks=(0, 1), dp=2, delay=1), stage(layers=(2, 4), ranks=(2,), delay=0)
    return sharded(plan(MODEL, [replica(*stages, num_samples=6)]))


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(interleaved(), id="interleaved"),
        pytest.param(delayed(), id="delayed", marks=pytest.mark.rotates(every=2, turn=1)),
    ],
)
def test_no_group_outlives_the_world(made: Plan, tmp_path: Path) -> None:
    """After saves in the background and evaluations."""
    save(made, tmp_path / "plan.json")
    (tmp_path / "look.py").write_text(LOOKS_BACK)
    argv = command_line(
        hetero_plan=str(tmp_path / "plan.json"),
        save=str(tmp_path / "out"),
        save_interval="2",
        eval_interval="2",
        eval_iters="1",
    )
    argv += ["--async-save"] + (["--overlap-param-gather"] if made.distributed_optimizer else [])
    run = forked(made.world_size, argv, script=str(tmp_path / "look.py"))
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stdout.splitlines() if line.startswith("groups have ")]
    before, after = said[::2], said[1::2]
    assert len(before) == len(after) == made.world_size
    assert all(line != "groups have 0 threads" for line in before), "threads are called otherwise now"
    assert after == ["groups have left 0 threads"] * made.world_size
