"""Batch scripts as text: what they ask of Slurm for each node type, which options they take, and their components."""

import dataclasses
import itertools
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from hetero.errors import ConfigError
from hetero.launch.slurm_batch_script import BatchScript, batch_script
from hetero.launch.slurm_components import SlurmSite
from hetero.slurm.controller import SlurmNode
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.devices import DeviceType
from tests.unit.launch.plans import CLUSTER

GOLDEN = Path(__file__).parents[2] / "golden" / "launch"

A100 = NodeType(name="a100", device="A100-40", gpus_per_node=8, count=2)
V100 = NodeType(name="v100", device="V100-16", gpus_per_node=4)
GPUS = ClusterSpec(node_types=(A100, V100))
LAUNCH = ("python", "-m", "hetero", "launch", "my plan.json")
FLAGS = ("--bf16", "--split", "9, 1")


def written(
    *node_types: NodeType,
    options: tuple[str, ...] = (),
    site: SlurmSite | None = None,
    flags: tuple[str, ...] = (),
    environment: Mapping[str, str | None] = MappingProxyType({}),
) -> BatchScript:
    return batch_script(
        ClusterSpec(node_types=node_types),
        LAUNCH,
        flags=(*FLAGS, *flags),
        environment=environment,
        sbatch_options=options,
        made_by="hetero launch plan.json --sbatch",
        site=site,
    )


def requests(script: BatchScript) -> list[list[str]]:
    """By component, its options."""
    parts = script.text.split("#SBATCH hetjob\n")
    return [
        [line[len("#SBATCH --") :] for line in part.splitlines() if line.startswith("#SBATCH --")] for part in parts
    ]


def gpu_lines(script: BatchScript) -> list[list[str]]:
    return [[line for line in component if "gpu" in line] for component in requests(script)]


def node(name: str, partitions: str = "all", features: str = "", **gpus: int) -> SlurmNode:
    return SlurmNode(
        name=name,
        address=name,
        gpus=gpus,
        features=frozenset(features.split(",")) - {""},
        partitions=frozenset(partitions.split(",")),
    )


SITE = SlurmSite(
    nodes=(
        node("a1", "all,a100", "ib", a100=8),
        node("a2", "all,a100", "ib", a100=8),
        node("m1", "all", "ib", a100=8, v100=4),
        node("v1", "all,v100", "", v100=4),
        node("v2", "all,v100", "", v100=4),
        node("c1", "all"),
    ),
    default_partition="all",
)


@pytest.fixture(autouse=True)
def _lists_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of nodes without Slurm's ``scontrol``, which expands them."""
    monkeypatch.setattr("hetero.launch.slurm_components.hostnames", lambda names: names.split(",") if names else [])


def test_one_node_type_is_a_plain_job() -> None:
    assert written(A100, options=("partition=all",)).text == (GOLDEN / "one_node_type.sbatch").read_text()


def test_several_node_types_are_a_heterogeneous_job() -> None:
    script = written(A100, V100, options=("account=me", "a100:constraint=a100", "v100:gpus-per-node=v100:4"))
    assert script.text == (GOLDEN / "two_node_types.sbatch").read_text()
    assert script.notes == (), "options say which cards"


