"""``pretrain_gpt.py`` as users run it: under a plan and under Megatron's own flags, it trains the same."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hetero.checkpoint.folder import published_steps
from hetero.plan.ir import Plan
from hetero.serialization import load, save
from hetero.spec.cluster import ClusterSpec
from tests.helpers.commands import MODEL, ROOT, STEPS, WORLD_SIZE, Finished, command_line, good_plan
from tests.helpers.forked_launch import forked
from tests.helpers.host_training import left_to_hosts
from tests.helpers.models import MOE_FLAGS
from tests.helpers.small_tokenizers import write_word_level
from tests.helpers.synthetic_profiles import profile
from tests.unit.pretrain.corpora import corpus_of_late_tokens
from tools import preprocess_data
from tools.convert_checkpoint import main as convert

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]


@functools.cache
def uniform_run(schedule: str) -> Finished:
    return forked(
        2,
        command_line(micro_batch_size="1", pipeline_model_parallel_size="2", hetero_schedule=schedule),
    )


LINE = re.compile(
    rf"step (?P<step>\d)/{STEPS} \| loss (?P<loss>\d\.\d{{6}}) \| grad norm (?P<norm>\d+\.\d{{4}})"
    r" \| lr (?P<lr>\d\.\d{3}e-\d\d) \| (?P<samples>\d+\.\d) samples/s \| (?P<tokens>[\d,]+) tokens/s"
    r" \| step time (?P<ms>\d+\.\d) ms \| skipped (?P<skipped>\d+) \| ETA 0:00:\d\d"
)


def log_lines(run: Finished) -> list[re.Match[str]]:
    """The report of each step; exactly those, as only one rank reports."""
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("step ")]
    matches = [LINE.fullmatch(line) for line in lines]
    assert len(matches) == STEPS, run.stdout
    assert all(matches), lines
    return [match for match in matches if match is not None]


def test_training_under_a_plan(tmp_path: Path) -> None:
    """Three steps under the asymmetric plan: a line for each, the plan before them, the same in TensorBoard's files,
    and the losses of the uniform plan, which splits the same model and batch otherwise."""
    save(good_plan(), tmp_path / "plan.json")
    argv = command_line(hetero_plan=str(tmp_path / "plan.json"), tensorboard_dir=str(tmp_path / "events"))
    run = forked(WORLD_SIZE, argv)
    lines = log_lines(run)
    assert [line["step"] for line in lines] == ["1", "2", "3"]
    assert [line["lr"] for line in lines] == ["1.000e-02", "6.667e-03", "3.333e-03"]
    assert {line["skipped"] for line in lines} == {"0"}
    # Nothing is learnt yet: every token of the vocabulary, without its padding, is as likely as the other.
    assert float(lines[0]["loss"]) == pytest.approx(math.log(61), abs=0.03)
    for line in lines:
        samples_per_s = 6 / float(line["ms"]) * 1000
        assert float(line["samples"]) == pytest.approx(samples_per_s, rel=0.02, abs=0.06)
        assert int(line["tokens"].replace(",", "")) == pytest.approx(16 * samples_per_s, rel=0.02, abs=1)
    picture, layers = "ranks 0-1, tp 2", "local (TransformerEngine does not run on cpu)"
    assert run.stdout.index(picture) < run.stdout.index(layers) < run.stdout.index("step 1/3"), (
        "who does what comes first"
    )
    assert "Traceback" not in run.stderr
    assert_events_say(lines, tmp_path / "events")
    assert_same_training(lines, log_lines(uniform_run("1f1b")))


@pytest.mark.rotates(every=3, turn=1)
def test_hosts_update_what_the_plan_leaves_to_them(tmp_path: Path) -> None:
    """The same losses, and a column that says what is on the hosts."""
    left = left_to_hosts(good_plan(), speculate=False)
    save(left, tmp_path / "plan.json")
    run = forked(WORLD_SIZE, command_line(hetero_plan=str(tmp_path / "plan.json"), use_distributed_optimizer=""))
    assert_same_training(log_lines(run), log_lines(uniform_run("1f1b")))
    assert "updated on hosts: replica 0: stage 0 from" in run.stdout
    table = run.stdout[run.stdout.index("Memory of one rank, MiB, measured | predicted") :]
    (header, *rows) = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    assert header[-1] == "on the host"
    measured, predicted = (float(each) for each in rows[0][-1].split("|"))
    assert measured == pytest.approx(predicted, rel=0.2, abs=0.05)
    assert measured > 0


def test_hosts_update_what_megatrons_flags_leave_to_them() -> None:
    shape = {"micro_batch_size": "1", "pipeline_model_parallel_size": "2", "use_distributed_optimizer": ""}
    offload = {"optimizer_cpu_offload": "", "optimizer_offload_fraction": "0.5", "overlap_cpu_optimizer_d2h_h2d": ""}
    run = forked(2, command_line(**shape, **offload))
    assert_same_training(log_lines(run), log_lines(uniform_run("1f1b")))
    assert re.search(r"updated on hosts: replica 0: stage 0 from .*; stage 1 from", run.stdout)
    assert "--overlap-cpu-optimizer-d2h-h2d" in run.stdout, "it has no effect, which is told"


def test_activations_wait_on_hosts_as_megatrons_flag_says() -> None:
    run = forked(1, command_line(micro_batch_size="1", cpu_offloading_num_layers="1"))
    assert_same_training(log_lines(run), log_lines(uniform_run("1f1b")))
    assert "activations on hosts: replica 0: stage 0 through layer 0" in run.stdout


def assert_events_say(lines: list[re.Match[str]], folder: Path) -> None:
    """One file, from one rank, with the numbers of the log."""
    assert len(list(folder.iterdir())) == 1
    events = EventAccumulator(str(folder)).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert scalars.keys() == {
        "lm loss",
        "grad-norm",
        "learning-rate",
        "samples-per-second",
        "tokens-per-second",
        "iteration-time",
        "skipped-iterations",
        "throughput/cpu",
    }
    for tag, field, tolerance in (
        ("lm loss", "loss", 1e-6),
        ("grad-norm", "norm", 1e-4),
        ("learning-rate", "lr", 1e-5),
    ):
        assert [event.step for event in scalars[tag]] == [1, 2, 3]
        assert [event.value for event in scalars[tag]] == pytest.approx(
            [float(line[field]) for line in lines], abs=tolerance
        )


def assert_same_training(ours: list[re.Match[str]], theirs: list[re.Match[str]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert float(mine["loss"]) == pytest.approx(float(other["loss"]), abs=1e-4)
        assert float(mine["norm"]) == pytest.approx(float(other["norm"]), rel=1e-3)


@pytest.mark.rotates(every=2, turn=0)
def test_planning_at_start(tmp_path: Path) -> None:
    """With a cluster file rank 0 plans; the plan is written down, and trains what the uniform one does."""
    save(profile(MODEL, device="cpu"), tmp_path / "cpu.json")
    (tmp_path / "cluster.yaml").write_text(
        "node_types:\n"
        "  - {name: box, device: cpu, gpus_per_node: 1, count: 2, memory_gib: 4,\n"
        "     inside_node: {bandwidth_gb_per_s: 1, latency_us: 10}}\n"
        "links: {between_nodes: {bandwidth_gb_per_s: 1, latency_us: 10}}\n"
    )
    argv = command_line(
        hetero_cluster=str(tmp_path / "cluster.yaml"),
        hetero_plan="auto",
        hetero_profile=str(tmp_path / "cpu.json"),
        hetero_plan_out=str(tmp_path / "plan.json"),
    )
    run = forked(2, argv)
    assert_same_training(log_lines(run), log_lines(uniform_run("1f1b")))
    chosen = load(Plan, tmp_path / "plan.json")
    assert sorted(chosen.ranks()) == [0, 1]
    assert chosen.provenance is not None
    assert chosen.provenance.cluster == load(ClusterSpec, tmp_path / "cluster.yaml")
    assert "pretrain_gpt.py" in chosen.provenance.command
    assert run.stdout.count("predicted: ") == 1, "one rank plans"
    assert run.stdout.index("predicted: ") < run.stdout.index("step 1/3")


@pytest.mark.rotates(every=2, turn=0)
def test_gpipe_trains_like_1f1b() -> None:
    """Without a plan, Megatron's flags give two stages; the schedule changes how much is kept, not what is learnt."""
    one_f_one_b, gpipe = uniform_run("1f1b"), uniform_run("gpipe")
    assert_same_training(log_lines(one_f_one_b), log_lines(gpipe))
    assert in_flight_column(one_f_one_b) == ["2", "1"]
    assert in_flight_column(gpipe) == ["6", "6"]


