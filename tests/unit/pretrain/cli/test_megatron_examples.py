"""Megatron-LM's own examples: which of their flags are accepted, and that one round of messages is enough."""

import pytest

from megatron.pretrain.cli.arguments import parse_args
from tests.helpers.megatron_examples import EXAMPLES, with_values
from tests.helpers.megatron_parsers import VERSIONS, recorded_parser

REFUSED = {
    "gpt3": ["--rampup-batch-size"],
    "llama3": [],
    "mixtral": ["--expert-model-parallel-size", "--no-load-optim"],
    "gptoss": [
        *("--export-force-local-attention", "--quick-geglu", "--glu-linear-offset", "--softmax-type"),
        *("--window-attn-skip-freq", "--activation-func-clamp-value", "--window-size", "--enable-gpt-oss"),
        *("--moe-router-dtype", "--moe-z-loss-coeff", "--disable-bf16-reduced-precision-matmul"),
        *("--recompute-activations", "--no-load-optim"),
    ],
    "gpt3_345m": ["--deterministic-mode"],
}
WITHOUT_EFFECT = {"gpt3": 0, "llama3": 13, "mixtral": 5, "gptoss": 16, "gpt3_345m": 5}

ADDED_BY_MODELOPT = {"--export-force-local-attention", "--enable-gpt-oss"}
"""Flags that Megatron-LM's pretrain_gpt.py adds to the parser of the wheel where ModelOpt is installed."""


def test_all_are_looked_at() -> None:
    assert set(REFUSED) == set(WITHOUT_EFFECT) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_newest_megatron_lm_has_their_flags(name: str) -> None:
    """They are scripts for today's Megatron-LM."""
    assert set(EXAMPLES[name].names) - ADDED_BY_MODELOPT <= set(recorded_parser(VERSIONS[-1]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_round_of_messages_is_enough(name: str) -> None:
    """All flags that are refused are named in one error; without them, the rest is accepted as it is there."""
    words, messages, refused = EXAMPLES[name].words, EXAMPLES[name].messages(), REFUSED[name]
    assert [line.split()[0].strip(":") for line in messages] == refused
    if refused == ["--rampup-batch-size"]:
        # It stays, and what the message says takes the place of the lengths in steps.
        steps = {"--train-iters": None, "--lr-decay-iters": None}
        instead = messages[0].partition("in place of steps give ")[2].split()
        config = parse_args([*with_values(words, steps), *instead, "--distributed-backend", "gloo"])
        assert (config.run.train_iters, str(config.parallel.varying_batch)) == (500_000, "16 16 5859375")
    config = parse_args([*with_values(words, dict.fromkeys(refused)), "--distributed-backend", "gloo"])
    assert len(config.notes) == WITHOUT_EFFECT[name]
