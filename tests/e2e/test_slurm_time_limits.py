"""Trainings that Slurm tells itself that their time is over: they save, are queued again, and go on where they were.

All forms of a job wait together for Slurm, which looks at time limits every half minute. In the end the losses of both
runs are those of one process that never stopped.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hetero.plan.ir import Plan
from hetero.plan.provenance import PlanPrediction, PlanProvenance
from hetero.serialization import save
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.commands import MODEL, launched
from tests.helpers.elastic_cluster import STEPS_FILE
from tests.helpers.elastic_training import PROGRAM, elastic_words, saved_state, saving_flags, uninterrupted
from tests.helpers.etcd import EtcdServer
from tests.helpers.plans import plan, replica, stage
from tests.helpers.slurm_cluster import NodeKind, SlurmCluster, needs_slurm
from tests.helpers.sources import ROOT
from tests.helpers.stand_ins import HETERO, put_command
from tests.helpers.waiting import until

pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_slurm, pytest.mark.timeout(400)]

SCRIPTS = ROOT / "scripts" / "slurm"
STEPS = 20
STEPS_BEFORE_THE_END = 4
"""Ranks that have made these wait until they are told to stop, make the steps until all know, and save."""

ENDS = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")

LINK = Link(bandwidth_gb_per_s=1, latency_us=10)
TWIN = NodeType(name="twin", device="cpu", gpus_per_node=2, inside_node=LINK)
BOX = NodeType(name="box", device="cpu", gpus_per_node=1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training under Slurm.

    names: by which Slurm knows each of its jobs or tasks.
    untouched: name of a task of the same array that nothing is to happen to.
    """

    slurm: SlurmCluster
    folder: Path
    names: tuple[str, ...]
    untouched: str = ""

    @property
    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    def losses(self) -> list[tuple[int, str]]:
        """Each step that was made, and its loss; over all runs and outputs, by step."""
        found = re.findall(r"step +(\d+)/\d+ \| loss (\d+\.\d+)", self.said)
        return sorted((int(step), loss) for step, loss in found)

    def has_made(self, step: int) -> bool:
        is_over = not any(self.field(name, "JobState") in ("PENDING", "RUNNING") for name in self.names)
        assert not is_over or self.has_step(step), self.said
        return self.has_step(step)

    def has_step(self, step: int) -> bool:
        return step in dict(self.losses())

    def field(self, name: str, field: str) -> str:
        """What Slurm knows of a job."""
        shown = self.slurm.call("scontrol", "--oneliner", "show", "job", name).splitlines()[0]
        (value,) = re.findall(rf"(?<!\S){field}=(\S*)", shown)
        return str(value)

    def end_its_time(self) -> None:
        """Leave a job that runs one or two minutes, which is less than the notice that its script asks for."""
        for name in self.names:
            hours, minutes, seconds = map(int, self.field(name, "RunTime").split(":"))
            limit = math.ceil(60 * hours + minutes + seconds / 60) + 1
            self.slurm.call("scontrol", "update", f"JobId={name}", f"TimeLimit={limit}")

    def has_failed(self) -> bool:
        """Whether it has ended without its last step, and was not queued again."""
        return not self.has_step(STEPS) and any(
            self.field(name, "JobState") in ENDS and self.field(name, "Restarts") in ("0", "2") for name in self.names
        )

    def spare_the_pause(self) -> None:
        """Let it go on if it was queued again: without the pause of two minutes, and with time enough.

        Slurm may take the late word of a script's end for that of its next run, which is over at once then.
        """
        restarts = {name: self.field(name, "Restarts") for name in self.names}
        if self.has_step(STEPS):
            return
        if "0" in restarts.values():
            if self.said.count("agent got SIGTERM") == len(self.names):
                # Agents that leave commit a step that all ranks make.
                (self.folder / "steps").write_text(str(STEPS_BEFORE_THE_END + 3))
            return
        (self.folder / "steps").write_text(str(STEPS))
        for name in self.names:
            state = self.field(name, "JobState")
            if state in ENDS and restarts[name] == "1":
                self.slurm.call("scontrol", "requeue", name, check=False)
            if state == "PENDING":
                self.slurm.call("scontrol", "update", f"JobId={name}", "StartTime=now", "TimeLimit=60", check=False)