@pytest.mark.rotates(every=2, turn=1)
def test_interleaved_stages_train_like_plain_ones() -> None:
    """Megatron's flag deals each rank two stages."""
    interleaved = forked(
        2,
        command_line(micro_batch_size="1", pipeline_model_parallel_size="2", num_virtual_stages_per_pipeline_rank="2"),
    )
    assert_same_training(log_lines(interleaved), log_lines(uniform_run("1f1b")))
    assert in_flight_column(interleaved) == ["3", "2", "2", "1"]


def in_flight_column(run: Finished) -> list[str]:
    """The column of the plan table that the run prints first."""
    rows = [[cell.strip() for cell in line.split("│")] for line in run.stdout.splitlines() if "│" in line]
    header = next(row for row in rows if "flight" in row)
    cells = [row[header.index("flight")] for row in rows if len(row) == len(header)]
    return [cell for cell in cells if cell.isdigit()]


@pytest.mark.rotates("saves")
@pytest.mark.parametrize("in_background", [True, False])
def test_a_loss_that_is_no_number_ends_the_run(in_background: bool, tmp_path: Path) -> None:
    """On all ranks, with one message and exit code 2. What was saved before stays, also what was being written."""
    run = forked(2, diverging(tmp_path, **({"async_save": ""} if in_background else {})))
    assert run.returncode == 2
    (said,) = [line for line in run.stderr.splitlines() if line.startswith("hetero: ")]
    assert re.match(
        r"hetero: step 2: the loss on rank 1 and the gradient on ranks 0-1 are not finite, and training stopped before "
        r"it could be saved; go on from the last checkpoint with a lower --lr",
        said,
    ), said
    assert published_steps(tmp_path / "out") == [1]


