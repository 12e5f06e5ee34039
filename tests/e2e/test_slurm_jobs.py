"""Plain training under a real Slurm of two kinds of nodes: to its end, cancelled, out of time, and after a lost node.

Ranks compute on the CPU; GPUs are files that Slurm counts, for a stand-in of torchrun to tell who got which.
"""

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.plan.ir import Plan
from hetero.plan.provenance import PlanPrediction, PlanProvenance
from hetero.serialization import load, save
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.pretrain_scripts import commands, model_of
from tests.helpers.slurm_cluster import NodeKind, SlurmCluster, needs_slurm
from tests.helpers.sources import ROOT
from tests.helpers.stand_ins import HETERO, put_command
from tests.helpers.synthetic_profiles import profile
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_slurm,
    pytest.mark.timeout(300),
]

SCRIPTS = ROOT / "scripts" / "slurm"
LINK = Link(bandwidth_gb_per_s=1, latency_us=10)
FAST = NodeType(name="fast", device="cpu", gpus_per_node=2, inside_node=LINK)
SLOW = NodeType(name="slow", device="cpu", gpus_per_node=1)
LINKS = Links(between_nodes=LINK)
TWO_TYPES = ClusterSpec(node_types=(FAST, SLOW), links=LINKS)
ONE_TYPE = ClusterSpec(node_types=(NodeType(name="box", device="cpu", gpus_per_node=1, count=2),), links=LINKS)
TP_THEN_ONE = plan(
    llama_model(num_layers=3),
    [replica(stage(layers=(0, 2), ranks=(0, 1), tp=2), stage(layers=(2, 3), ranks=(2,)), num_samples=4)],
)
TWO_STAGES = plan(
    llama_model(num_layers=3),
    [replica(stage(layers=(0, 2), ranks=(0,)), stage(layers=(2, 3), ranks=(1,)), num_samples=4)],
)

STEPS = "--lr 1e-2 --lr-decay-iters 100 --mock-data --tokenizer-type NullTokenizer --num-workers 0 --log-interval 1"
DROPOUT = "--attention-dropout 0 --hidden-dropout 0 --distributed-backend gloo"
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


GOES_ON = re.compile(r"training goes on after step (\d+)")
STOPPED = re.compile(r"stopped after step (\d+) of")

MORE_THAN_WAITED_FOR = 100_000
"""Steps."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    kinds = NodeKind(name="fast", count=2, num_gpus=2), NodeKind(name="slow", count=2, num_gpus=1)
    # A node that does not answer for so long is lost.
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), *kinds, settings={"SlurmdTimeout": "20"}) as cluster:
        yield cluster


class Job:
    """A batch script that was submitted in ``folder``."""

    def __init__(
        self,
        slurm: SlurmCluster,
        folder: Path,
        script: Path,
        *arguments: str,
        options: str = "",
        **variables: str,
    ) -> None:
        self._slurm = slurm
        self._out = folder / "out"
        path = f"{put_command(folder / 'bin', 'hetero', HETERO)}:{slurm.environment['PATH']}"
        given = (*options.split(), f"--chdir={folder}", f"--output={self._out}")
        self.number = slurm.submit(script, *arguments, options=given, PATH=path, **VARIABLES, **variables)

    @property
    def said(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def steps(self) -> list[int]:
        """The steps that were made, in the order in which they were, over all runs of the job."""
        return [int(step) for step in re.findall(r"step +(\d+)/\d+ \| loss", self.said)]

    def until_step(self, step: int) -> None:
        """Wait for a step that is made in the run that there is now."""
        until(lambda: step in self.steps() or self.is_over())
        assert step in self.steps(), self.said

    def go_on(self) -> int:
        """Spare a job that was queued again Slurm's two minutes; the step that it goes on behind.

        Slurm may take the late word of a script's end for that of its next run: then it is over at once.
        """

        def has_loaded() -> bool:
            states = set(self._slurm.states(self.number).values())
            if not states:
                self._slurm.call("scontrol", "requeue", str(self.number), check=False)
            if states == {"PENDING"}:
                self._slurm.call("scontrol", "update", f"JobId={self.number}", "StartTime=now", check=False)
            return GOES_ON.search(self.said) is not None

        until(has_loaded)
        return int(GOES_ON.findall(self.said)[-1])

    def until_queued_again(self) -> None:
        until(lambda: "Restarts=0" not in self._slurm.call("scontrol", "show", "job", str(self.number)))

    def wait_for_end(self) -> str:
        self._slurm.wait_for_end(self.number)
        return self.said

    def cancel(self) -> str:
        self._slurm.call("scancel", str(self.number))
        return self.wait_for_end()

    def is_over(self) -> bool:
        return not self._slurm.states(self.number)


def flags(folder: Path, *, steps: int, saves: bool = False) -> list[str]:
    more = f" --save {folder}/checkpoint --load {folder}/checkpoint --save-interval 2" if saves else ""
    return f"{STEPS} {DROPOUT} --train-iters {steps}{more}".split()


def plan_file(folder: Path, trained: Plan, cluster: ClusterSpec) -> str:
    """The plan with the cluster that it is for, beside a program."""
    prediction = PlanPrediction(step_s=1, step_low_s=1, step_high_s=1, bubble_share=0)
    provenance = PlanProvenance(command="a test", cluster=cluster, prediction=prediction)
    save(dataclasses.replace(trained, provenance=provenance), folder / "plan.json")
    (folder / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    return str(folder / "plan.json")


def rank_logs(folder: Path) -> dict[str, str]:
    """By kind of node and local rank, what was said to its log."""
    paths = (folder / "launch-logs").glob("*/*/*/attempt_0/*/stdout.log")
    return {f"{path.parents[3].name[:-1]}/{path.parent.name}": path.read_text() for path in paths}


@pytest.mark.rotates(every=6, turn=0)
def test_a_written_script_trains_on_two_kinds_of_nodes_to_its_end(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A heterogeneous job. Each rank has a log, under the name of its node."""
    script, asked = tmp_path / "job.sbatch", ("fast:partition=fast", "slow:partition=slow")
    options = [word for each in asked for word in ("--sbatch-option", each)]
    words = ["--sbatch", str(script), *options, "--", *flags(tmp_path, steps=2)]
    assert main(["launch", plan_file(tmp_path, TP_THEN_ONE, TWO_TYPES), *words]) == 0
    job = Job(slurm, tmp_path, script)
    said = job.wait_for_end()
    assert job.steps() == [1, 2], said
    logs = rank_logs(tmp_path)
    assert sorted(logs) == ["fast/0", "fast/1", "slow/0"], said
    assert [each for each, text in logs.items() if "step 2/2 | loss" in text] != []


