"""``pretrain_gpt.py`` as users meet it: one clear message for wrong input.

One launch with torchrun; whatever can be seen without one is checked on the functions that ``pretrain`` calls.
"""

import contextlib
import dataclasses
import datetime
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.data.tried_versions import BreakingVersions, TriedRun, TriedVersions, VersionTable
from hetero.distributed import runtime_versions, shared_devices
from hetero.doctor import installation
from hetero.doctor.installed_files import OLD_FILES
from hetero.errors import ConfigError, HeteroError, MembershipError
from hetero.installed_versions import installed_versions
from hetero.serialization import save, to_json
from megatron.pretrain import launch
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.model_config import model_spec
from megatron.pretrain.error_file import error_file, exit_code, write_error_file
from megatron.pretrain.launch import Launch, StoreAddress, agree_on_plan, joined, launch_from
from tests.helpers.commands import MODEL, ROOT, WORLD_SIZE, command_line, good_plan, launched, model_of
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

# ---- what all ranks are told about a plan that does not work


Change = Callable[[dict[str, Any]], None]

CLUSTER = str(ROOT / "scripts" / "presets" / "clusters" / "a100_v100.yaml")


SMALL_CLUSTER = """\
node_types:
  - {name: laptop, device: cpu, gpus_per_node: 4, memory_gib: 1}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A launch that must fail.

    change: what to do to the good plan's JSON.
    flags: changed flags; the plan has the unchanged model unless ``fits_flags``.
    on_rank: flags that one rank has for itself.
    text: what the plan file then holds of that JSON.
    message: what it says; ``{plan}`` is the path of the plan file, ``{folder}`` that of its folder.
    """

    message: str
    change: Change = lambda plan: None
    flags: dict[str, str | None] = dataclasses.field(default_factory=dict)
    fits_flags: bool = False
    on_rank: tuple[int, dict[str, str]] | None = None
    text: Callable[[str], str] = str


def in_stage(replica: int, stage: int, **changes: Any) -> Change:
    return lambda plan: plan["replicas"][replica]["stages"][stage].update(changes)


def without_second_replica(plan: dict[str, Any]) -> None:
    plan["replicas"] = plan["replicas"][:1]
    plan["replicas"][0]["num_samples"] = plan["global_batch_size"]


def in_plan(**changes: Any) -> Change:
    return lambda plan: plan.update(changes)


