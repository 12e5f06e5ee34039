"""The flags that a launch writes for a plan, read by the parser of the program that gets them."""

import dataclasses
from pathlib import Path

import pytest

from hetero.errors import PlanError
from hetero.launch.planned_flags import (
    LEFT_TO_THE_USER,
    STATED_BY_STAGES,
    launch_flags,
    missing_flags,
    planned_flags,
)
from hetero.plan.ir import Plan
from hetero.spec.model import ModelSpec, RotaryScaling
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.config import FLAGS
from megatron.pretrain.cli.fields import flag_reader
from megatron.pretrain.cli.model_config import ModelConfig, model_spec
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, stage

OWN = ["--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "2"]
PATH = Path("a plan.json")
LLAMA3 = RotaryScaling(
    kind="llama3", factor=32.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_position_embeddings=32
)

MODELS = [
    gpt2_model(),
    gpt2_model(activation="relu"),
    gpt2_model(vocab_size=257, padded_vocab_size=260, kv_channels=16, ffn_hidden_size=100, norm_epsilon=1e-6),
    gpt2_model(vocab_size=50257, padded_vocab_size=50304, qk_layernorm=True),
    gpt2_model(vocab_size=61, padded_vocab_size=61, linear_bias=False, qkv_bias=True, proj_bias=True),
    llama_model(rotary_base=500_000.0, rotary_percent=0.5, num_query_groups=2),
    llama_model(rotary_scaling=RotaryScaling(kind="linear", factor=2.5)),
    llama_model(rotary_scaling=LLAMA3, num_query_groups=8),
    moe_model(),
]


def plan_for(model: ModelSpec, **changes: object) -> Plan:
    made = plan(model, [replica(stage(layers=(0, 6), ranks=(0,)))])
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]  # fields of the plan, by name


@pytest.mark.parametrize("model", MODELS)
def test_the_program_reads_the_plans_model_out_of_its_flags(model: ModelSpec) -> None:
    config = parse_args(launch_flags(planned_flags(plan_for(model), PATH), OWN))
    assert model_spec(config.model, tokenizer_vocab_size=model.vocab_size) == model
    assert config.parallel.hetero_plan == PATH


def test_the_program_reads_everything_else_too() -> None:
    whole = plan_for(
        gpt2_model(), precision="bf16", distributed_optimizer=True, hidden_dropout=0.05, attention_dropout=0.0
    )
    config = parse_args(launch_flags(planned_flags(whole, PATH), [*OWN, "--overlap-param-gather"]))
    assert (config.data.seq_length, config.parallel.global_batch_size) == (whole.seq_length, whole.global_batch_size)
    assert (config.parallel.precision, config.parallel.use_distributed_optimizer) == ("bf16", True)
    assert (config.stage.hidden_dropout, config.stage.attention_dropout) == (0.05, 0.0)


@pytest.mark.parametrize("model", MODELS)
def test_whoever_repeats_what_the_plan_says_contradicts_nothing(model: ModelSpec) -> None:
    planned = planned_flags(plan_for(model), PATH)
    written = launch_flags(planned, [])
    assert launch_flags(planned, written) == written


@pytest.mark.parametrize("rows", [256, 257])
def test_a_vocabulary_without_padding_may_be_said_in_either_way(rows: int) -> None:
    unpadded = plan_for(gpt2_model(vocab_size=rows, padded_vocab_size=rows))
    written = launch_flags(planned_flags(unpadded, PATH), [*OWN, "--no-pad-vocab-size"])
    assert parse_args(written).model.make_vocab_size_divisible_by == 1


@pytest.mark.parametrize(
    ("given", "agrees"),
    [
        (["--make-vocab-size-divisible-by", "130"], True),
        (["--make-vocab-size-divisible-by", "128"], False),
        (["--no-pad-vocab-size"], False),
        (["--norm-epsilon", "0.00001"], True),
        (["--norm-epsilon=1e-6"], False),
        (["--group-query-attention", "--num-query-groups", "4"], True),
        (["--num-query-groups", "2", "--group-query-attention"], False),
        (["--position-embedding-type", "learned_absolute"], True),
        (["--use-rotary-position-embeddings"], False),
        (["--num-experts", "8"], False),
        (["--fp16"], False),
        (["--overlap-param-gather"], False),
        (["--hidden-dropout", "0.3"], True),
        (["--num-layers", "6", "--num-layers", "8"], False),
        (["--sequence-parallel"], False),
    ],
)
def test_a_flag_contradicts_the_plan_by_its_meaning(given: list[str], agrees: bool) -> None:
    """The plan leaves dropout to the launch; of a flag that is given twice the last value counts."""
    planned = planned_flags(plan_for(gpt2_model(vocab_size=257, padded_vocab_size=260)), PATH)
    if agrees:
        assert launch_flags(planned, given)[-len(given) :] == tuple(given)
        return
    with pytest.raises(PlanError, match="flags after -- contradict the plan"):
        launch_flags(planned, given)


def test_every_flag_that_a_plan_decides_is_listed_and_there() -> None:
    planned = {flag.name for model in MODELS for flag in planned_flags(plan_for(model), PATH)}
    known = {flag.name for flag in FLAGS}
    assert planned <= known
    assert {flag.name for flag in flag_reader(ModelConfig).flags} <= planned
    assert {flag.name for flag in FLAGS if flag.relations.stated_by_plan} == set(STATED_BY_STAGES)
    assert {flag.name for flag in FLAGS if flag.required} <= planned | set(LEFT_TO_THE_USER) <= known


def test_what_is_left_to_the_user_may_be_said_in_other_words() -> None:
    assert missing_flags([]) == LEFT_TO_THE_USER
    assert missing_flags(["--lr=1", "--train-samples", "8", "--train-data-path", "a"]) == ("--tokenizer-type",)
