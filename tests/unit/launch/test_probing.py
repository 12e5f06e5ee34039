"""What hosts are asked before anything starts, with shells of this machine as hosts."""

import os
import stat
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.launch.hosts import assigned_hosts
from hetero.launch.probing import check_hosts
from hetero.launch.torchrun import TorchrunOptions
from hetero.spec.cluster import ClusterSpec, NodeType
from tests.unit.launch.plans import LINK, UNEVEN, written

GPUS = ClusterSpec(node_types=(NodeType(name="a100", device="A100-40", gpus_per_node=3, inside_node=LINK),))


def asked(folder: Path, plan: Path, cluster: ClusterSpec = GPUS) -> None:
    """Hold the host that works in ``folder`` against the plan that this process has."""
    check_hosts(
        assigned_hosts(cluster, ["localhost"]),
        TorchrunOptions(torchrun="sh", program="program.py", address="", port=0),
        plan=plan,
        folder=str(folder),
        ssh=("false",),
        devices=cluster.device_types,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a host with two GPUs."""
    command = tmp_path / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A100'; echo 'GPU 1: NVIDIA A100'\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    (tmp_path / "program.py").touch()
    return tmp_path


def test_gpus_are_counted(folder: Path) -> None:
    plan = Path(written(folder))
    with pytest.raises(
        ConfigError, match=r"host localhost \(node 0, a100\): it shows 2 GPUs .*, the plan has 3 x A100-40 there; give"
    ):
        asked(folder, plan)
    two = ClusterSpec(node_types=(NodeType(name="a100", device="A100-40", gpus_per_node=2, inside_node=LINK),))
    asked(folder, plan, two)


def test_another_plan_in_the_file_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder)
    (folder / "here").mkdir()
    written(folder / "here", UNEVEN)
    monkeypatch.chdir(folder / "here")
    with pytest.raises(ConfigError, match=r"plan\.json is another plan there, or missing; copy it"):
        asked(folder, Path("plan.json"))


def test_a_folder_that_is_not_there_is_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*/none; hosts need what this one has"):
        asked(folder / "none", Path(written(folder)))