CASES = {
    "fewer-ranks-than-launched": Case(
        change=without_second_replica,
        message="plan: it is for 3 ranks (0 of them idle), but 4 were launched; launch 3 or make a plan for 4",
    ),
    "a-rank-left-out": Case(
        change=in_stage(1, 0, ranks=[4]),
        message="plan: it names 4 ranks up to 4, but not [3]; number them from 0 without gaps, unused ones under "
        "idle_ranks",
    ),
    "a-rank-twice": Case(
        change=in_stage(1, 0, ranks=[2]),
        message="plan: ranks [2] are named more than once; a rank is in one stage or in idle_ranks, or in several "
        "stages of one replica that list the same ranks",
    ),
    "overlapping-layers": Case(
        change=in_stage(0, 1, first_layer=2),
        message="replica 0 stage 1: layers [2, 3) overlap with stage 0; set first_layer to 3",
    ),
    "a-gap-between-layers": Case(
        change=in_stage(0, 0, end_layer=2),
        message="replica 0 stage 1: layers [2, 3) are in no stage; it starts at 3, set first_layer to 2",
    ),
    "layers-missing-at-the-end": Case(
        change=in_stage(1, 0, end_layer=3),
        message="replica 1: its stages end at layer 3, the model has 4; set end_layer of stage 0 to 4",
    ),
    "tp-does-not-divide-query-groups": Case(
        flags={"group_query_attention": "", "num_query_groups": "1"},
        fits_flags=True,
        message="replica 0 stage 0: tp 2 does not divide num_query_groups 1; change tp to one that does",
    ),
    "tp-does-not-divide-the-vocabulary": Case(
        flags={"make_vocab_size_divisible_by": "1"},
        fits_flags=True,
        message="replica 0 stage 0: tp 2 does not divide padded_vocab_size 61; change tp to one that does, or pad the "
        "vocabulary to a multiple of 2",
    ),
    "tp-does-not-divide-ffn": Case(
        flags={"ffn_hidden_size": "99"},
        fits_flags=True,
        message="replica 0 stage 0: tp 2 does not divide ffn_hidden_size 99; change tp to one that does",
    ),
    "micro-batch-size-does-not-divide": Case(
        change=in_stage(0, 0, micro_batch_size=3),
        message="replica 0 stage 0: micro_batch_size 3 x dp 1 = 3 samples does not divide the replica's num_samples 4",
    ),
    "too-few-in-flight": Case(
        change=in_stage(0, 0, in_flight=1),
        message="replica 0 stage 0: in_flight 1 would deadlock: the stages behind it keep enough samples that it must "
        "send 2 microbatches before its first backward; set it to 2",
    ),
    "a-device-that-is-not-there": Case(
        change=in_stage(0, 0, device="A100-40"),
        message="replica 0 stage 0: it is planned for A100-40, but ranks 0-1 sit on cpu; reorder the hosts or make a "
        "plan for these devices",
    ),
    "a-device-that-does-not-exist": Case(
        change=in_stage(0, 1, device="A100-4"),
        message="replica 0 stage 1: unknown device type 'A100-4' (did you mean 'A100-40'?); a cluster file describes "
        "others under devices, and `hetero devices` lists those that ship",
    ),
    "another-model": Case(
        flags={"hidden_size": "64"},
        message="plan: it is for another model: it has hidden_size 32, not 64 as given by the flags; change the flags "
        "or make a plan for this model",
    ),
    "another-sequence-length": Case(
        flags={"seq_length": "8"},
        message="plan: seq_length is 16, but --seq-length is 8; make them equal",
    ),
    "another-batch": Case(
        flags={"global_batch_size": "12"},
        message="plan: global_batch_size is 6, but --global-batch-size is 12; make them equal",
    ),
    "another-cluster": Case(
        flags={"hetero_cluster": CLUSTER},
        message="plan: it names 4 ranks, the cluster has 16 devices; list devices without work under idle_ranks, or "
        "make a plan for this cluster, or name the one that it was made for",
    ),
    "planning-for-another-launch": Case(
        flags={"hetero_plan": "auto", "hetero_cluster": CLUSTER},
        message=f"{CLUSTER}: it describes 16 devices, the launch has 4 ranks; start one "
        "process per device, or correct gpus_per_node and count",
    ),
    "a-plan-with-no-place-to-be-written": Case(
        flags={"hetero_plan": "auto", "hetero_cluster": CLUSTER, "hetero_plan_out": "absent/plan.json"},
        message="--hetero-plan-out absent/plan.json: there is no folder absent; make it first",
    ),
    "another-precision": Case(
        flags={"bf16": ""},
        message="plan: precision is fp32, but --bf16 is given; leave that out or make a plan for bf16",
    ),
    "an-optimizer-that-the-plan-does-not-share": Case(
        flags={"use_distributed_optimizer": ""},
        message="plan: distributed_optimizer is false, but --use-distributed-optimizer is given; leave that out or "
        "make a plan with distributed_optimizer true",
    ),
    "gathers-of-an-optimizer-that-the-plan-does-not-share": Case(
        flags={"overlap_param_gather": ""},
        message="plan: distributed_optimizer is false, but --overlap-param-gather is given; leave that out or make a "
        "plan with distributed_optimizer true",
    ),
    "another-dropout": Case(
        change=in_plan(hidden_dropout=0.0),
        flags={"hidden_dropout": "0.1"},
        message="plan: hidden_dropout is 0, but --hidden-dropout is 0.1; make them equal, or take hidden_dropout "
        "out of the plan if its devices have memory to spare",
    ),
    "another-dropout-of-attention": Case(
        change=in_plan(hidden_dropout=0.0, attention_dropout=0.2),
        message="plan: attention_dropout is 0.2, but --attention-dropout is 0; make them equal, or take "
        "attention_dropout out of the plan if its devices have memory to spare",
    ),
    "a-precision-that-a-device-has-not": Case(
        change=lambda plan: (in_plan(precision="bf16")(plan), in_stage(1, 0, device="V100-16")(plan)),
        message="replica 1 stage 0: device V100-16 has no bf16; choose fp16 for the whole plan, which every device "
        "has, or leave its ranks idle",
    ),
    "no-file": Case(
        flags={"hetero_plan": "elsewhere/plan.json"},
        message="elsewhere/plan.json: no such file (looked in {folder}/elsewhere); correct the path",
    ),
    "half-a-file": Case(
        text=lambda text: text[: text.index("5,")],
        message="{plan}: not JSON, line 2 column 21: Expecting value. Is the file complete?",
    ),
    "an-empty-file": Case(
        text=lambda text: "", message="{plan}: it is empty; is it the right file, and was it written to its end?"
    ),
    "a-misspelt-key": Case(
        change=in_stage(0, 0, in_fligth=3),
        message="{plan}: unknown key 'replicas.0.stages.0.in_fligth' (did you mean 'in_flight'?)",
    ),
    "a-number-in-quotes": Case(
        change=in_stage(0, 0, tp="2"),
        message="{plan}: replicas.0.stages.0.tp: Input should be a valid integer, got '2'",
    ),
    "other-flags-on-one-rank": Case(
        on_rank=(2, {"seed": "99"}),
        message="flags: ranks 2 have another one than rank 0; launch every rank with the same command line",
    ),
    "no-uniform-plan-for-these-ranks": Case(
        flags={"hetero_plan": None, "micro_batch_size": "1", "pipeline_model_parallel_size": "3"},
        message="uniform plan: 4 ranks are no multiple of --tensor-model-parallel-size 1 "
        "x --pipeline-model-parallel-size 3",
    ),
    "a-ramp-up-that-replicas-cannot-share": Case(
        flags={"rampup_batch_size": "1 1 9", "train_iters": None, "train_samples": "80"},
        message="--rampup-batch-size 1 1 9: 2 replicas cannot share batches of 1, 2 samples, as each takes at least "
        "one whole microbatch of its stages, multiples of 1, 2; sizes that 2 divides, of at least 4, are possible, or "
        "lower the micro batch sizes",
    ),
    "no-uniform-plan-for-this-batch": Case(
        flags={"hetero_plan": None, "micro_batch_size": "1"},
        message="uniform plan: --global-batch-size 6 is no multiple of --micro-batch-size 1 x 4 data-parallel replicas",
    ),
}