def submitted(
    slurm: SlurmCluster, folder: Path, script: str, *arguments: str, options: tuple[str, ...], **variables: str
) -> int:
    """Submit the text of a batch script; its program trains in double precision, and some steps only."""
    (folder / "steps").write_text(str(STEPS_BEFORE_THE_END))
    (path := folder / "job.sbatch").write_text(script)
    given = (f"--chdir={folder}", "--output=%j.out", "--time=60", *options)
    environment = {
        "PATH": f"{put_command(folder / 'bin', 'hetero', HETERO)}:{slurm.environment['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        STEPS_FILE: str(folder / "steps"),
    }
    return slurm.submit(path, *arguments, options=given, **environment, **variables)


def planned(folder: Path, *stages: tuple[tuple[int, int], tuple[int, ...]], cluster: ClusterSpec) -> list[str]:
    """Write a plan of stages of these layers and ranks; return it and the flags of a training under it."""
    made = plan(MODEL, [replica(*(stage(layers=at, ranks=on, tp=len(on)) for at, on in stages), num_samples=12)])
    prediction = PlanPrediction(step_s=1, step_low_s=1, step_high_s=1, bubble_share=0)
    provenance = PlanProvenance(command="a test", cluster=cluster, prediction=prediction)
    double: Plan = dataclasses.replace(made, precision="fp64", provenance=provenance)
    save(double, folder / "plan.json")
    (folder / "pretrain_gpt.py").symlink_to(ROOT / PROGRAM)
    saved = str(folder / "saved")
    return [str(folder / "plan.json"), *saving_flags(folder / "saved", steps=STEPS, load=saved)]


def of_boxes(count: int) -> ClusterSpec:
    return ClusterSpec(node_types=(dataclasses.replace(BOX, count=count),), links=Links(between_nodes=LINK))


def start_job(slurm: SlurmCluster, folder: Path, etcd: EtcdServer) -> Training:
    """Two nodes of one kind."""
    words = planned(folder, ((0, 2), (0,)), ((2, 4), (1,)), cluster=of_boxes(2))
    script = (SCRIPTS / "pretrain.sbatch").read_text()
    number = submitted(slurm, folder, script, *words, options=("--nodes=2", "--partition=box"))
    return Training(slurm=slurm, folder=folder, names=(str(number),))


def start_heterogeneous_job(slurm: SlurmCluster, folder: Path, etcd: EtcdServer) -> Training:
    """A node with two ranks, and one with one."""
    cluster = ClusterSpec(node_types=(TWIN, BOX), links=Links(between_nodes=LINK))
    words = planned(folder, ((0, 3), (0, 1)), ((3, 4), (2,)), cluster=cluster)
    script = (SCRIPTS / "pretrain_hetjob.sbatch").read_text()
    for theirs, ours in (
        ("nodes=2", "nodes=1"),
        ("gpus-per-node=a100:8", "partition=twin"),
        ("gpus-per-node=v100:4", "partition=box"),
    ):
        assert theirs in script
        script = script.replace(theirs, ours)
    number = submitted(slurm, folder, script, *words, options=())
    return Training(slurm=slurm, folder=folder, names=(str(number),))


