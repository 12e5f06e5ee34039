"""Four nodes of this machine with unequal shares of its cores, taken from discovery to training as a user would.

Each node is one process in a control group of its own (:mod:`.cpu_quotas`) under a node name of its own. Libraries are
imported before a process enters its group, as nobody waits for imports in what is measured here.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.cli import main
from hetero.launch.planned_flags import launch_flags, planned_flags
from hetero.plan.ir import Plan
from hetero.profiling.measured_links import MeasuredLinks
from hetero.serialization import load, save
from hetero.spec.cluster import ClusterSpec, Links, NodePair
from hetero.spec.model import ModelSpec
from tests.helpers.commands import ROOT, Finished
from tests.helpers.cpu_quotas import Quota
from tests.helpers.forked_launch import forked
from tests.helpers.ports import free_ports

NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")

_ON_ITS_NODE = """import os, runpy, sys
sys.path.insert(0, {root!r})
import tests.helpers.preload
rank = int(os.environ["RANK"])
os.environ["SLURMD_NODENAME"] = f"node{{rank}}"
with open({members!r}[rank], "w") as group:
    group.write(str(os.getpid()))
sys.argv = [{script!r}, *sys.argv[1:]]
runpy.run_path({script!r}, run_name="__main__")
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnequalCpus:
    """The nodes, and a folder for all files of the chain.

    nodes: the group of each, those that are alike side by side.
    """

    folder: Path
    nodes: Sequence[Quota]
    model: ModelSpec

    def program(self, script: str) -> Path:
        """A program that runs ``script`` of this repository in the group of its rank."""
        path = self.folder / f"on_its_node_{Path(script).parent.name}_{Path(script).stem}.py"
        path.write_text(
            _ON_ITS_NODE.format(
                root=str(ROOT),
                members=[str(node.members) for node in self.nodes],
                script=str(ROOT / script),
            )
        )
        return path

    def discover(self) -> ClusterSpec:
        """What ``hetero discover`` writes, on all nodes together."""
        out = self.folder / "discovered.yaml"
        words = ["--out", str(out), "--force"]
        _succeeded(forked(len(self.nodes), words, script=str(self.program("hetero/discovery/__main__.py"))))
        return load(ClusterSpec, out)

    def profile(
        self, cluster: ClusterSpec, *flags: str, budget_s: float, link_s: float, timeout_s: float
    ) -> tuple[list[Path], MeasuredLinks]:
        """What ``hetero profile run`` measures on all nodes together: a profile of each device type, and the links."""
        save(self.model, self.folder / "model.json")
        out = self.folder / "profiles"
        save(cluster, self.folder / "cluster.json")
        words = ["--model", str(self.folder / "model.json"), "--out", str(out), "--device", "cpu", "--tp", "1"]
        words += [*NO_DROPOUT, "--budget-seconds", f"{budget_s:g}", "--link-seconds", f"{link_s:g}", *flags]
        words += ["--cluster", str(self.folder / "cluster.json")]
        program = self.program("hetero/profiling/run.py")
        _succeeded(forked(len(self.nodes), words, script=str(program), timeout_s=timeout_s))
        names = dict.fromkeys(node_type.device for node_type in cluster.node_types)
        profiles = [out / f"model.{name}.fp32.local.json" for name in names]
        return profiles, load(MeasuredLinks, out / "links.json")

    def plan(self, cluster: ClusterSpec, profiles: Sequence[Path], *, batch: int, limit_s: float) -> tuple[Path, Path]:
        """What ``hetero plan`` writes: the plan, and the fastest uniform one."""
        save(cluster, self.folder / "cluster.json")
        best, uniform = self.folder / "plan.json", self.folder / "uniform.json"
        words = ["--cluster", str(self.folder / "cluster.json"), "--model", str(self.folder / "model.json")]
        words += ["--global-batch-size", str(batch), "--time-limit", f"{limit_s:g}", *NO_DROPOUT]
        words += [word for path in profiles for word in ("--profile", str(path))]
        assert main(["plan", *words, "--out", str(best), "--uniform-out", str(uniform)]) == 0
        return best, uniform

    def launch(self, plan: Path, *flags: str) -> Finished:
        """``hetero launch --run`` of a plan, to its end: a torchrun for every node."""
        (port,) = free_ports(1)
        words = ["--program", str(self.program("pretrain_gpt.py")), "--master-port", str(port)]
        words += ["--hosts", ",".join(f"127.0.0.{1 + node}" for node in range(len(self.nodes)))]
        for variable in ("OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", f"PYTHONPATH={ROOT}", "COLUMNS=200"):
            words += ["--env", variable]
        words += ["--logs", str(self.folder / f"{plan.stem}-logs"), "--run", "--", *flags]
        command = [sys.executable, "-W", "ignore", "-m", "hetero", "launch", str(plan), *words]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return _succeeded(Finished(ran.returncode, ran.stdout, ran.stderr))

    def train(self, plan: Path, *flags: str) -> Finished:
        """The same ranks without a launcher, which takes a tenth of the time to start."""
        words = launch_flags(planned_flags(load(Plan, plan), plan), flags)
        return _succeeded(forked(len(self.nodes), words, script=str(self.program("pretrain_gpt.py"))))


def with_links(cluster: ClusterSpec, links: MeasuredLinks) -> ClusterSpec:
    """``cluster`` with the measured links between nodes in place of the assumed ones, as a user types them in."""
    names = {node_type.device: node_type.name for node_type in cluster.node_types}
    pairs = tuple(
        NodePair(node_types=(names[each.devices[0]], names[each.devices[1]]), link=each.link)
        for each in links.between_nodes
    )
    return dataclasses.replace(cluster, links=Links(node_pairs=pairs))


def _succeeded(run: Finished) -> Finished:
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return run
