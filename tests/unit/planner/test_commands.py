"""``hetero plan`` and ``hetero simulate`` as a user runs them."""

import argparse
import dataclasses
import functools
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hetero.cli import main
from hetero.cost.memory import memory_costs, plan_memory
from hetero.cost.runtime_model import HETERO
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.validate import validate
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import Yardstick, uniform_yardsticks
from hetero.profiling.run_options import add_run_options, check_run_options
from hetero.serialization import load, save
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model_import import load_model
from hetero.spec.parameters import parameters
from hetero.units import GIB
from tests.helpers.plans import sharded

CLUSTER = """\
node_types:
  - name: fast
    device: A100-40
    gpus_per_node: 2
    inside_node: {bandwidth_gb_per_s: 200, latency_us: 10}
  - name: slow
    device: V100-16
    gpus_per_node: 2
    inside_node: {bandwidth_gb_per_s: 60, latency_us: 10}
links:
  between_nodes: {bandwidth_gb_per_s: 2, latency_us: 30}
"""

MODEL = (Path(__file__).parents[3] / "scripts/presets/models/opt-350m.yaml").read_text(encoding="utf-8")


ANSWERS: dict[str, PlanResult] = {}
"""By question, for tests that ask the same one: what the command makes of the answer is theirs."""


@pytest.fixture(autouse=True)
def _counted_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches end after so much work, however busy the machine is, and nothing is searched twice."""

    def planned(problem: Problem, *, yardsticks: Sequence[Yardstick] = (), processes: int = 1) -> PlanResult:
        costs = problem.costs
        assert costs.runtime == HETERO.with_dropout(hidden=problem.hidden_dropout, attention=problem.attention_dropout)
        others = (getattr(problem, each.name) for each in dataclasses.fields(problem) if each.name != "costs")
        asked = repr((costs.model, costs.seq_length, costs.precision, processes, *others))
        if asked not in ANSWERS:
            deadline = Deadline(2.0, CountedWork())
            ANSWERS[asked] = plan_cluster(problem, yardsticks=yardsticks, deadline=deadline, processes=processes)
        return ANSWERS[asked]

    monkeypatch.setattr("hetero.planner.plan_cluster.plan_cluster", planned)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    (tmp_path / "model.yaml").write_text(MODEL.replace("num_layers: 24", "num_layers: 6"), encoding="utf-8")
    return tmp_path


def run(files: Path, *more: str) -> int:
    known = ["--cluster", str(files / "cluster.yaml"), "--model", str(files / "model.yaml")]
    return main(["plan", *known, "--global-batch-size", "16", *more])


def test_plan_writes_a_plan_that_simulate_reads(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_path, trace_path = files / "plan.json", files / "trace.json"
    assert run(files, "--out", str(plan_path)) == 0
    printed = capsys.readouterr().out
    assert "gap" in printed
    assert "planned in" in printed
    plan = load(Plan, plan_path)
    validate(plan)
    assert plan.global_batch_size == 16

    assert main(["simulate", str(plan_path), "--cluster", str(files / "cluster.yaml"), "--trace", str(trace_path)]) == 0
    printed = capsys.readouterr().out
    assert "s per step" in printed
    assert "None" not in printed
    assert json.loads(trace_path.read_text(encoding="utf-8"))["traceEvents"]


def test_as_many_processes_search_as_are_asked_for_or_as_there_are_cores(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    for flags, said in (
        ((), r"planned in \d+\.\d s by 3 processes\b"),
        (("--processes", "1"), r"planned in \d+\.\d s(;|$)"),
    ):
        assert run(files, *flags) == 0
        assert re.search(said, capsys.readouterr().out, re.MULTILINE)


def test_processes_without_an_answer_are_told(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is there, made by the others."""

    def planned(problem: Problem, *, yardsticks: Sequence[Yardstick], processes: int) -> PlanResult:
        found = plan_cluster(problem, deadline=Deadline(1.0, CountedWork()))
        return dataclasses.replace(found, processes=processes, failed_processes=(-9, -9))

    monkeypatch.setattr("hetero.planner.plan_cluster.plan_cluster", planned)
    assert run(files, "--processes", "3") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("warning: one of the 3 processes ended without an answer, with exit code -9, as one does") == 2
    assert "fewer --processes" in said