def write_plan(case: Case, path: Path) -> list[list[str]]:
    """Write the case's plan file; returns each rank's command line."""
    argv = " ".join(command_line(**{"hetero_plan": str(path), **case.flags})).split()
    made = json.loads(to_json(good_plan(model_of(argv)) if case.fits_flags else good_plan()))
    case.change(made)
    path.write_text(case.text(json.dumps(made, indent=2)))
    by_rank = [argv] * WORLD_SIZE
    if case.on_rank is not None:
        rank, changes = case.on_rank
        by_rank[rank] = [*argv, *(word for name, value in changes.items() for word in (f"--{name}", value))]
    return by_rank


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a rank raised, its exit code, and what it printed on stderr."""

    message: str
    code: int
    printed: str


def outcomes_on_rank(rank: int, command_lines: dict[str, list[list[str]]], folder: str) -> dict[str, Outcome]:
    """One case after the other in the same processes: an error leaves the ranks in step."""
    os.chdir(folder)
    launch.time.sleep = lambda seconds: None
    return {name: outcome(rank, by_rank[rank]) for name, by_rank in command_lines.items()}


def outcome(rank: int, argv: list[str]) -> Outcome:
    printed = io.StringIO()
    config = parse_args(argv)
    try:
        agree_on_plan(config, model_spec(config.model, tokenizer_vocab_size=61), torch.device("cpu"))
    except HeteroError as error:
        with contextlib.redirect_stderr(printed):
            code = exit_code(error, {"RANK": str(rank)})
        return Outcome(str(error), code, printed.getvalue())
    return Outcome("", 0, "")


@dataclasses.dataclass(frozen=True)
class Outcomes:
    folder: Path
    by_rank: list[dict[str, Outcome]]

    def of(self, name: str) -> list[Outcome]:
        return [outcomes[name] for outcomes in self.by_rank]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Every case on four ranks, the good plan last."""
    folder = tmp_path_factory.mktemp("plans").resolve()
    (folder / "small.yaml").write_text(SMALL_CLUSTER)
    shared = Case(message="", change=in_plan(distributed_optimizer=True), flags={"overlap_param_gather": ""})
    short = Case(message="", flags={"hetero_cluster": str(folder / "small.yaml")})
    cases = {**CASES, "short": short, "shared": shared, "good": Case(message="")}
    command_lines = {name: write_plan(case, folder / f"{name}.json") for name, case in cases.items()}
    return Outcomes(folder, run_ranks(outcomes_on_rank, WORLD_SIZE, command_lines, str(folder), timeout_s=120))


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_with_one_message(name: str, outcomes: Outcomes) -> None:
    """It names the object, the value, the limit and the fix; rank 0 prints it, and each rank's exit code is 2."""
    message = CASES[name].message.format(plan=outcomes.folder / f"{name}.json", folder=outcomes.folder)
    assert [seen.message for seen in outcomes.of(name)] == [message] * WORLD_SIZE
    assert [seen.code for seen in outcomes.of(name)] == [2] * WORLD_SIZE
    assert [seen.printed for seen in outcomes.of(name)] == [f"hetero: {message}\n", "", "", ""]


