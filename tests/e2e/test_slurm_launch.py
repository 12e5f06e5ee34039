"""``hetero launch`` in every form of an allocation, on a real Slurm with nodes of two kinds of cards and a mixed one.

torchrun is one that says what it was started with, and sees the cards that Slurm gives. Names of nodes do not resolve:
ranks meet at addresses. Trainings are in test_slurm_jobs.py and test_slurm_time_limits.py.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.spec.cluster import ClusterSpec, NodeType
from tests.e2e.test_slurm_jobs import FAST, LINKS, SLOW, TP_THEN_ONE, TWO_TYPES, flags, plan_file
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.slurm_cluster import NodeKind, SlurmCluster, needs_slurm
from tests.helpers.sources import ROOT
from tests.helpers.stand_ins import HETERO, put_command
from tests.helpers.waiting import until

pytestmark = [pytest.mark.slow, needs_slurm, pytest.mark.timeout(180)]

CARDS = ClusterSpec(
    node_types=(
        NodeType(name="new", device="A100-40", gpus_per_node=2, inside_node=FAST.inside_node),
        NodeType(name="old", device="V100-16", gpus_per_node=4, count=2, inside_node=FAST.inside_node),
    ),
    links=LINKS,
)
THREE_NODES = plan(
    llama_model(num_layers=3),
    [
        replica(
            stage(layers=(0, 1), ranks=(0, 1), tp=2, device="A100-40"),
            stage(layers=(1, 2), ranks=(2, 3, 4, 5), tp=4, device="V100-16"),
            stage(layers=(2, 3), ranks=(6, 7, 8, 9), tp=4, device="V100-16"),
            num_samples=4,
        )
    ],
)

TORCHRUN = """#!/bin/bash
endpoint=$(grep -o 'rdzv-endpoint [^ ]*' <<< "$*" | cut -d' ' -f2)
rank=$(grep -o 'node_rank=[0-9]*' <<< "$*" | cut -d= -f2)
echo "NODE $SLURMD_NODENAME rank=$rank ranks=$(grep -o 'nproc-per-node [0-9]*' <<< "$*" | cut -d' ' -f2)" \
    "sees=${CUDA_VISIBLE_DEVICES:-none} meets=${endpoint%:*} port=${endpoint##*:}"
"""

BATCH = """#!/bin/bash
exec hetero launch {plan} --torchrun {torchrun} --run -- {flags}
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(
        tmp_path_factory.mktemp("slurm"),
        NodeKind(name="v", count=2, gpus={"v100": 4}, cpus=4),
        NodeKind(name="a", count=1, gpus={"a100": 2}, cpus=4),
        NodeKind(name="m", count=1, gpus={"v100": 2, "a100": 2}, cpus=4),
        names_known="own",
        settings={"LaunchParameters": "use_interactive_step"},
    ) as cluster:
        yield cluster