@pytest.mark.rotates(every=6, turn=4)
def test_a_job_out_of_time_saves_queues_itself_again_and_goes_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    """``pretrain_hetjob.sbatch``. It is told by hand what Slurm tells its shell two minutes before the end."""
    script, text = tmp_path / "my.sbatch", (SCRIPTS / "pretrain_hetjob.sbatch").read_text()
    for theirs, ours in (("nodes=2", "nodes=1"), ("gpus-per-node=a100:8", "partition=fast")):
        assert theirs in text
        text = text.replace(theirs, ours)
    script.write_text(text.replace("gpus-per-node=v100:4", "partition=slow"))
    own = flags(tmp_path, steps=MORE_THAN_WAITED_FOR, saves=True)
    job = Job(slurm, tmp_path, script, plan_file(tmp_path, TP_THEN_ONE, TWO_TYPES), *own)
    job.until_step(3)
    slurm.call("scancel", "--batch", "--signal=TERM", str(job.number))
    job.until_queued_again()
    assert f"out of time: job {job.number} queues itself again" in job.said
    (stopped,) = STOPPED.findall(job.said)
    assert job.go_on() == int(stopped) == job.steps()[-1], job.said
    until(lambda: job.steps()[-1] > int(stopped))
    assert job.steps() == list(range(1, job.steps()[-1] + 1)), "none is made twice"
    said = job.cancel()
    assert len(STOPPED.findall(said)) == 2, "cancelled, its ranks are told as well"


@contextlib.contextmanager
def taken_down(slurm: SlurmCluster, node: str, folder: Path) -> Iterator[None]:
    """An administrator takes a node for lost."""
    slurm.take_down(node)
    try:
        yield
    finally:
        slurm.resume(node)


@contextlib.contextmanager
def unplugged(slurm: SlurmCluster, node: str, folder: Path) -> Iterator[None]:
    """The cable of a node is pulled, which Slurm and the other ranks have to notice."""
    slurm.cut(node)
    try:
        yield
    finally:
        slurm.heal(node)
        until(lambda: "idle" in slurm.call("sinfo", "--noheader", f"--nodes={node}", "--format=%T"))


@contextlib.contextmanager
def preempted(slurm: SlurmCluster, node: str, folder: Path) -> Iterator[None]:
    """A job of more importance needs a node."""
    (script := folder / "urgent.sbatch").write_text("#!/bin/bash\nexec sleep 3600\n")
    number = slurm.submit(script, options=("--partition=urgent", f"--nodelist={node}", f"--output={folder}/urgent"))
    try:
        yield
    finally:
        slurm.call("scancel", str(number))
        slurm.wait_for_end(number)


@pytest.mark.rotates("losses", every=2)
@pytest.mark.parametrize("lost", [taken_down, unplugged, preempted])
def test_a_job_that_loses_a_node_goes_on_from_its_last_checkpoint(
    lost: Callable[[SlurmCluster, str, Path], AbstractContextManager[None]], slurm: SlurmCluster, tmp_path: Path
) -> None:
    """``pretrain.sbatch``, on nodes of which the second is lost and comes back."""
    own = flags(tmp_path, steps=MORE_THAN_WAITED_FOR, saves=True)
    arguments = plan_file(tmp_path, TWO_STAGES, ONE_TYPE), *own
    job = Job(slurm, tmp_path, SCRIPTS / "pretrain.sbatch", *arguments, options="--nodes=2 --nodelist=fast1,slow1")
    job.until_step(4)
    with lost(slurm, "slow1", tmp_path):
        job.until_queued_again()
    assert "queues itself again" not in job.said, "Slurm has done it"
    saved = job.go_on()
    assert saved >= 2, "of two steps one is saved"
    until(lambda: job.said.count("| loss", job.said.rindex("goes on after")) > 0)
    assert job.steps()[0] == 1
    assert job.steps().count(1) == 1, "it never begins anew"
    job.cancel()