def test_hosts_without_gpus_ask_for_none() -> None:
    """``hetero discover`` describes some by names of its own."""
    half = DeviceType(name="cpu-0.5-cores")
    discovered = ClusterSpec(devices=(half,), node_types=(NodeType(name="box", device=half.name, gpus_per_node=2),))
    for cluster, site, expected in ((CLUSTER, None, [[], []]), (discovered, SITE, [[]])):
        script = batch_script(cluster, LAUNCH, flags=(), environment={}, sbatch_options=(), made_by="", site=site)
        assert gpu_lines(script) == expected


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("a10:partition=a", r"--sbatch-option a10:partition=a: unknown node type 'a10' \(did you mean 'a100'\?\)"),
        ("v100:--partition=a", r"must be a long option of sbatch without its dashes"),
        ("partition a", r"must be a long option of sbatch without its dashes"),
        ("N=3", r"must be a long option of sbatch without its dashes"),
        ("v100:nodes=3", r"nodes follows from the plan; leave it out"),
        ("ntasks=3", r"ntasks follows from the plan; leave it out"),
        ("ntasks-per-n=8", r"ntasks-per-n is short for ntasks-per-node; write it in full"),
        ("ntasks-per-gpu=1", r"contradicts the one task per node"),
        ("no-kill", r"every srun fails after the loss of a node .*scripts/slurm/elastic.sbatch\); leave it out"),
        ("exact", r"exact is an option of srun"),
        ("array=0-3", r"Slurm has no arrays of heterogeneous jobs, and the plan has 2 node types"),
        ("v100:output=x", r"output is of the batch script, which all node types share; give it as output=x"),
        ("v100:signal=B:TERM@300", r"is of the batch script, .*; give it as signal=B:TERM@300"),
        ("a100:no-requeue", r"no-requeue is of the batch script, which all node types share"),
        ("signal=USR1@60", r"signal must be B:TERM@SECONDS"),
        ("gpu-bind=single:1", r"gpu-bind must be none"),
        ("a100:gpus-per-node=4", r"GPUs per node are 4, the plan uses 8 on each node of 'a100'; ask for at least 8"),
        ("gpus-per-node=0", r"GPUs per node are 0, the plan uses 8 on each node of 'a100'"),
        ("v100:gres=gpu", r"GPUs per node are 1, the plan uses 4"),
        ("v100:gres=scratch:9,gpu:v100:3", r"GPUs per node are 3, the plan uses 4"),
        ("v100:tres-per-task=cpu=4,gres/gpu:v100=2", r"GPUs per node are 2, the plan uses 4"),
        ("v100:gpus-per-task=v100:2", r"GPUs per node are 2, the plan uses 4"),
        ("v100:gpus-per-node=v100:four", r"'four' is not a number of GPUs; write \[TYPE:\]NUMBER"),
        ("v100:gpus-per-socket=2", r"needs sockets-per-node=NUMBER as well"),
        ("a100:gpus=12", r"GPUs per node are 6, the plan uses 8"),
        ("a100:gpus=17", r"asks for 17 GPUs on 2 nodes of 'a100' together, .* use gpus-per-node"),
    ],
)
def test_an_option_that_contradicts_the_plan_is_refused(option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        written(A100, V100, options=(option,))
    assert str(error.value).startswith(f"--sbatch-option {option}: ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["gres=scratch:1"], ["gpus-per-node=4"]),
        (["licenses=gpu:1"], ["gpus-per-node=4", "licenses=gpu:1"]),
        (["cpus-per-gpu=2"], ["gpus-per-node=4", "cpus-per-gpu=2"]),
        (["gres=scratch:1,gpu:4"], ["gres=scratch:1,gpu:4"]),
        (["gres=gpu:v100:8"], ["gres=gpu:v100:8"]),
        (["gpus-per-task=4"], ["gpus-per-task=4"]),
        (["tres-per-task=cpu=4,gres/gpu:v100=4"], ["tres-per-task=cpu=4,gres/gpu:v100=4"]),
        (["tres-per-node=gres:gpu:v100:4"], ["tres-per-node=gres:gpu:v100:4"]),
        (["gpus-per-socket=2", "sockets-per-node=2"], ["gpus-per-socket=2"]),
        # For the whole job: Slurm gives one node 3 and the other one 1 unless each is to get as many.
        (["gpus=8"], ["gpus-per-node=4", "gpus=8"]),
        (["gpus=v100:12"], ["gpus-per-node=v100:6", "gpus=v100:12"]),
        (["gpus=v100:8", "gpus-per-node=v100:4"], ["gpus=v100:8", "gpus-per-node=v100:4"]),
    ],
)
def test_only_options_about_gpus_take_the_place_of_the_plans(options: list[str], expected: list[str]) -> None:
    script = written(dataclasses.replace(V100, count=2), options=tuple(options))
    assert gpu_lines(script) == [expected]


def test_an_option_of_a_node_type_overrules_that_of_all_and_a_setting_stands_once() -> None:
    options = ("v100:gres=gpu:v100:4", "gres=scratch:1", "exclusive=user", "signal=B:TERM@600", "no-requeue")
    a100, v100 = requests(written(A100, V100, options=options, flags=("--save=a", "--load=a")))
    assert [line for line in a100 if "gres" in line] == ["gres=scratch:1"]
    assert [line for line in v100 if "gres" in line] == ["gres=gpu:v100:4"]
    for component in (a100, v100):
        assert [line for line in component if "exclusive" in line] == ["exclusive=user"]
        assert [line for line in component if "signal" in line] == ["signal=B:TERM@600"]
        assert [line for line in component if "requeue" in line] == ["no-requeue"]
    a100, v100 = gpu_lines(written(A100, V100, options=("gpus-per-node=8", "v100:gres=gpu:v100:4")))
    assert (a100, v100) == (["gpus-per-node=8"], ["gres=gpu:v100:4"])
    both = ("gres=scratch:1,gpu:8", "tres-per-task=cpu=4,gres/gpu=8", "v100:gpus-per-node=v100:4")
    _, v100 = requests(written(A100, V100, options=both))
    assert {"gres=scratch:1", "tres-per-task=cpu=4", "gpus-per-node=v100:4"} <= set(v100), "GPUs alone are overruled"
    (shared,) = requests(written(V100, options=("oversubscribe", "array=1-4%1", "export=NONE")))
    assert "exclusive" not in shared
    assert {"oversubscribe", "array=1-4%1", "export=NONE"} <= set(shared)


