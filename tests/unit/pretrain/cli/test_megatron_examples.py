"""Megatron-LM's own examples: which of their flags are accepted, and that one round of messages is enough."""

import pytest

from hetero.errors import ConfigError
from megatron.pretrain.cli.arguments import parse_args
from tests.helpers.megatron_examples import GPT3_175B, LLAMA3_8B_FP8, MIXTRAL_8X7B, with_values


@pytest.mark.parametrize(
    ("example", "refused", "num_without_effect"),
    [
        (GPT3_175B, ["--rampup-batch-size"], 0),
        (LLAMA3_8B_FP8, [], 13),
        (MIXTRAL_8X7B, ["--expert-model-parallel-size", "--no-load-optim"], 5),
    ],
    ids=["gpt3", "llama3", "mixtral"],
)
def test_one_round_of_messages_is_enough(example: str, refused: list[str], num_without_effect: int) -> None:
    """What is refused is told at once; without it, the rest is accepted as it stands there."""
    words = example.split()
    if refused:
        with pytest.raises(ConfigError) as error:
            parse_args(words)
        assert [line.split()[0].strip(":") for line in str(error.value).splitlines()] == refused
    if refused == ["--rampup-batch-size"]:
        # It stays, and what the message says takes the place of the lengths in steps.
        steps = {"--train-iters": None, "--lr-decay-iters": None}
        instead = str(error.value).partition("in place of steps give ")[2].split()
        config = parse_args([*with_values(words, steps), *instead, "--distributed-backend", "gloo"])
        assert (config.run.train_iters, str(config.parallel.rampup)) == (500_000, "16 16 5859375")
    config = parse_args([*with_values(words, dict.fromkeys(refused)), "--distributed-backend", "gloo"])
    assert len(config.notes) == num_without_effect