@pytest.mark.rotates(every=6, turn=0)
def test_nodes_that_nobody_has_described_are_planned_for(slurm: SlurmCluster, tmp_path: Path) -> None:
    """``discover_and_pretrain.sbatch`` with a model's script at its small size; processors have a made-up profile."""
    (folder := tmp_path / "lines").mkdir()
    (tmp_path / "any.yaml").touch()
    small = {"TINY": "1", "DATA_PATH": "none", "TOKENIZER_TYPE": "ByteLevelTokenizer"}
    planning, _ = commands("llama2_7b", folder, CLUSTER=str(tmp_path / "any.yaml"), **small)
    made_up = profile(model_of(planning), device="cpu", seq_length=64, block_s=(0.01, 0.02))
    save(made_up, tmp_path / "cpu.json")
    job = Job(
        slurm,
        tmp_path,
        SCRIPTS / "discover_and_pretrain.sbatch",
        str(ROOT / "scripts" / "pretrain_llama2_7b.sh"),
        options="--nodes=2 --partition=fast",
        TINY="1",
        RUN=str(tmp_path / "run"),
        PYTHON=sys.executable,
        PLANNER=f"--hetero-profile {tmp_path}/cpu.json --hetero-plan-time-limit 2",
    )
    said = job.wait_for_end()
    assert job.steps() == [1, 2, 3, 4], said
    (node_type,) = load(ClusterSpec, tmp_path / "run" / "cluster.yaml").node_types
    assert (node_type.count, node_type.device) == (2, "cpu")
    assert load(Plan, tmp_path / "run" / "plan.json").world_size == 2


def test_each_node_gives_its_ranks_its_own_gpus(slurm: SlurmCluster, tmp_path: Path) -> None:
    """By what ``hetero launch`` asks of Slurm for a plan; torchrun is one that says what it sees."""
    put_command(tmp_path, "torchrun", '#!/bin/bash\necho "SEES $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES: $*"\n')
    kinds = dataclasses.replace(FAST, device="A100-40"), dataclasses.replace(SLOW, device="V100-16")
    cluster = ClusterSpec(node_types=kinds, links=LINKS)
    stages = (
        stage(layers=(0, 2), ranks=(0, 1), tp=2, device="A100-40"),
        stage(layers=(2, 3), ranks=(2,), device="V100-16"),
    )
    trained = plan(llama_model(num_layers=3), [replica(*stages, num_samples=4)])
    script = tmp_path / "job.sbatch"
    asked = ("fast:gpus-per-node=fast:2", "slow:gpus-per-node=slow:1")
    options = [word for each in asked for word in ("--sbatch-option", each)]
    how = ["--torchrun", str(tmp_path / "torchrun"), "--sbatch", str(script), *options]
    assert main(["launch", plan_file(tmp_path, trained, cluster), *how, "--", *flags(tmp_path, steps=2)]) == 0
    said = Job(slurm, tmp_path, script).wait_for_end()
    seen = re.findall(
        r"SEES (fast|slow)\d ([\d,]+): --nnodes 2 --nproc-per-node (\d) .* --rdzv-conf node_rank=(\d)", said
    )
    assert sorted(seen) == [("fast", "0,1", "2", "0"), ("slow", "0", "1", "1")], said


def test_a_job_hands_variables_on_that_its_script_does_not_have(slurm: SlurmCluster, tmp_path: Path) -> None:
    """``--env NAME``: the value is in the environment of sbatch, and the job ends at once where it is not."""
    put_command(tmp_path, "torchrun", '#!/bin/bash\necho "HAS $A_VALUE $ANOTHER"\n')
    script = tmp_path / "job.sbatch"
    how = ["--torchrun", str(tmp_path / "torchrun"), "--sbatch", str(script), "--env", "A_VALUE", "--env", "ANOTHER=7"]
    assert main(["launch", plan_file(tmp_path, TWO_STAGES, ONE_TYPE), *how, "--", *flags(tmp_path, steps=2)]) == 0
    with_value, without = tmp_path / "with", tmp_path / "without"
    for folder in (with_value, without):
        folder.mkdir()
    said = Job(slurm, with_value, script, A_VALUE="from sbatch").wait_for_end()
    assert [line for line in said.splitlines() if "HAS" in line] == ["HAS from sbatch 7"] * 2
    said = Job(slurm, without, script).wait_for_end()
    assert "A_VALUE: is not set: set it before sbatch" in said
    assert "HAS" not in said
