"""The Slurm of the tests: its hosts are hosts of their own, and end with the test process."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.slurm_cluster import NodeKind, SlurmCluster, needs_slurm
from tests.helpers.sources import ROOT
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_slurm, pytest.mark.timeout(60)]

_STARTS_A_CLUSTER = """
import sys, time
from pathlib import Path
from tests.helpers.slurm_cluster import NodeKind, SlurmCluster
cluster = SlurmCluster(Path(sys.argv[1]), NodeKind(count=1))
cluster.start()
print("started", flush=True)
time.sleep(60)
"""


def test_nodes_are_hosts_with_names_gpus_and_shared_memory_of_their_own(tmp_path: Path) -> None:
    """Debian's ``/etc/hosts``, and node names that are no host names; Ctrl-C reaches what runs in the allocation."""
    outside = socket.gethostname(), psutil.net_if_addrs().keys()
    kinds = NodeKind(name="mixed", count=1, gpus={"v100": 2, "a100": 2}), NodeKind(name="plain", count=1)
    slurm = SlurmCluster(tmp_path, *kinds, host_name="host-{}", names_known="own on loopback")
    slurm.start()
    try:
        asks = "echo $SLURMD_NODENAME $(hostname) $(hostname --ip-address) $(getent hosts host-plain0 | wc -l)"
        said = slurm.call("srun", "--nodes=2", "bash", "-c", f"touch /dev/shm/$SLURMD_NODENAME; {asks} $(ls /dev/shm)")
        assert sorted(said.splitlines()) == [
            "mixed0 host-mixed0 127.0.1.1 0 mixed0",
            "plain0 host-plain0 127.0.1.1 1 plain0",
        ]
        seen = slurm.call("srun", "--gpus=a100:2", "bash", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES")
        assert seen == "mixed0 2,3\n"
        runs = ["srun", "--quit-on-interrupt", "--partition=plain", "bash", "-c"]
        with slurm.terminal(*runs, "echo started; sleep 60", folder=tmp_path) as terminal:
            wait_until(lambda: "started" in terminal.said)
            terminal.press_ctrl_c()
            terminal.wait()
        assert "sending Ctrl-C" in terminal.said
        assert (socket.gethostname(), psutil.net_if_addrs().keys()) == outside
    finally:
        slurm.stop()


def test_a_killed_test_process_leaves_no_process(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _STARTS_A_CLUSTER, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert {"slurmctld", "slurmd", "munged"} <= {child.name() for child in children}
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(child.is_running() for child in children))


def test_a_cluster_that_does_not_start_says_what_its_daemons_said_and_leaves_none(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    slurm = SlurmCluster(tmp_path, NodeKind(count=1), settings={"SelectType": "select/none"})
    with pytest.raises(RuntimeError, match="select/none"):
        slurm.start()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