def test_devices_that_are_too_small_end_with_another_code(outcomes: Outcomes) -> None:
    """The stage, the bytes and the fix; exit code 3, as for a device that runs out of memory later."""
    for rank, seen in enumerate(outcomes.of("short")):
        assert re.match(
            r"replica \d stage \d does not fit its devices \(so do 2 more stages\): each cpu of ranks [\d-]+ needs \d+ "
            r"bytes \([\d.]+ GiB\) and has 1073741824 bytes \(1.00 GiB\); .*; or leave --hetero-cluster out",
            seen.message,
        )
        assert seen.code == 3
        assert seen.printed == (f"hetero: {seen.message}\n" if rank == 0 else "")


def test_a_plan_says_itself_that_it_shares_the_optimizer(outcomes: Outcomes) -> None:
    """No flag needs to repeat it, and weights may then be gathered beside the forward."""
    assert [seen.message for seen in outcomes.of("shared")] == [""] * WORLD_SIZE


def test_errors_before_leave_no_trace(outcomes: Outcomes) -> None:
    assert [seen.message for seen in outcomes.of("good")] == [""] * WORLD_SIZE


def agree_in_own_folder(rank: int, folder: str) -> str:
    os.chdir(Path(folder) / f"host-{rank // 2}")
    config = parse_args(command_line(hetero_plan="plan.json"))
    try:
        agree_on_plan(config, MODEL, torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    """A folder for each of two hosts with two ranks, both with the good plan."""
    folders = [tmp_path.resolve() / f"host-{host}" for host in range(2)]
    for folder in folders:
        folder.mkdir()
        save(good_plan(), folder / "plan.json")
    return folders


def test_a_host_without_the_plan_file(hosts: list[Path]) -> None:
    (hosts[1] / "plan.json").unlink()
    message = f"on ranks 2-3: plan.json: no such file (looked in {hosts[1]}); correct the path"
    assert run_ranks(agree_in_own_folder, WORLD_SIZE, str(hosts[0].parent)) == [message] * WORLD_SIZE


def test_a_host_with_another_plan_file(hosts: list[Path]) -> None:
    """Legal on its own, so that only the comparison tells."""
    other = good_plan()
    save(other.with_replica(1, other.replicas[1].with_stage(0, in_flight=1)), hosts[1] / "plan.json")
    message = "plan: ranks 2-3 have another one than rank 0; give every host the same --hetero-plan file"
    assert run_ranks(agree_in_own_folder, WORLD_SIZE, str(hosts[0].parent)) == [message] * WORLD_SIZE


# ---- what a process learns from its launcher


def test_without_a_launcher_this_is_the_only_process() -> None:
    assert launch_from({"HOME": "/"}) == Launch(rank=0, world_size=1, local_rank=0)


def test_torchruns_variables() -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    agents = variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for environment, in_rank_0 in ((variables, True), (agents, False)):
        store = StoreAddress(host="a", port=29500, in_rank_0=in_rank_0)
        assert launch_from(environment) == Launch(rank=5, world_size=8, local_rank=1, store=store)
    assert launch_from({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).store is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "environment: RANK, WORLD_SIZE set but not LOCAL_RANK, MASTER_PORT, MASTER_ADDR; launch with torchrun",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "first", "MASTER_ADDR": "a", "MASTER_PORT": "http"},
            "environment: LOCAL_RANK 'first', MASTER_PORT 'http': must be whole numbers; launch with torchrun",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "99999"},
            "environment: MASTER_PORT 99999 is no port, which are 1 to 65535",
        ),
    ],
)
def test_half_a_launcher_is_refused(
    environment: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        launch_from(environment)
    assert exit_code(raised.value, environment) == 2
    assert capsys.readouterr().err == f"hetero: {message}\n"


def test_a_rank_beyond_the_world_is_refused() -> None:
    """It would wait for ranks that do not wait for it."""
    environment = {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match=r"^environment: RANK 2 of WORLD_SIZE 2; ranks count from 0$"):
        launch_from(environment)


def test_every_rank_says_that_another_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """A launcher may show one host's output only, and no rank knows which."""
    assert exit_code(MembershipError("rank 1 is gone"), {"RANK": "3"}) == 3
    assert capsys.readouterr().err == "hetero: rank 3: rank 1 is gone\n"


def join_with_gpus(rank: int, num_gpus: int, backend: str, nccl: str | None) -> str:
    """Join on a host that has ``num_gpus`` as far as torch can tell, over gloo whatever is asked for.

    nccl: the version that is loaded, if ranks are to share devices.
    """
    store = dist.distributed_c10d._get_default_store()
    # Who leaves at once breaks the connections that the other is still making.
    dist.barrier()
    dist.destroy_process_group()
    init_process_group = dist.init_process_group
    torch.cuda.device_count = lambda: num_gpus
    torch.cuda.is_available = lambda: num_gpus > 0
    # These ask NCCL and CUDA, which are not there.
    launch.check_versions, launch.check_kernels = lambda device: (), lambda device: None
    launch._store = lambda *_: dist.PrefixStore("again", store)
    dist.init_process_group = lambda backend, **kwargs: init_process_group("gloo", **kwargs)
    shared_devices.loaded_nccl_version = lambda: nccl
    flags = ["--hetero-share-devices"] if nccl is not None else []
    parallel = parse_args([*command_line(micro_batch_size="1", distributed_backend=backend), *flags]).parallel
    try:
        with joined(Launch(rank=rank, world_size=2, local_rank=rank), parallel) as (device, _):
            said = str(device)
    except ConfigError as error:
        said = str(error)
    # The helper that runs this leaves the world at its end.
    init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=2)
    return said