def test_what_lacks_the_precision_idles_and_is_told(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Yardsticks too have plans of the others alone, and none of all."""
    assert run(files, "--precision", "bf16", "--out", str(files / "plan.json"), "--compare") == 0
    printed = capsys.readouterr().out
    assert "warning: node type 'slow' idles: V100-16 has no bf16" in printed
    assert "have fp64, fp32, fp16 (--precision)" in printed
    assert re.search(r"uniform, fast +│ +[0-9.]+", printed)
    assert re.search(r"uniform +│.*no such plan is possible", printed)
    assert re.search(r"whale +│ +[0-9.]+", printed)
    assert load(Plan, files / "plan.json").idle_ranks == (2, 3)


def test_plans_say_where_they_come_from(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both plans: the command as it was typed, the cluster with its figures, and what simulate predicts for them."""
    plans = ["--out", str(files / "plan.json"), "--uniform-out", str(files / "uniform.json")]
    assert run(files, *plans) == 0
    capsys.readouterr()
    for path in plans[1::2]:
        origin = load(Plan, Path(path)).provenance
        assert origin is not None
        assert shlex.split(origin.command)[:2] == ["hetero", "plan"]
        assert shlex.split(origin.command)[-4:] == plans
        assert origin.cluster == load(ClusterSpec, files / "cluster.yaml")
        assert main(["simulate", path, "--cluster", str(files / "cluster.yaml"), "--json"]) == 0
        simulated = json.loads(capsys.readouterr().out)
        predicted = dataclasses.asdict(origin.prediction)
        assert predicted == pytest.approx({name: simulated[name] for name in predicted})


def test_a_distributed_optimizer_needs_less_memory(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two data-parallel ranks: each has half of the optimizer state, a quarter of what weights and it take in fp32."""
    model = load_model(files / "model.yaml")
    one = Stage(first_layer=0, end_layer=6, ranks=(0, 1), dp=2, device="A100-40", micro_batch_size=1, in_flight=1)
    plan = Plan(
        model=model,
        seq_length=128,
        global_batch_size=16,
        replicas=(Replica(num_samples=16, stages=(one,)),),
        idle_ranks=(2, 3),
    )
    simulate = ["simulate", str(files / "plan.json"), "--cluster", str(files / "cluster.yaml")]
    used = []
    for each in (plan, sharded(plan)):
        save(each, files / "plan.json")
        assert main(simulate) == 0
        (found,) = re.findall(r"(\d+\.\d) of\b", capsys.readouterr().out)
        used.append(float(found))
    saved_gib = sum(parameter.numel for parameter in parameters(model)) * 8 / 2 / GIB
    assert used[0] - used[1] == pytest.approx(saved_gib, abs=0.11)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--use-distributed-optimizer"]])
def test_a_plan_says_whether_it_was_made_with_a_distributed_optimizer(files: Path, flags: list[str]) -> None:
    """The planner's and the uniform one, so that whoever prices or runs them assumes the same."""
    paths = [files / "plan.json", files / "uniform.json"]
    assert run(files, "--out", str(paths[0]), "--uniform-out", str(paths[1]), *flags) == 0
    assert [load(Plan, path).distributed_optimizer for path in paths] == [bool(flags)] * 2


def test_a_plan_that_does_not_fit_is_simulated_and_then_refused(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table and the trace are there all the same; the verdict is on stderr, with exit code 3."""
    one = Stage(first_layer=0, end_layer=6, ranks=(2, 3), dp=2, device="V100-16", micro_batch_size=16, in_flight=1)
    plan = Plan(
        model=load_model(files / "model.yaml"),
        seq_length=2048,
        global_batch_size=32,
        replicas=(Replica(num_samples=32, stages=(one,)),),
        idle_ranks=(0, 1),
    )
    save(plan, files / "plan.json")
    command = ["simulate", str(files / "plan.json"), "--cluster", str(files / "cluster.yaml")]
    outputs = [files / "trace.json", files / "report.html"]
    # What is not there is not emulated either.
    assert main([*command, "--measure", "--trace", str(outputs[0]), "--report", str(outputs[1])]) == 3
    captured = capsys.readouterr()
    assert re.search(r"\d+\.\d of\b", captured.out)
    assert "s per step" in captured.out
    assert "executed" not in captured.out
    said = re.fullmatch(
        r"hetero: (replica 0 stage 0 does not fit its devices: each V100-16 of ranks 2-3 needs (\d+) bytes "
        r"\([\d.]+ GiB\) and has 17179869184 bytes \(16\.00 GiB\); most of it, in GiB: .*; "
        r"it fits with micro_batch_size [842])\n",
        captured.err,
    )
    assert said is not None, captured.err
    assert int(said[2]) > 16 * GIB
    assert all(path.exists() for path in outputs)
    assert said[1] in outputs[1].read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_step_is_told_with_its_range_and_mfu(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the planner and by the simulator alike, in the table and in words."""
    assert run(files, "--out", str(files / "plan.json"), "--precision", "fp16") == 0
    planned = capsys.readouterr().out
    simulate = ["simulate", str(files / "plan.json"), "--cluster", str(files / "cluster.yaml")]
    assert main(simulate) == 0
    simulated = capsys.readouterr().out
    ranges = []
    for printed in (planned, simulated):
        titled = re.search(r"([\d.]+) s per step \(([\d.]+) to ([\d.]+)\), [\d.]+ samples/s", " ".join(printed.split()))
        assert titled is not None
        ranges.append([float(each) for each in titled.groups()])
        low, step, high = ranges[-1][1], ranges[-1][0], ranges[-1][2]
        assert low < step < high
        assert f"nine of ten such steps take {titled[2]} to {titled[3]} s" in printed
        assert re.search(r"MFU [\d.]+%: ", printed)
        assert "in fp16" in printed
        assert "what would narrow the range most:" in printed
    assert ranges[0] == ranges[1]
    assert "against a uniform plan: " in planned or "against the next best plan" in planned
    # In pairs: what measures a profile, and what takes the file that it writes.
    lines = [shlex.split(each, comments=True) for each in re.findall(r"^     (hetero .*)$", planned + simulated, re.M)]
    assert lines
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    for measures, takes in zip(lines[::2], lines[1::2], strict=True):
        assert measures[1:5] == ["profile", "run", "--model", str(files / "model.yaml")]
        check_run_options(parser.parse_args(measures[3:]))
        assert takes[1] in ("plan", "simulate")
        assert takes[-2] == "--profile"
        assert takes[-1].startswith("profiles/model.")


@pytest.mark.parametrize(
    ("num_layers", "limit_s", "told", "not_told"),
    [
        (1000, 2.0, "the model does not fit: ", "time ran out"),
        (6, 1e-9, "time ran out: no plan was found within", "does not fit:"),
    ],
)
def test_what_does_not_fit_and_what_was_not_found_are_told_apart(
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    num_layers: int,
    limit_s: float,
    told: str,
    not_told: str,
) -> None:
    """Either ends with an exit status of its own kind, one line, and no plan in the file."""

    def planned(problem: Problem, **options: Any) -> PlanResult:
        return plan_cluster(problem, deadline=Deadline(limit_s, CountedWork()), **options)

    monkeypatch.setattr("hetero.planner.plan_cluster.plan_cluster", planned)
    text = MODEL.replace("num_layers: 24", f"num_layers: {num_layers}")
    (files / "model.yaml").write_text(text, encoding="utf-8")
    assert run(files, "--out", str(files / "plan.json")) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"hetero: planner: {told}")
    assert not_told not in line
    assert captured.out == ""
    assert not (files / "plan.json").exists()


def test_a_uniform_plan_that_was_not_found_in_time_is_not_said_not_to_fit(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = functools.partial(uniform_yardsticks, limit_s=1e-9)
    monkeypatch.setattr("hetero.commands.plan.uniform_yardsticks", late)
    assert run(files, "--uniform-out", str(files / "uniform.json")) == 2
    assert "time ran out before a uniform plan was found, which does not mean that none fits" in capsys.readouterr().err


def test_without_a_uniform_plan_nothing_is_planned(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three samples have no equal parts for two replicas, one layer makes no pipeline, and one head no tp of 2."""
    monkeypatch.delattr("hetero.planner.plan_cluster.plan_cluster")
    model = MODEL.replace("num_layers: 24", "num_layers: 1")
    for key, value in (("num_attention_heads", 1), ("num_query_groups", 1), ("kv_channels", 1024)):
        model = re.sub(rf"^{key}: .*$", f"{key}: {value}", model, flags=re.MULTILINE)
    (files / "model.yaml").write_text(model, encoding="utf-8")
    out, uniform = str(files / "plan.json"), str(files / "uniform.json")
    known = ["--cluster", str(files / "cluster.yaml"), "--model", str(files / "model.yaml"), "--data-sheets"]
    assert main(["plan", *known, "--global-batch-size", "3", "--out", out, "--uniform-out", uniform]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"hetero: --uniform-out {uniform}: this model has no uniform plan on these devices: no such plan is possible; "
        "leave it out\n"
    )


@pytest.mark.slow
def test_the_uniform_plan_that_is_written_is_not_faster(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the time: with next to none the plan is the uniform one."""
    for limit_s in (1e-9, 0.01):

        def planned(problem: Problem, limit_s: float = limit_s, **options: Any) -> PlanResult:
            return plan_cluster(problem, deadline=Deadline(limit_s, CountedWork()), **options)

        monkeypatch.setattr("hetero.planner.plan_cluster.plan_cluster", planned)
        out, uniform = files / "plan.json", files / "uniform.json"
        assert run(files, "--out", str(out), "--uniform-out", str(uniform), "--compare", "--processes", "1") == 0
        ours, theirs = (load(Plan, path).provenance for path in (out, uniform))
        assert ours is not None
        assert theirs is not None
        assert ours.prediction.step_s <= theirs.prediction.step_s
        printed = capsys.readouterr().out
        (ratio,) = re.findall(r"best uniform plan \(.*\): .* s per step, ([\d.]+)x; written to", printed)
        assert float(ratio) >= 1
        assert all(float(ratio) >= 1 for ratio in re.findall(r"([\d.]+)x (?:\?|│)", printed))


FREE = """\
node_types:
  - name: a
    device: T4
    gpus_per_node: 2
    count: 2
    nics_per_node: {nics}
    price_per_hour: 0
    inside_node: {{bandwidth_gb_per_s: 10, latency_us: 5}}
links: {{between_nodes: {{bandwidth_gb_per_s: 1, latency_us: 5}}}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("nics", [1, 2])
def test_devices_that_cost_nothing_are_planned_by_money(
    files: Path, capsys: pytest.CaptureFixture[str], nics: int
) -> None:
    """They ended in a division by 0: with one interface by the runners-up, with two by the choice between rings."""
    (files / "cluster.yaml").write_text(FREE.format(nics=nics), encoding="utf-8")
    money = ["--objective", "money", "--data-sheets", "--compare", "--uniform-out", str(files / "u.json")]
    assert run(files, *money) == 0
    printed = capsys.readouterr().out
    assert re.search(r"against the next best plan of other stages: \d\.\d{3}x", printed)
    assert re.search(r"best uniform plan .*, [1-9]\.\d\dx by money", printed)


def test_a_single_layer_that_does_not_fit_says_what_it_is_short_of(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in ``cannot convert float infinity to integer``: of one layer no stage has the embedding alone."""
    model = MODEL.replace("num_layers: 24", "num_layers: 1")
    (files / "model.yaml").write_text(model, encoding="utf-8")
    cluster = re.sub("gpus_per_node: 2", "gpus_per_node: 2\n    memory_gib: 1", CLUSTER)
    (files / "cluster.yaml").write_text(cluster, encoding="utf-8")
    assert run(files) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(
        r"hetero: planner: the model does not fit: no stage of any node type holds the embedding and the head beside a "
        r"layer with 2048 tokens; the closest is tp 2 on (A100-40|V100-16), where each device needs \d+ bytes",
        line,
    )


@pytest.mark.slow
def test_what_to_type_plans_the_same(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that is printed is the one that was typed, with a profile more."""
    typed = ["--seq-length", "512", "--precision", "fp16", "--no-interleave", "--use-distributed-optimizer"]
    assert run(files, *typed) == 0
    command = next(line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("     hetero plan"))
    words = shlex.split(command)
    assert words[:2] == ["hetero", "plan"]
    for each in (*typed, "--global-batch-size", "16", str(files / "cluster.yaml"), str(files / "model.yaml")):
        assert each in words
    profile = words[words.index("--profile") + 1]
    assert profile in ("profiles/model.a100-40.fp16.transformer_engine.json", "profiles/model.v100-16.fp16.local.json")
    assert main(words[1:]) == 2
    assert profile in capsys.readouterr().err, "nobody has measured it yet"


def test_json_has_what_the_tables_have(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And stdout nothing else, so that a program can read it."""
    assert run(files, "--out", str(files / "plan.json"), "--precision", "fp16", "--json") == 0
    captured = capsys.readouterr()
    planned = json.loads(captured.out)
    assert "planned in" in captured.err
    assert main(["simulate", str(files / "plan.json"), "--cluster", str(files / "cluster.yaml"), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert planned["step_low_s"] < planned["step_s"] < planned["step_high_s"]
    assert planned["rivals"]
    assert planned["measurements"]
    assert all(each["step_low_s"] >= planned["step_low_s"] for each in planned["measurements"])
    assert 0 < planned["mfu"] < 1
    assert {each["device"] for each in planned["memory"]} <= {"A100-40", "V100-16"}
    formula, any_plan = planned["bounds"]["formula"], planned["bounds"]["any_plan"]
    assert 0 <= formula["gap"] == pytest.approx(1 - formula["none_below_s"] / formula["best_s"], abs=1e-9)
    assert 0 < any_plan["gap"] == pytest.approx(1 - any_plan["none_below_s"] / planned["step_s"])
    assert "gap to any plan" in captured.err
    same = set(planned) - {"rivals", "measurements", "bounds"}
    assert {name: planned[name] for name in same} == {name: simulated[name] for name in same}


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ("0", "seq_length is 0, must be at least 1"),
        ("-5", "seq_length is -5, must be at least 1"),
        ("2049", "seq_length 2049 exceeds the model's max_position_embeddings 2048: its "),
    ],
)
def test_sequences_that_the_model_has_no_positions_for(
    files: Path, capsys: pytest.CaptureFixture[str], length: str, message: str
) -> None:
    assert run(files, "--seq-length", length) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "planned"), [([], (0.1, 0.1)), (["0", "0.2"], (0.0, 0.2))])
def test_a_plan_says_what_a_launch_has_to_drop(files: Path, flags: list[str], planned: tuple[float, float]) -> None:
    given = [word for pair in zip(("--hidden-dropout", "--attention-dropout"), flags, strict=False) for word in pair]
    assert run(files, "--out", str(files / "plan.json"), *given) == 0
    plan = load(Plan, files / "plan.json")
    assert (plan.hidden_dropout, plan.attention_dropout) == planned
    counted, without = (
        plan_memory(each, memory_costs(each))[0, 0].activations
        for each in (plan, dataclasses.replace(plan, hidden_dropout=0.0, attention_dropout=0.0))
    )
    assert counted > without, "at least of the embedding"


@pytest.mark.parametrize("share", ["1", "-0.1", "nan", "much"])
def test_nobody_drops_everything(files: Path, capsys: pytest.CaptureFixture[str], share: str) -> None:
    assert run(files, "--hidden-dropout", share) == 2
    assert "--hidden-dropout" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_backwards_stay_whole_where_that_is_asked_for(files: Path) -> None:
    """A model that needs both nodes makes a pipeline, of which the last stage's W's can wait."""
    (files / "cluster.yaml").write_text(CLUSTER.replace("gpus_per_node: 2", "gpus_per_node: 1"), encoding="utf-8")
    (files / "model.yaml").write_text(MODEL.replace("num_layers: 24", "num_layers: 96"), encoding="utf-8")
    delays = []
    for more in ((), ("--no-split-backward",)):
        assert run(files, "--out", str(files / "plan.json"), "--no-interleave", *more) == 0
        delays.append([stage.wgrad_delay for _, _, stage in load(Plan, files / "plan.json").stages()])
    assert delays[0][-1] is not None
    assert set(delays[1]) == {None}


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_stages_are_interleaved_unless_that_is_forbidden(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that needs both nodes makes a pipeline, which waits for its first and its last microbatches."""
    (files / "cluster.yaml").write_text(CLUSTER.replace("gpus_per_node: 2", "gpus_per_node: 1"), encoding="utf-8")
    (files / "model.yaml").write_text(MODEL.replace("num_layers: 24", "num_layers: 96"), encoding="utf-8")
    said = {}
    for more in ((), ("--no-interleave",)):
        assert run(files, "--out", str(files / "plan.json"), *more) == 0
        made = load(Plan, files / "plan.json")
        said[more] = "in turns" in capsys.readouterr().out
        assert any(each.is_interleaved for each in made.replicas) == said[more]
    assert said == {(): True, ("--no-interleave",): False}


@pytest.mark.slow
def test_compare_shows_every_yardstick(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "--compare") == 0
    printed = capsys.readouterr().out
    for name in ("this planner", "uniform", "uniform, fast", "whale", "autohet", "harp"):
        assert name in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--objective", "money"], "node type 'fast' has no price_per_hour"),
        (["--precision", "bf16", "--time-limit", "-1"], "time limit is -1"),
    ],
)
def test_mistakes_are_one_line(files: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert run(files, *more) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--out", "--uniform-out", "--trace"])
def test_a_path_that_cannot_be_written_is_told_before_any_work(
    files: Path, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner may have searched for minutes by then, and its plan would be lost."""
    for work in ("hetero.planner.plan_cluster.plan_cluster", "hetero.commands.plan.simulate"):
        monkeypatch.delattr(work)
    (files / "folder.json").mkdir()
    for path, problem in (
        (files / "absent" / "plan.json", f"there is no folder {files / 'absent'}; make it first"),
        (files / "folder.json", "is a folder; name a file in it"),
    ):
        if flag == "--trace":
            command = ["simulate", "plan.json", "--cluster", "cluster.yaml", flag, str(path)]
            assert main(command) == 2
        else:
            assert run(files, flag, str(path)) == 2
        assert capsys.readouterr().err == f"hetero: {flag} {path}: {problem}\n"


HOST = """\
    memory_gib: 8
    host:
      source: a test
      memory_gib: 64
      updates: [{threads: 4, elements_per_s: 1.0e+9}]
      to_device: {bandwidth_gb_per_s: 24, latency_us: 10}
      to_host: {bandwidth_gb_per_s: 24, latency_us: 10}
"""


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_what_hosts_hold_is_printed_and_may_be_forbidden(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, _ = CLUSTER.split("  - name: slow")
    cluster = fast.replace("gpus_per_node: 2\n", f"gpus_per_node: 2\n{HOST}")
    (files / "cluster.yaml").write_text(cluster, encoding="utf-8")
    (files / "model.yaml").write_text(MODEL.replace("num_layers: 24", "num_layers: 90"), encoding="utf-8")
    asked = ["--use-distributed-optimizer", "--attention-dropout", "0", "--host-memory-gib", "48"]
    assert run(files, *asked, "--out", str(files / "plan.json")) == 0
    printed = capsys.readouterr().out
    assert "GiB of hosts, a checkpoint that is written included" in printed
    assert re.search(r"│ fast .* of 48 │", printed)
    for command in re.findall(r"^     (hetero plan .*)$", printed, re.MULTILINE):
        assert " --attention-dropout 0 --host-memory-gib 48 --profile " in command
    assert main(["simulate", str(files / "plan.json"), "--cluster", str(files / "cluster.yaml"), "--json"]) == 0
    for on_host in json.loads(capsys.readouterr().out)["host_memory"]:
        assert 0 < on_host["bytes"]["optimizer"] < sum(on_host["bytes"].values()) <= 48 * GIB
        assert on_host["capacity_gib"] == 64
    assert run(files, *asked, "--offload", "none") == 2
    assert "or leave optimizer state to hosts, which takes offload auto" in capsys.readouterr().err