def test_a_script_ends_as_the_launch_that_wrote_it_inside_of_the_job(tmp_path: Path) -> None:
    """Every word as it was given; variables without a value come from the environment of ``sbatch``."""
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "<%s>" "$A" "$B" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    text = written(A100, V100, environment={"A": "b 'c'", "B": None}).text

    def run(**variables: str) -> "subprocess.CompletedProcess[str]":
        environment = {"PATH": f"{tmp_path}:/bin", **variables}
        return subprocess.run(["/bin/bash", "-c", text], capture_output=True, text=True, check=False, env=environment)

    words = "<-m><hetero><launch><my plan.json><--env><A><--env><B><--components><a100,v100><--run><--><--bf16>"
    assert run(B="d").stdout == f"<b 'c'><d>{words}<--split><9, 1>"
    without = run()
    assert (without.returncode != 0, without.stdout) == (True, "")
    assert "B: is not set: set it before sbatch, which hands its environment on" in without.stderr
    assert "--components" not in written(A100).text


def test_the_only_node_type_may_have_options_of_the_script() -> None:
    (component,) = requests(written(V100, options=("v100:output=x", "v100:no-requeue")))
    assert {"output=x", "no-requeue"} <= set(component)
    assert "output=%x-%j.out" not in component


def test_a_job_is_queued_again_only_if_it_would_go_on() -> None:
    for flags, goes_on in (((), False), (("--save=out",), False), (("--save=out", "--load", "out"), True)):
        text = written(A100, V100, flags=flags).text
        assert ("#SBATCH --requeue\n" in text) is goes_on
        assert ("#SBATCH --no-requeue\n" in text) is not goes_on


def test_gpus_have_the_type_that_the_site_has_for_them() -> None:
    script = written(A100, V100, site=SITE)
    assert gpu_lines(script) == [["gpus-per-node=a100:8"], ["gpus-per-node=v100:4"]]
    assert script.notes == ()


def test_the_name_of_a_node_type_that_is_a_gpu_type_is_that_type() -> None:
    site = SlurmSite(nodes=(node("n1", gold=8), node("n2", silver=8)))
    gold = dataclasses.replace(A100, name="Gold", count=1)
    assert gpu_lines(written(gold, site=site)) == [["gpus-per-node=gold:8"]]
    assert gpu_lines(written(dataclasses.replace(gold, gpus_per_node=9), site=site)) == [["gpus-per-node=9"]]
    # A type that says another model is none of the device's, whatever the node type is called.
    assert gpu_lines(written(dataclasses.replace(V100, name="a100"), site=SITE)) == [["gpus-per-node=v100:4"]]


def test_of_several_types_the_one_whose_nodes_fit_is_asked_for() -> None:
    few, many = node("b1", a100_80=8), [node(f"a{i}", a100=8) for i in range(2)]
    small = [node(f"s{i}", a100_sxm=4) for i in range(9)]
    fast = dataclasses.replace(A100, name="fast")
    assert gpu_lines(written(fast, site=SlurmSite(nodes=(few, *many, *small)))) == [["gpus-per-node=a100:8"]]
    both = written(fast, site=SlurmSite(nodes=(few, node("b2", a100_80=8), *many)))
    assert gpu_lines(both) == [["gpus-per-node=8"]]
    (note,) = both.notes
    assert "any GPUs for 'fast': several types of this Slurm may be A100-40 (a100, a100_80)" in note
    assert "--sbatch-option fast:gpus-per-node=TYPE:8" in note


def test_types_are_those_of_nodes_that_the_options_leave() -> None:
    site = SlurmSite(
        nodes=(
            *(node(f"a{i}", "old", "ib,dense", a100=8) for i in range(2)),
            *(node(f"b{i}", "new", "", a100_80=8) for i in range(2)),
        ),
        default_partition="old",
    )
    for options, gpu_type in (
        ((), "a100"),
        (("partition=new",), "a100_80"),
        (("partition=new,old", "constraint=ib"), "a100"),
        (("partition=new,old", "constraint=[ib&dense]"), "a100"),
        (("partition=new,old", "constraint=ib|other"), "a100"),
    ):
        assert gpu_lines(written(dataclasses.replace(A100, name="fast"), options=options, site=site)) == [
            [f"gpus-per-node={gpu_type}:8"]
        ]
    one = NodeType(name="fast", device="A100-40", gpus_per_node=8)
    # sbatch reads the file: what is in it is not known here.
    assert gpu_lines(written(one, options=("nodelist=/my/nodes",), site=site)) == [["gpus-per-node=a100:8"]]


