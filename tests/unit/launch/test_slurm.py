"""The step of a launch as a shell runs it, and what an allocation says of itself."""

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.launch.slurm import Allocation, allocation_in, check_allocation, step_script
from hetero.launch.torchrun import TorchrunOptions
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.host import HostProfile

GPUS = ClusterSpec(
    node_types=(
        NodeType(name="a100", device="A100-40", gpus_per_node=8, count=2),
        NodeType(name="v100", device="V100-16", gpus_per_node=4),
    )
)
OPTIONS = TorchrunOptions(flags=("--hetero-plan", "plan.json", "--bf16", "--split", "9, 1"), address="", port=0)


def test_the_shell_gets_every_word_as_it_was_given() -> None:
    options = TorchrunOptions(
        torchrun="/my env/torchrun",
        program="it's.py",
        flags=("--split", "9, 1"),
        address="ib0 host",
        port=7,
        environment={"A": "b 'c'", "B": None},
    )
    stand_in = "srun() { sh -c 'echo $A $B $RENDEZVOUS_HOST $RENDEZVOUS_PORT'; shift 7; printf '<%s>' \"$@\"; }\n"
    text = stand_in + step_script(ClusterSpec(node_types=GPUS.node_types[:1]), options)
    bash = ["bash", "-euc", text]
    done = subprocess.run(bash, capture_output=True, text=True, check=True, env={**os.environ, "B": "d"})
    assert done.stdout == "b 'c' d ib0 host 7\n<node><8><></my env/torchrun><it's.py><--split><9, 1>"


def test_a_job_without_a_variable_that_it_needs_ends_with_what_to_do() -> None:
    options = dataclasses.replace(OPTIONS, address="here", port=7, environment={"A_VARIABLE_OF_THIS_TEST": None})
    text = "srun() { echo runs; }\n" + step_script(GPUS, options)
    done = subprocess.run(["bash", "-euc", text], capture_output=True, text=True, check=False)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "A_VARIABLE_OF_THIS_TEST: is not set: set it before sbatch, which hands its environment on" in done.stderr


@pytest.mark.parametrize(
    ("device", "binding", "numactl", "expected"),
    [
        ("A100-40", None, True, "--numa-binding node"),
        ("A100-40", None, False, ""),
        ("A100-40", "socket", False, "--numa-binding socket"),
        ("cpu", None, True, ""),
    ],
)
def test_ranks_are_bound_where_the_cluster_file_knows_processors(
    tmp_path: Path, device: str, binding: str | None, numactl: bool, expected: str
) -> None:
    """Who asks for a binding gets it, or torchrun's error."""
    host = HostProfile(source="a test", memory_gib=500, numa_nodes=2)
    node = NodeType(name="box", device=device, gpus_per_node=1, host=host)
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "$@"\n')
    if numactl:
        (tmp_path / "numactl").write_text("#!/bin/bash\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    options = dataclasses.replace(OPTIONS, address="here", numa_binding=binding)
    stand_in = 'srun() { shift 4; SLURM_PROCID=0 /bin/"$@"; }\n'
    done = subprocess.run(
        ["/bin/bash", "-euc", stand_in + step_script(ClusterSpec(node_types=(node,)), options)],
        capture_output=True,
        text=True,
        check=True,
        env={"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "box0", "PATH": str(tmp_path)},
    )
    head, _, tail = re.split(r" (--rdzv-backend hetero-static --rdzv-endpoint here:[12]\d{4}) ", done.stdout)
    assert head.split() == ["--nnodes", "1", "--nproc-per-node", "1", *expected.split()]
    assert tail.startswith(
        "--rdzv-conf node_rank=0 --log-dir launch-logs/7/box0 --tee 3 pretrain_gpt.py --hetero-plan plan.json"
    )
    said = "hetero: box0: ranks are not bound to the processors near their GPU: no numactl\n"
    assert done.stderr == (said if device != "cpu" and not numactl and binding is None else "")


def test_an_allocation_is_read_and_held_against_the_plan() -> None:
    assert allocation_in({"PATH": "/bin"}) is None
    plain = allocation_in({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "gpu[0-2]"})
    assert plain == Allocation(num_nodes=(3,), node_lists=("gpu[0-2]",))
    mixed = allocation_in(
        {
            "SLURM_JOB_ID": "7",
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
            "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
        }
    )
    assert mixed is not None
    check_allocation(mixed, GPUS)
    said = r"has 3 nodes in one component, the plan needs 2 \+ 1 nodes in 2 components \(2 of 'a100', 1 of 'v100'\)"
    with pytest.raises(ConfigError, match=said):
        check_allocation(plain, GPUS)
    with pytest.raises(ConfigError, match="SLURM_HET_SIZE is 'two', must be a whole number"):
        allocation_in({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "two"})