@pytest.mark.rotates("readers")
@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_ids_that_the_tokenizer_lacks_end_the_run(num_workers: str, tmp_path: Path) -> None:
    """Rank 1 alone reads one, in step 2: both end with one message and exit code 2, and step 1 is not lost."""
    corpus = corpus_of_late_tokens(tmp_path / "corpus")
    flags = {"micro_batch_size": "1", "data_path": corpus, "split": "1", "seed": "12", "num_workers": num_workers}
    run = forked(2, without_mock_data(command_line(**flags, save=str(tmp_path / "out"))))
    assert run.returncode == 2
    (said,) = [line for line in run.stderr.splitlines() if line.startswith("hetero: ")]
    assert said == (
        f"hetero: on rank 1: sample 10: {corpus}: token id 61 in sequence 716 at position 92, NullTokenizer has ids "
        "from 0 to 60: raise --vocab-size, or preprocess the text again"
    )
    assert "Traceback" not in run.stderr
    assert published_steps(tmp_path / "out") == [1]


def test_ids_that_the_tokenizer_lacks_end_an_evaluation(tmp_path: Path) -> None:
    """All end with its place named, by themselves or by the failure detector, and the step before was saved."""
    corpus = corpus_of_late_tokens(tmp_path / "corpus")
    good = corpus_of_late_tokens(tmp_path / "good", token=0)
    flags = {"micro_batch_size": "1", "train_data_path": good, "valid_data_path": corpus, "seed": "10"}
    flags |= {"eval_iters": "1", "eval_interval": "1", "save": str(tmp_path / "out"), "save_interval": "1"}
    run = forked(2, without_mock_data(command_line(**flags)))
    assert run.returncode in (2, 3)
    assert f"{corpus}: token id 61 in sequence " in run.stderr
    assert "Traceback" not in run.stderr
    assert published_steps(tmp_path / "out") == [1]


def without_mock_data(argv: list[str]) -> list[str]:
    return [word for word in argv if word != "--mock-data"]


