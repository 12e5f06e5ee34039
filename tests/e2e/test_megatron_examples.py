"""Megatron-LM's own examples train: their flags less those that a round of messages names, at a size for the CPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from tests.helpers.forked_launch import forked
from tests.helpers.megatron_examples import EXAMPLES, with_values
from tests.unit.pretrain.corpora import write_corpus

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

TINY = {
    "--hidden-size": "32",
    "--seq-length": "16",
    "--max-position-embeddings": "16",
    "--global-batch-size": "4",
    "--log-interval": "1",
    "--eval-interval": "2",
    "--eval-iters": "1",
}
STEPS = {"--train-iters": "2", "--lr-decay-iters": "2"}
TINY_LAYERS = {"--num-layers": "2", "--num-attention-heads": "4"}
GROUPED = {"--num-query-groups": "2", "--ffn-hidden-size": "64"}
OF_FP8 = ["--fp8-format", "--fp8-amax-history-len", "--fp8-amax-compute-algo"]


def folders(folder: Path, *names: str) -> dict[str, str]:
    """A path in ``folder`` for each flag that names one, and one for checkpoints."""
    checkpoints = str(folder / "checkpoints")
    return {"--save": checkpoints, "--load": checkpoints, **{f"--{name}": str(folder / name) for name in names}}


def corpus(folder: Path) -> str:
    return write_corpus(folder / "corpus", [[1 + (i + j) % 15 for j in range(30)] for i in range(60)])


def gpt2_files(folder: Path) -> None:
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*symbols, "th", "<|endoftext|>"])}
    (folder / "vocab-file").write_text(json.dumps(vocabulary))
    (folder / "merge-file").write_text("#version: 0.2\nt h\n")


def sentencepiece_model(folder: Path) -> None:
    with (folder / "tokenizer-model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["to be or not to be, that is the question " * 9] * 9),
            model_writer=file,
            vocab_size=60,
            hard_vocab_limit=False,
            minloglevel=2,
        )


def gpt3(folder: Path) -> list[str]:
    gpt2_files(folder)
    files = folders(folder, "tensorboard-dir", "vocab-file", "merge-file")
    parallel = {"--tensor-model-parallel-size": "1", "--pipeline-model-parallel-size": "2"}
    # A step of 2 samples, and one of 4.
    rampup = {"--rampup-batch-size": "2 2 2", "--train-iters": None, "--lr-decay-iters": None}
    changes = {**TINY, **TINY_LAYERS, **files, **parallel, **rampup, "--data-path": corpus(folder)}
    return [*with_values(EXAMPLES["gpt3"].words, changes), "--train-samples", "6"]


def llama3(folder: Path) -> list[str]:
    files = folders(folder, "tensorboard-dir", "data-cache-path")
    samples = {"--train-samples": "11", "--lr-decay-samples": "10", "--lr-warmup-samples": "3"}
    changes = {"--kv-channels": "8", "--vocab-size": "100", "--save-interval": "2"}
    return with_values(EXAMPLES["llama3"].words, {**TINY, **TINY_LAYERS, **GROUPED, **files, **samples, **changes})


def mixtral(folder: Path) -> list[str]:
    sentencepiece_model(folder)
    files = folders(folder, "tensorboard-dir", "tokenizer-model")
    parallel = {"--pipeline-model-parallel-size": "2", "--expert-model-parallel-size": "2"}
    # Of sixty documents, 8 in 100,000 are none.
    warmup = {"--lr-warmup-iters": "1", "--split": "90,8,2"}
    words = with_values(
        EXAMPLES["mixtral"].words,
        {**TINY, **TINY_LAYERS, **GROUPED, **STEPS, **files, **parallel, **warmup, "--data-path": corpus(folder)},
    )
    return [*words, "--wandb-save-dir", str(folder)]


@pytest.mark.rotates("examples")
@pytest.mark.parametrize(
    ("example", "refused", "said"),
    [
        (gpt3, [], []),
        (
            llama3,
            OF_FP8,
            ["warning: 13 flags have no effect here", "--train-samples 11 are 2 steps of 4; the last 3 fill no step"],
        ),
        (
            mixtral,
            ["--expert-model-parallel-size", "--no-load-optim"],
            ["warning: 5 flags have no effect here"],
        ),
    ],
    ids=["gpt3", "llama3", "mixtral"],
)
def test_an_example_trains_after_one_round_of_messages(
    example: Callable[[Path], list[str]], refused: list[str], said: list[str], tmp_path: Path
) -> None:
    """What cannot be here is told at once, and the rest trains."""
    words = example(tmp_path)
    if refused:
        told = forked(2, words)
        assert told.returncode == 2
        assert [flag for flag in refused if flag not in told.stderr] == []
    run = forked(2, with_values(words, dict.fromkeys(refused)), environment={"WANDB_MODE": "offline"})
    assert run.returncode == 0, run.stderr
    assert [
        line for line in run.stdout.splitlines() if line.startswith(("step 2/2 | loss ", "step 2/2 | batch 4 | loss "))
    ]
    assert [line for line in said if line not in run.stdout] == []
    assert any((tmp_path / "checkpoints").iterdir()), "the end of the run is saved"
