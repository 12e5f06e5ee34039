"""What is said of a run that goes on with other data or other flags than its checkpoint was saved with."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hetero.checkpoint.state import CheckpointState, RunSettings
from hetero.serialization import load, save
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.data import build_dataset
from megatron.pretrain.data_identity import describe_data
from megatron.pretrain.resume_notes import resume_notes, run_settings
from tests.helpers.checkpoints import plan_of, state_of
from tests.helpers.commands import command_line
from tests.unit.pretrain.corpora import EOD, byte_level, data_config, write_corpus

pytestmark = pytest.mark.slow

STEP, SAMPLES = 4, 30


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    """Two of 40 documents, 44 samples each."""
    return [
        write_corpus(tmp_path / name, [[i + shift] * 8 + [EOD] for i in range(40)])
        for name, shift in (("a", 0), ("b", 1))
    ]


def settings(*data_path: str, samples: int = SAMPLES, **data: Any) -> RunSettings:
    config = data_config(data_path=data_path, **{"split": "100, 0, 0", **data})
    dataset = build_dataset(config, byte_level(), split="train", num_samples=samples)
    parsed = parse_args(command_line(micro_batch_size="1"))
    return run_settings(dataclasses.replace(parsed, data=config), {"train": dataset})


def notes(before: RunSettings | None, now: RunSettings, *, length: int = SAMPLES) -> list[str]:
    state = dataclasses.replace(state_of(plan_of(), step=STEP), settings=before, train_samples=SAMPLES)
    return resume_notes(state, now, train_samples=length)


def test_nothing_is_said_of_the_same_run(corpora: list[str]) -> None:
    assert notes(settings(corpora[0]), settings(corpora[0])) == []
    blend = "0.3", corpora[0], "0.7", corpora[1]
    assert notes(settings(*blend), settings(*blend)) == []
    # The same shares, written otherwise.
    assert notes(settings(corpora[0], split="100, 0, 0"), settings(corpora[0], split="10,0,0")) == []


def test_other_data_is_said_once_with_both_paths(corpora: list[str], tmp_path: Path) -> None:
    (said,) = notes(settings(corpora[0]), settings(corpora[1]))
    assert said == (
        f"data: {corpora[0]} when step 4 was saved, {corpora[1]} now: from now on other tokens are trained on, in "
        "an order of their own"
    )
    (said,) = notes(settings(corpora[0]), settings(mock_data=True, split="969, 30, 1"))
    assert f"{corpora[0]} when step 4 was saved, made-up tokens (--mock-data) now" in said
    (said,) = notes(settings("0.3", corpora[0], "0.7", corpora[1]), settings("0.5", corpora[0], "0.5", corpora[1]))
    assert "0.5" in said
    assert "the same tokens in other shares" in said


def test_paths_of_a_strangers_checkpoint_are_shown_as_escapes(corpora: list[str]) -> None:
    before = settings(corpora[0])
    data = dataclasses.replace(before.data["train"], paths=("x\x1b[2J\ny",), content="another")
    (said,) = notes(dataclasses.replace(before, data={"train": data}), settings(corpora[0]))
    assert r"data: x\x1b[2J\ny when step 4 was saved" in said
    assert said.isprintable()


def test_data_that_was_written_again(corpora: list[str], tmp_path: Path) -> None:
    """Of the same sizes, so that the file sizes alone do not tell."""
    before = settings(corpora[0])
    for end in (".bin", ".idx"):
        shutil.copy(corpora[1] + end, corpora[0] + end)
    (said,) = notes(before, settings(corpora[0]))
    assert f"data: {corpora[0]} was written again since step 4 was saved" in said


def test_data_that_was_moved_is_the_same(corpora: list[str], tmp_path: Path) -> None:
    before, moved = settings(corpora[0]), str(tmp_path / "elsewhere")
    for end in (".bin", ".idx"):
        Path(corpora[0] + end).rename(moved + end)
    assert notes(before, settings(moved)) == [
        f"data: {corpora[0]} is {moved} now, with the same tokens in the same order"
    ]


def test_a_path_with_bytes_that_are_no_utf_8_can_be_read_again(corpora: list[str], tmp_path: Path) -> None:
    odd = str(tmp_path / "corpus \udcff")
    for end in (".bin", ".idx"):
        shutil.copy(corpora[0] + end, odd + end)
    saved = settings(odd)
    assert saved.data["train"].paths[0].endswith(r"corpus \udcff")
    save(saved, tmp_path / "settings.json")
    assert load(RunSettings, tmp_path / "settings.json") == saved


def test_another_split(corpora: list[str]) -> None:
    (said,) = notes(settings(corpora[0], split="90, 10, 0"), settings(corpora[0], split="80, 20, 0"))
    assert said.startswith("--split: 90, 10, 0 when step 4 was saved, 80, 20, 0 now: from now on samples are drawn")


@pytest.mark.parametrize(
    ("words", "most_samples", "changes"),
    [
        pytest.param(("{a}",), 180, True, id="one corpus"),
        pytest.param(("0.3", "{a}", "0.7", "{b}"), 180, True, id="a blend"),
        pytest.param(("{a}", "{b}"), 88, False, id="each corpus once"),
    ],
)
def test_the_digest_of_the_order_is_exact(
    words: tuple[str, ...], most_samples: int, changes: bool, corpora: list[str]
) -> None:
    """megatron-core shuffles by the number of epochs, and the last one by itself where little of it is needed."""
    config = data_config(data_path=tuple(word.format(a=corpora[0], b=corpora[1]) for word in words), split="100, 0, 0")
    orders: dict[str, set[tuple[Any, ...]]] = {}
    for samples in range(30, most_samples, 7):
        dataset = build_dataset(config, byte_level(), split="train", num_samples=samples)
        first = tuple(tuple(dataset[i]["tokens"].tolist()) for i in range(30))
        orders.setdefault(describe_data(config, dataset, split="train").order, set()).add(first)
    assert all(len(firsts) == 1 for firsts in orders.values()), "one digest, two orders"
    firsts = [first for each in orders.values() for first in each]
    assert len(set(firsts)) == len(firsts), "two digests of one order"
    assert (len(orders) > 1) == changes


def test_another_length_names_both(corpora: list[str]) -> None:
    before = settings(corpora[0])
    assert notes(before, settings(corpora[0], samples=40), length=40) == [], "one epoch as before"
    (said,) = notes(before, settings(corpora[0], samples=100), length=100)
    assert said.startswith("the run was laid out for 30 samples, now for 100: it goes through the data another number")


def test_a_checkpoint_that_does_not_say_its_settings(corpora: list[str], tmp_path: Path) -> None:
    now = settings(corpora[0])
    assert notes(None, now) == []
    (said,) = notes(None, now, length=100)
    assert (
        "the run was laid out for 30 samples, now for 100: if it goes through the data another number of times" in said
    )
    state = dataclasses.replace(state_of(plan_of(), step=STEP), settings=now)
    save(state, tmp_path / "state.json")
    assert load(CheckpointState, tmp_path / "state.json") == state
    written = json.loads((tmp_path / "state.json").read_text())
    del written["settings"]
    (tmp_path / "state.json").write_text(json.dumps(written))
    assert load(CheckpointState, tmp_path / "state.json") == dataclasses.replace(state, settings=None)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"lr": "1e-2"}, {"lr": "5e-3"}, ["--lr: 0.01 when step 4 was saved, 0.005 now, which counts from now on"]),
        ({}, {"adam_beta2": "0.95"}, ["--adam-beta2: 0.999 when step 4 was saved, 0.95 now"]),
        ({}, {"weight_decay": "0.1"}, ["--weight-decay: 0.01 when step 4 was saved, 0.1 now"]),
        ({}, {"min_lr": "1e-4"}, ["--min-lr: 0.0 when step 4 was saved, 0.0001 now"]),
        ({}, {"decoupled_lr": "1e-3"}, ["--decoupled-lr: not set when step 4 was saved, 0.001 now"]),
        ({}, {"lr_decay_style": "cosine"}, ["--lr-decay-style: linear when step 4 was saved, cosine now"]),
        ({}, {"lr_warmup_iters": "1"}, ["--lr-warmup-samples (or --lr-warmup-iters, --lr-warmup-fraction): 0 when"]),
        ({}, {"train_iters": "5"}, ["--lr-decay-samples (or --lr-decay-iters, else the whole run): 18 when"]),
        ({"lr_decay_iters": "3"}, {"lr_decay_iters": "3", "train_iters": "5"}, []),
        ({}, {"hidden_dropout": "0.1"}, ["--hidden-dropout: 0.0 when step 4 was saved, 0.1 now"]),
        ({}, {"lr": "5e-3", "clip_grad": "0.5"}, ["--clip-grad: 1.0 when", "--lr: 0.01 when"]),
    ],
)
def test_flags_that_decide_updates(before: dict[str, str], now: dict[str, str], said: list[str]) -> None:
    def of_flags(flags: dict[str, str]) -> RunSettings:
        return run_settings(parse_args(command_line(micro_batch_size="1", **flags)), {})

    found = notes(of_flags(before), of_flags(now))
    assert len(found) == len(said)
    for note, beginning in zip(found, said, strict=True):
        assert note.startswith(beginning)