class Launches:
    """Jobs of one plan in one folder."""

    def __init__(self, slurm: SlurmCluster, folder: Path, cluster: ClusterSpec = CARDS) -> None:
        self.slurm, self.folder = slurm, folder
        for name, script in (("torchrun", TORCHRUN), ("hetero", HETERO)):
            put_command(folder, name, script)
        self.plan = plan_file(folder, THREE_NODES if cluster is CARDS else TP_THEN_ONE, cluster)
        self.variables = {"PATH": f"{folder}:{slurm.environment['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(self, *options: str, text: str = "", **variables: str) -> str:
        """What a job says that launches the plan in an allocation with these options."""
        script, out = self.folder / "job.sbatch", self.folder / "out"
        default = BATCH.format(plan=self.plan, torchrun=self.folder / "torchrun", flags=self.flags)
        script.write_text(text or default)
        out.unlink(missing_ok=True)
        # Options before the first colon are those of the first component.
        common = (f"--chdir={self.folder}", f"--output={out}")
        number = self.slurm.submit(script, options=(*common, *options), **self.variables, **variables)
        self.slurm.wait_for_end(number)
        return out.read_text()

    @property
    def flags(self) -> str:
        return " ".join(flags(self.folder, steps=2))

    def check(self, said: str, *, new: str = "a0") -> None:
        """Each node has the ranks and the cards of the plan, and all meet at the address of rank 0's node."""
        found = re.findall(r"NODE (\w+) rank=(\d) ranks=(\d) sees=(\S+) meets=(\S+) port=(\d+)", said)
        assert len(found) == 3, said
        nodes = {name: (int(rank), int(ranks), sees.count(",") + 1) for name, rank, ranks, sees, _, _ in found}
        assert nodes[new] == (0, 2, 2)
        assert sorted(nodes[name] for name in ("v0", "v1")) == [(1, 4, 4), (2, 4, 4)]
        assert {meets for *_, meets, _ in found} == {self.slurm.hosts[new].address}
        assert len({port for *_, port in found}) == 1


def test_one_plan_runs_in_every_form_of_an_allocation(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Whatever order nodes, components and tasks have."""
    launches = Launches(slurm, tmp_path)
    (tmp_path / "hosts").write_text("v1\na0\nv0\n")
    old, new = ("--nodes=2", "--nodelist=v[0-1]"), ("--nodes=1", "--nodelist=a0")
    forms: Sequence[tuple[tuple[str, ...], dict[str, str]]] = (
        (("--nodes=3", "--nodelist=a0,v[0-1]", "--exclusive"), {}),
        (("--nodes=3", "--nodelist=a0,v[0-1]", "--gpus=10"), {}),
        ((*old, "--gpus-per-node=v100:4", ":", *new, "--gpus-per-node=a100:2"), {}),
        ((*new, "--exclusive", ":", *old, "--exclusive"), {}),
        ((*new, "--gpus=2", ":", "--nodelist=v0", "--gpus=4", ":", "--nodelist=v1", "--gpus=4"), {}),
        (("--nodes=3", "--ntasks=3", "--exclusive"), {"SLURM_HOSTFILE": str(tmp_path / "hosts")}),
        (("--nodes=3", "--nodelist=a0,v[0-1]", "--exclusive", "--array=3-3"), {}),
        (("--nodes=3", "--nodelist=a0,v[0-1]", "--exclusive"), {"SLURM_EXPORT_ENV": "NONE", "SLURM_MEM_PER_NODE": "7"}),
    )
    for options, variables in forms:
        launches.check(launches.run(*options, **variables))


@pytest.mark.parametrize(
    "form",
    [
        ("--nodes=3", "--nodelist=m0,v[0-1]", "--exclusive"),
        ("--nodes=3", "--nodelist=m0,v[0-1]", "--gpus=12"),
        ("--nodes=2", "--nodelist=m0,v0", "--exclusive", ":", "--nodelist=v1", "--exclusive"),
    ],
)
def test_ranks_of_a_mixed_node_see_the_cards_of_the_plan(
    slurm: SlurmCluster, tmp_path: Path, form: tuple[str, ...]
) -> None:
    """Slurm takes no types for a step over nodes that lack some of them, nor where the job asked for none."""
    launches = Launches(slurm, tmp_path)
    said = launches.run(*form)
    launches.check(said, new="m0")
    (seen,) = re.findall(r"NODE m0 .* sees=(\S+) ", said)
    said = slurm.call("scontrol", "show", "node", "m0")
    assert seen == "2,3", said


def test_a_written_script_runs_without_the_environment_of_sbatch(slurm: SlurmCluster, tmp_path: Path) -> None:
    """``export=NONE``, which a step of Slurm takes over."""
    launches = Launches(slurm, tmp_path)
    script, options = tmp_path / "written.sbatch", ["export=NONE", "new:gres=gpu:a100:2", "old:gres=gpu:v100:4"]
    words = [launches.plan, "--torchrun", str(tmp_path / "torchrun"), "--sbatch", str(script)]
    words += [word for option in options for word in ("--sbatch-option", option)]
    assert main(["launch", *words, "--env", f"PYTHONPATH={ROOT}", "--", *launches.flags.split()]) == 0
    launches.check(launches.run(text=script.read_text()))


def test_an_allocation_that_does_not_fit_is_refused_before_anything_starts(slurm: SlurmCluster, tmp_path: Path) -> None:
    launches = Launches(slurm, tmp_path)
    for options, has in (
        (
            ("--nodelist=m0", "--gpus=v100:1", ":", "--nodelist=a0", ":", "--nodelist=v0", "--exclusive"),
            "a0 has no GPU",
        ),
        (("--nodes=3", "--nodelist=m0,v[0-1]", "--gpus-per-node=v100:2"), "m0 has 2 x v100"),
    ):
        said = launches.run(*options)
        assert "NODE" not in said
        assert "hetero: the plan needs " in said
        assert has in said
    said = launches.run("--nodes=2", "--nodelist=a0,v0", "--exclusive")
    assert "has 2 nodes (a0, v0), the plan needs 3: 1 x new (2 A100-40), 2 x old (4 V100-16)" in said


@pytest.mark.parametrize("task", [0, 1], ids=["split off first", "split off last"])
def test_one_task_of_an_array_requeues_itself_and_leaves_the_other_alone(
    task: int, slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Stand-ins for ranks save at SIGTERM; the task split off last has the number of the array."""
    one = dataclasses.replace(TWO_TYPES.node_types[0], gpus_per_node=3)
    launches = Launches(slurm, tmp_path, ClusterSpec(node_types=(one,), links=LINKS))
    put_command(
        tmp_path,
        "torchrun",
        "#!/bin/bash\ntrap 'mkdir -p \"$SAVED/step_0000000$SLURM_RESTART_COUNT/x\"; echo got SIGTERM; exit 1' TERM\n"
        "echo started; while [ ! -e stop ]; do sleep 0.1; done; echo finished\n",
    )
    script = tmp_path / "array.sbatch"
    script.write_text(
        "#!/bin/bash\nexport SAVED=$PWD/saved-$SLURM_ARRAY_TASK_ID SLURM_RESTART_COUNT=${SLURM_RESTART_COUNT:-0}\n"
        f"exec hetero launch {launches.plan} --torchrun {tmp_path}/torchrun --run -- {launches.flags} "
        "--save $SAVED --load $SAVED\n"
    )
    options = ("--array=0-1", f"--chdir={tmp_path}", f"--output={tmp_path}/out-%a", "--open-mode=append")
    number = slurm.submit(script, options=options, **launches.variables)
    name = f"{number}_{task}"

    def output(index: int) -> str:
        path = tmp_path / f"out-{index}"
        return path.read_text() if path.exists() else ""

    until(lambda: all("started" in output(index) for index in (0, 1)))
    assert f"JobId={number} " in slurm.call("scontrol", "show", "job", f"{number}_1"), "the one split off last"
    slurm.call("scancel", "--batch", "--signal=TERM", name)
    until(lambda: "queues itself again" in output(task))
    until(lambda: slurm.states(number).get(name) == "PENDING")
    slurm.requeue(name)
    until(lambda: output(task).count("started") == 2)
    (tmp_path / "stop").touch()
    slurm.wait_for_end(number)
    assert "queues itself again, to go on after step 0" in output(task)
    counts = [[output(index).count(word) for word in ("started", "got SIGTERM", "finished")] for index in (0, 1)]
    assert (counts[task], counts[1 - task]) == ([2, 1, 1], [1, 0, 1])


@pytest.mark.dist
@pytest.mark.rotates(every=2, turn=0)
@pytest.mark.parametrize("form", [("--nodelist=v0", ":", "--nodelist=a0"), ("--nodes=2", "--nodelist=a0,v0")])
def test_ctrl_c_in_the_shell_of_an_allocation_saves_the_work(
    slurm: SlurmCluster, tmp_path: Path, form: tuple[str, ...]
) -> None:
    """The shell is a step of the job as well (``use_interactive_step``), and lives on; a real training."""
    named = tuple(
        dataclasses.replace(each, nodes=nodes) for each, nodes in zip((FAST, SLOW), (("a0",), ("v0",)), strict=True)
    )
    launches = Launches(slurm, tmp_path, ClusterSpec(node_types=named, links=LINKS))
    own = " ".join(flags(tmp_path, steps=100_000, saves=True)).replace("--save-interval 2", "--save-interval 100000")
    (tmp_path / "start").write_text(f"hetero launch {launches.plan} --run -- {own}\n")
    variables = {**launches.variables, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    with slurm.terminal("salloc", *form, folder=tmp_path, **variables) as shell:
        shell.type("bash start\n")
        until(lambda: re.search(r"step +3/100000 ", shell.said) is not None or shell.has_ended())
        shell.press_ctrl_c()
        until(lambda: "stopped after step" in shell.said or shell.has_ended())
        shell.type("echo it lives $((1 + 1))\n")
        until(lambda: "it lives 2" in shell.said or shell.has_ended())
        shell.type("exit\n")
        shell.wait()
    (saved,) = (tmp_path / "checkpoint").glob("step_*")
    assert f"saved to {saved}" in shell.said.replace("\r\n", "\n")