FOR_THE_CPU = "or use --distributed-backend gloo for the CPU"


@pytest.mark.parametrize(
    ("num_gpus", "backend", "nccl", "said"),
    [
        (0, "gloo", None, ["cpu", "cpu"]),
        (2, "nccl", None, ["cuda:0", "cuda:1"]),
        (
            1,
            "nccl",
            None,
            [
                "on rank 1: --distributed-backend nccl: this host has 1 CUDA devices and more processes; start one "
                f"process per device, add --hetero-share-devices to try something out, {FOR_THE_CPU}",
            ]
            * 2,
        ),
        (1, "nccl", "2.30.7", ["cuda:0", "cuda:0"]),
        (2, "nccl", "2.30.7", ["cuda:0", "cuda:1"]),
        (
            1,
            "nccl",
            "2.28.9",
            [
                "--hetero-share-devices needs NCCL 2.30 or newer, 2.28.9 is loaded; start one process per device, or "
                f"run: {shared_devices.install_nccl(torch.version.cuda)}"
            ]
            * 2,
        ),
        (
            0,
            "nccl",
            "2.30.7",
            [
                "--distributed-backend nccl: this host has 0 CUDA devices and more processes; start one process per "
                f"device, {FOR_THE_CPU}"
            ]
            * 2,
        ),
        (
            2,
            "gloo",
            None,
            [
                "--distributed-backend gloo trains on the CPU, but this host shows CUDA devices to megatron-core; "
                "hide them with CUDA_VISIBLE_DEVICES='' or use nccl"
            ]
            * 2,
        ),
    ],
    ids=[
        *("cpu", "a-gpu-each", "a-gpu-too-few", "a-gpu-is-shared", "sharing-is-not-needed", "nccl-is-too-old"),
        *("no-gpu", "gloo-beside-gpus"),
    ],
)
def test_every_rank_needs_a_device(num_gpus: int, backend: str, nccl: str | None, said: list[str]) -> None:
    """Also the rank that has one hears of it: it would wait, and only rank 0 prints."""
    assert run_ranks(join_with_gpus, 2, num_gpus, backend, nccl) == said