def test_steps_without_a_loss_are_skipped_where_that_is_asked_for(tmp_path: Path) -> None:
    run = forked(2, [*diverging(tmp_path), "--no-check-for-nan-in-loss-and-grad"])
    assert run.returncode == 0, run.stderr
    assert "| skipped 2" in run.stdout
    assert published_steps(tmp_path / "out") == [1, 2, 3]


def diverging(folder: Path, **changes: str) -> list[str]:
    """The first update throws the weights so far out that no loss can be computed with them."""
    flags = {"micro_batch_size": "1", "pipeline_model_parallel_size": "2", "lr": "1e38"} | changes
    return command_line(**flags, save=str(folder / "out"), save_interval="1")


@pytest.mark.rotates(every=6, turn=4)
def test_an_export_ends_a_text_as_the_documents_of_training_end(tmp_path: Path) -> None:
    """Without the tokenizer: the checkpoint knows."""
    argv = command_line(
        micro_batch_size="1",
        pipeline_model_parallel_size="2",
        tokenizer_type="ByteLevelTokenizer",
        vocab_size="257",
        save=str(tmp_path / "out"),
    )
    run = forked(2, argv)
    assert run.returncode == 0, run.stderr
    assert (
        convert(["--from", "hetero", "--to", "hf", "--input", str(tmp_path / "out"), "--output", str(tmp_path / "hf")])
        == 0
    )
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] == 256


SLOW_SAVES = """
import sys, time
import pretrain_gpt
from hetero.runtime import cpu_backend
cpu_backend.install()
from megatron.pretrain.checkpointing import Saver
Saver.after = lambda *_, **__: time.sleep(2)
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""


@pytest.mark.rotates(every=6, turn=3)
def test_saves_are_no_steps(tmp_path: Path) -> None:
    """A save takes two seconds here, so that a step with one in it would take more; a step takes some milliseconds."""
    done = subprocess.run(
        [sys.executable, "-c", SLOW_SAVES, *command_line(micro_batch_size="1")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = log_lines(Finished(done.returncode, done.stdout, done.stderr))
    assert max(float(line["ms"]) for line in lines[1:]) < 2000


def test_an_auxiliary_loss_that_depends_on_the_plan_is_said(tmp_path: Path) -> None:
    """At the start, and where a run goes on with other microbatches."""
    flags = {**MOE_FLAGS, "save": str(tmp_path), "load": str(tmp_path)}

    def lines(steps: int, size: int, loss: str) -> list[str]:
        argv = command_line(
            **{**flags, "moe_router_load_balancing_type": loss}, micro_batch_size=str(size), train_iters=str(steps)
        )
        run = forked(1, argv)
        assert run.returncode == 0, run.stderr
        return [line for line in run.stdout.splitlines() if line.removeprefix("note: ").startswith("auxiliary loss: ")]

    (starts,) = lines(1, 1, "aux_loss")
    assert starts.endswith("--moe-router-load-balancing-type seq_aux_loss depends on no plan")
    starts, goes_on = lines(2, 2, "aux_loss")
    assert "here microbatches of 2 samples; " in starts
    assert "had microbatches of 1 sample and goes on with microbatches of 2 samples" in goes_on
    assert lines(3, 1, "seq_aux_loss") == []


def test_training_and_preprocessing_end_documents_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the token that the files of the tokenizer name, and not by another one of a usual name."""
    write_word_level(tmp_path, special=["<pad>", "<eos>", "<unk>"], words=["</s>", "to", "be"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (tmp_path / "part-00000").write_text('{"text": "to be </s> to be"}\n' * 50)
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    files = ["--input", str(tmp_path / "part-00000"), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert preprocess_data.main([*files, *tokenizer, "--append-eod"]) == 0
    ends = "'<eos>' (id 1), the eos_token of tokenizer_config.json\n"
    assert f"end of document: {ends}" in capsys.readouterr().out
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert dataset[0].tolist() == [4, 5, 3, 4, 5, 1]
    flags = command_line(micro_batch_size="2", tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    flags = [*(word for word in flags if word != "--mock-data"), "--data-path", str(tmp_path / "out_text_document")]
    run = forked(1, [*flags, "--split", "1", "--eod-mask-loss", "--tokenizer-hf-no-include-special-tokens"])
    assert run.returncode == 0, run.stderr
    assert f"--eod-mask-loss leaves out the end of a document: {ends}" in run.stdout