def start_array_task(slurm: SlurmCluster, folder: Path, etcd: EtcdServer) -> Training:
    """The task that is split off last, whose ``SLURM_JOB_ID`` is the number of the array; the other one sleeps."""
    words = planned(folder, ((0, 4), (0,)), cluster=of_boxes(1))
    script = (SCRIPTS / "pretrain.sbatch").read_text()
    strict = "set -euo pipefail\n"
    assert script.count(strict) == 1
    script = script.replace(strict, f'{strict}[ "$SLURM_ARRAY_TASK_ID" = 1 ] || exec sleep 3600\n')
    number = submitted(slurm, folder, script, *words, options=("--array=0-1", "--nodes=1", "--partition=box"))
    return Training(slurm=slurm, folder=folder, names=(f"{number}_1",), untouched=f"{number}_0")


def start_elastic(slurm: SlurmCluster, folder: Path, etcd: EtcdServer) -> Training:
    """Two agents, both out of time."""
    (folder / "etcd").mkdir()
    (folder / "etcd" / "address").write_text(f"{etcd.url}\n")
    program, *flags = elastic_words(folder, steps=STEPS, load=str(folder / "saved"))
    words = ["box", str(folder / "etcd"), str(ROOT / program), *flags]
    number = submitted(
        slurm,
        folder,
        (SCRIPTS / "elastic.sbatch").read_text(),
        *words,
        options=("--array=0-1", "--partition=box"),
        AGENT_FLAGS="--min-nodes=2 --lease=5 --dwell=0 --straggler-threshold=inf",
        LEAVE_WITHIN="100",
    )
    return Training(slurm=slurm, folder=folder, names=(f"{number}_0", f"{number}_1"))


FORMS = {
    "job": start_job,
    "heterogeneous job": start_heterogeneous_job,
    "array task": start_array_task,
    "elastic": start_elastic,
}


@pytest.fixture(scope="module")
def trainings(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Training]]:
    """The forms that have a test in this run, all of which were told by Slurm that their time is over."""
    forms = [item.callspec.params["form"] for item in request.session.items if item.path == request.path]
    # How long ranks have after the end, above what a busy machine needs.
    settings = {"KillWait": "60"}
    kinds = NodeKind(name="twin", count=1, num_gpus=2), NodeKind(name="box", count=7, num_gpus=1)
    with (
        SlurmCluster(tmp_path_factory.mktemp("slurm"), *kinds, settings=settings) as slurm,
        contextlib.ExitStack() as stack,
    ):
        etcd = EtcdServer(tmp_path_factory.mktemp("etcd"), host=slurm.head.address)
        stack.callback(etcd.stop)
        with slurm.head.entered():
            etcd.start()
        started = {form: FORMS[form](slurm, tmp_path_factory.mktemp("training"), etcd) for form in forms}
        waiting = set(started)

        def have_been_told() -> bool:
            for form in list(waiting):
                if started[form].has_made(STEPS_BEFORE_THE_END):
                    started[form].end_its_time()
                    waiting.remove(form)
            return not waiting

        until(have_been_told)
        yield started


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], dict[str, np.ndarray]]:
    return uninterrupted(tmp_path_factory.mktemp("oracle"), steps=STEPS, launch=launched)


@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.rotates("forms", every=3)) for form in FORMS])
def test_a_training_that_slurm_stops_in_time_goes_on_as_if_it_had_never_stopped(
    form: str, trainings: dict[str, Training], oracle: tuple[dict[int, str], dict[str, np.ndarray]]
) -> None:
    training = trainings[form]

    def has_ended() -> bool:
        for each in trainings.values():
            each.spare_the_pause()
        return training.has_failed() or all(training.field(name, "JobState") == "COMPLETED" for name in training.names)

    until(has_ended)
    losses, expected = oracle
    assert training.losses() == sorted(losses.items()), training.said
    (stopped,) = set(re.findall(r"stopped after step (\d+) of", training.said))
    assert f"training goes on after step {stopped}" in training.said, training.said
    if training.untouched:
        assert training.field(training.untouched, "JobState") == "RUNNING"
        assert training.field(training.untouched, "Restarts") == "0"
    state = saved_state(training.folder / "saved", step=STEPS)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(state[name], tensor, rtol=1e-9, atol=1e-9, err_msg=name)