# ---- hosts whose installations differ


def join_from_another_host(rank: int, table: VersionTable, changes: dict[str, str]) -> tuple[str, str]:
    """Join where rank 1 has other versions; what this rank hears, and what it prints."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    launch._store = lambda *_: dist.PrefixStore("again", store)
    installation.shipped_versions = lambda: table
    if rank == 1:
        installed = dataclasses.replace(installed_versions(), **changes)
        running = dataclasses.replace(runtime_versions.runtime_versions(torch.device("cpu")), **changes)
        installation.installed_versions = lambda: installed
        runtime_versions.runtime_versions = lambda device: running
    printed, said = io.StringIO(), ""
    parallel = parse_args(command_line(micro_batch_size="1", distributed_backend="gloo")).parallel
    with contextlib.redirect_stdout(printed):
        try:
            with joined(Launch(rank=rank, world_size=2, local_rank=rank), parallel):
                pass
        except ConfigError as error:
            said = str(error)
    # The helper that runs this leaves the world at its end.
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=2)
    return said, printed.getvalue()


@pytest.fixture
def table() -> VersionTable:
    """This environment was tried, and Python 9.9 is known to break."""
    run = TriedRun(kind="bits", device="CPU", date="2026-11-27", command="pytest", result="equal")
    breaking = BreakingVersions(
        versions={"python": "==9.9"}, because="it is not there yet", fix="wait", date="2026-11-27", command="python9.9"
    )
    return VersionTable(
        tried=(TriedVersions(**dataclasses.asdict(installed_versions()), runs=(run,)),), breaking=(breaking,)
    )


def test_rank_0_says_which_combination_was_not_tried(table: VersionTable) -> None:
    changes = {"transformer_engine": "2.99.0"}
    (error, line), other = run_ranks(join_from_another_host, 2, table, changes)
    assert (error, other) == ("", ("", ""))
    here = installed_versions()
    assert line == (
        f"versions not tried: rank 1: {here}, TransformerEngine 2.99.0: no run had TransformerEngine 2.99.0; the "
        f"nearest combination that was: {here} (bits on CPU, 2026-11-27) (docs/install.md)\n"
    )


def test_all_ranks_hear_of_a_combination_that_breaks_on_one_host(table: VersionTable) -> None:
    first, second = run_ranks(join_from_another_host, 2, table, {"python": "9.9"})
    assert first == second
    assert re.fullmatch(r"on rank 1: Python 9\.9, .*: known to break, because it is not there yet; wait", first[0])


# ---- a whole launch


def test_rank_0_of_the_programs_warns_of_an_old_copy_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "megatron/training").mkdir(parents=True)
    for name in OLD_FILES:
        (tmp_path / "megatron/training" / name).touch()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('torch was imported')")
    warning = (
        f"hetero: warning: {tmp_path}/megatron/training is of an earlier megatron-hetero, whose harness was "
        f"megatron/training; leave {tmp_path} out of PYTHONPATH\n"
    )

    def said_by(program: str, **variables: str) -> str:
        command = [sys.executable, program, "--help"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)} | variables
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout or done.stderr.endswith("torch was imported\n"), "it goes on"
        return done.stderr

    for program in ("pretrain_gpt.py", *(f"tools/{path.name}" for path in sorted((ROOT / "tools").glob("*.py")))):
        if program != "tools/sweep.py":
            assert said_by(program).startswith(warning), program
    assert "megatron/training" not in said_by("pretrain_gpt.py", RANK="1")


@pytest.mark.rotates(every=6, turn=5)
def test_a_launch_that_cannot_work_ends_with_one_message(tmp_path: Path) -> None:
    """The whole way once: rank 0 prints, every rank ends with 2, torchrun says so, and nobody hangs."""
    save(good_plan(), tmp_path / "plan.json")
    run = launched(2, command_line(hetero_plan=str(tmp_path / "plan.json")))
    message = "hetero: plan: it is for 4 ranks (0 of them idle), but 2 were launched; launch 4 or make a plan for 2"
    assert run.stderr.splitlines().count(message) == 1
    assert re.search(r"exitcode\s*: 2\b", run.stderr)
    *_, cause, end = run.stderr.splitlines()
    assert cause == f"  traceback : {message.removeprefix('hetero: ')}", "the launcher shows it last"
    assert set(end) == {"="}
    assert 'pretrain_gpt.py", line' not in run.stderr, "a traceback"
    assert run.stdout == ""


BROKEN = """
import os, runpy
from hetero.runtime.session import TrainingSession