@pytest.mark.parametrize(
    ("site", "options", "reason"),
    [
        (None, (), "no Slurm answers here"),
        (SITE, ("clusters=other",), "no Slurm answers here"),
        (
            SlurmSite(nodes=(SlurmNode(name="n", address="n", gpus={"": 8}, features=frozenset()),)),
            (),
            "no node that the job may use has GPUs with a type",
        ),
        (SITE, (), "no type of this Slurm with 8 on a node is known to be H100 (a100, v100)"),
    ],
)
def test_gpus_without_a_type_are_noted(site: SlurmSite | None, options: tuple[str, ...], reason: str) -> None:
    new = NodeType(name="new", device="H100", gpus_per_node=8)
    script = written(new, options=options, site=site)
    assert gpu_lines(script) == [["gpus-per-node=8"]]
    (note,) = script.notes
    assert reason in note
    assert "\n" not in note
    assert "name the type with --sbatch-option new:gpus-per-node=TYPE:8" in note
    assert written(new, options=(*options, "constraint=h100"), site=site).notes == ()
    assert written(new, options=(*options, "new:partition=h100"), site=site).notes == ()
    assert written(new, options=(*options, "partition=gpu"), site=site).notes != (), "of whatever cards"


def test_what_is_scarce_comes_first() -> None:
    """In either order of the file, and the script says why."""
    three, two = dataclasses.replace(A100, count=3), dataclasses.replace(V100, count=2)
    for types in ((three, two), (two, three)):
        script = written(*types, site=SITE)
        assert script.components == ("a100", "v100")
        assert gpu_lines(script) == [["gpus-per-node=a100:8"], ["gpus-per-node=v100:4"]]
        assert requests(script)[0][0] == "job-name=hetero", "the first component has the lines of the job"
        assert "# Slurm places one component after the other" in script.text
        assert "#   a100 needs 3 of the 3 nodes that could serve it\n#   v100 needs 2 of the 3 nodes" in script.text


def test_components_that_share_no_node_keep_the_order_of_the_file() -> None:
    for site, options in ((None, ()), (SITE, ("v100:partition=v100",)), (SITE, ("v100:exclude=m1",))):
        script = written(V100, A100, options=options, site=site)
        assert script.components == ("v100", "a100")
        assert "one component after the other" not in script.text


def test_a_component_whose_nodes_are_some_of_anothers_goes_first() -> None:
    """Any card against one, hosts without GPUs against GPUs, and a list of nodes against all of them."""
    host = NodeType(name="host", device="cpu", gpus_per_node=1)
    any_card = dataclasses.replace(V100, name="any", count=2)
    untyped = ("any:gpus-per-node=4",)
    assert written(any_card, A100, options=untyped, site=SITE).components == ("a100", "any")
    assert written(host, any_card, A100, options=untyped, site=SITE).components == ("a100", "any", "host")
    listed = ("any:gpus-per-node=4", "host:nodelist=v2")
    assert written(any_card, host, options=listed, site=SITE).components == ("host", "any")


@pytest.mark.parametrize("seed", range(40))
def test_an_order_in_which_no_choice_of_slurm_blocks_a_component_is_found(seed: int) -> None:
    """Of two components, against all choices that Slurm could make for the first one."""
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(5)]
    nodes = {kind: rng.sample(names, rng.randint(1, 5)) for kind in ("a100", "v100")}
    site = SlurmSite(nodes=tuple(node(name, **{k: 8 for k, of in nodes.items() if name in of}) for name in names))
    types = [
        dataclasses.replace(each, count=rng.randint(1, len(nodes[each.name])), gpus_per_node=8) for each in (A100, V100)
    ]

    def is_safe(first: NodeType, second: NodeType) -> bool:
        choices = itertools.combinations(nodes[first.name], first.count)
        return all(len(set(nodes[second.name]) - set(taken)) >= second.count for taken in choices)

    by_name = {each.name: each for each in types}
    first, second = (by_name[name] for name in written(*types, site=site).components)
    assert is_safe(first, second) or not is_safe(second, first)