def broken(session):
    raise ZeroDivisionError("in the middle of a step")

if os.environ["RANK"] == "1":
    TrainingSession.compute_gradients = broken
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""


@pytest.mark.rotates(every=6, turn=4)
def test_a_bug_of_one_rank_is_the_last_that_the_launcher_says(tmp_path: Path) -> None:
    """Whichever rank the launcher takes for the first that failed: that one, or who hears of it."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    run = launched(
        2,
        command_line(micro_batch_size="1", pipeline_model_parallel_size="2"),
        script=str(script),
    )
    assert run.returncode == 1
    *_, cause, end = [line for line in run.stderr.splitlines() if line.strip()]
    assert "ZeroDivisionError: in the middle of a step" in cause
    assert set(end) == {"="}


def test_the_first_error_stays_in_the_error_file(tmp_path: Path) -> None:
    """What comes later follows from it; a launcher without such a file, or a folder that is gone, are no errors."""
    file = tmp_path / "error.json"
    write_error_file(ConfigError("the cause, http://me:a-secret@host"), file)
    write_error_file(MembershipError("what follows"), file)
    assert json.loads(file.read_text())["message"]["message"] == "the cause, http://***@host"
    assert error_file({"TORCHELASTIC_ERROR_FILE": str(file)}) == file
    write_error_file(ConfigError("nowhere"), error_file({}))
    write_error_file(ConfigError("nowhere"), tmp_path / "gone" / "error.json")
    assert [each.name for each in tmp_path.iterdir()] == ["error.json"]


def test_a_store_that_is_not_there_is_told_in_time() -> None:
    """By the address that was tried: it may be wrong."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = StoreAddress(host="127.0.0.1", port=port, in_rank_0=True)
    said = (
        rf"^MASTER_ADDR 127.0.0.1 MASTER_PORT {port}: no rendezvous store answers there within 1 s: .*is rank 0 running"
    )
    with pytest.raises(MembershipError, match=said):
        launch._store(Launch(rank=1, world_size=2, local_rank=1, store=address), datetime.timedelta(seconds=1))
