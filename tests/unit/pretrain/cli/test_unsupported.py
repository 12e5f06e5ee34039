"""Flags of Megatron-LM that are refused, each with what to do instead, or accepted without effect."""

import dataclasses

import pytest
from rich.console import Console
from torch.distributed.run import get_args_parser

from hetero.errors import ConfigError
from megatron.pretrain.cli import unsupported, without_effect
from megatron.pretrain.cli.config import FLAGS
from megatron.pretrain.cli.unsupported import UNSUPPORTED_FLAGS, asks_for_nothing, values_that_ask_for_nothing
from megatron.pretrain.cli.without_effect import WITHOUT_EFFECT
from megatron.pretrain.flag_notes import flag_notes
from tests.helpers.flags import parse


def test_each_is_listed_once_and_in_one_place() -> None:
    refused = [flag for _, flags in unsupported._GROUPS for flag in flags.split()]
    ignored = [flag.partition("=")[0] for _, flags in without_effect._GROUPS for flag in flags.split()]
    known = [*refused, *ignored, *(name for flag in FLAGS for name in flag.names)]
    assert len(known) == len(set(known))
    assert set(refused) == set(UNSUPPORTED_FLAGS)
    assert set(ignored) == {name for name, flag in WITHOUT_EFFECT.items() if flag.needs is None}
    assert all(flag.startswith("--") for flag in known)


@pytest.mark.parametrize("form", ["{}", "{} 7", "{}=7"])
def test_each_is_refused_by_name_with_advice(form: str) -> None:
    for flag, advice in UNSUPPORTED_FLAGS.items():
        with pytest.raises(ConfigError) as error:
            parse(form.format(flag))
        assert str(error.value) == f"{flag} is not supported: {advice}"


def test_a_value_that_asks_for_nothing_is_let_pass() -> None:
    """Megatron-LM's defaults and what switches off: scripts state them, and the log lists them."""
    without = parse()
    passed = [(name, value) for name in UNSUPPORTED_FLAGS for value in values_that_ask_for_nothing(name)]
    assert len(passed) == len(unsupported._ASKING_FOR_NOTHING), "each is a value of a refused flag"
    for name, value in passed:
        config = parse(f"{name} {value}")
        assert config.notes == ((name, "with this value it asks for nothing"),)
        assert dataclasses.replace(config, notes=()) == without


@pytest.mark.parametrize(
    "words",
    [
        *("--data-impl mmap", "--mtp-num-layers 0", "--moe-z-loss-coeff 0.0", "--moe-layer-freq 1", "--mask-prob .15"),
        *(
            "--adlr-autoresume-interval=1000",
            "--vocab-extra-ids 0",
            "--moe-input-jitter-eps 0e0",
            "--rerun-mode disabled",
        ),
    ],
)
def test_a_number_asks_for_nothing_however_it_is_written(words: str) -> None:
    assert [name for name, _ in parse(words).notes] == [words.replace("=", " ").split()[0]]


@pytest.mark.parametrize(
    "words",
    ["--data-impl lazy", "--mtp-num-layers 1", "--mtp-num-layers", "--mtp-num-layers 0 0", "--moe-layer-freq ([1]*4)"],
)
def test_another_value_is_refused(words: str) -> None:
    name, *values = words.split()
    assert not asks_for_nothing(name, values)
    with pytest.raises(ConfigError, match=f"^{name} is not supported"):
        parse(words)


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--no-save-optim", "checkpoints have one format here"),
        ("--exit-signal", "SIGTERM saves and leaves"),
        ("--fp32-residual-connection", "gradients are summed and weights updated in fp32"),
        ("--fp4-format", "weights stay in bf16 under --fp8-format"),
        ("--no-load-optim", "--finetune"),
        ("--main-params-dtype", "--use-distributed-optimizer"),
        ("--use-torch-fsdp2", "--hetero-plan"),
        ("--microbatch-group-size-per-virtual-pipeline-stage", "as many microbatches as there are pipeline ranks"),
        ("--virtual-pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"),
        ("--decoder-first-pipeline-num-layers", "--hetero-plan"),
        ("--pipeline-model-parallel-layout", "--hetero-plan"),
        ("--hybrid-context-parallel", "context parallelism is not there yet"),
        ("--expert-tensor-parallel-size", "expert parallelism is not there yet"),
        ("--recompute-activations", "--recompute-granularity selective"),
        ("--decrease-batch-size-if-needed", "which sizes they can"),
        ("--full-validation", "--eval-iters"),
        ("--vocab-extra-ids", "--tokenizer-type HuggingFaceTokenizer"),
        ("--padded-vocab-size", "--vocab-size"),
        ("--warmup", "--lr-warmup-iters"),
        ("--batch-size", "--micro-batch-size"),
        ("--deterministic-mode", "--transformer-impl"),
        ("--multi-latent-attention", "--group-query-attention"),
    ],
)
def test_advice(flag: str, advice: str) -> None:
    assert advice in UNSUPPORTED_FLAGS[flag]


def test_flags_of_flagscale_are_sent_to_a_plan_each_with_what_it_becomes_there() -> None:
    """As FlagScale's examples write them: two meshes, and layers of unlike stages."""
    with pytest.raises(ConfigError) as error:
        parse(
            "--enable-hetero --hetero-process-meshes 2 1 1 4 1 2 1 4 4 1 --hetero-pipeline-layer-split 20 12 "
            "--hetero-device-types A800 BI150 --hetero-current-device-type A800 --hetero-use-cpu-communication"
        )
    lines = str(error.value).splitlines()
    assert [line.split()[0] for line in lines] == [
        *("--enable-hetero", "--hetero-process-meshes", "--hetero-pipeline-layer-split", "--hetero-device-types"),
        *("--hetero-current-device-type", "--hetero-use-cpu-communication"),
    ]
    assert all("plan (docs/plan_format.md)" in line for line in lines[:5])
    assert "tp, cp, ep, dp and pp" in lines[1]
    assert "first_layer" in lines[2]


def test_every_flag_of_torchrun_is_sent_before_the_program() -> None:
    """By the parser of the torch that is installed."""
    torchruns = {
        name
        for action in get_args_parser()._actions
        for name in action.option_strings
        if name.startswith("--") and name != "--help"
    }
    assert {"--master-addr", "--node_rank"} < torchruns
    for flag in torchruns:
        with pytest.raises(ConfigError, match=f"^{flag} is not supported: it is a flag of torchrun and stands before"):
            parse(flag)


@pytest.mark.parametrize("flag", ["--learning-rate", "--deepspeed", "--save-every", "--zero-stage", "--lora-dim"])
def test_no_flag_is_suggested_that_resembles_it_by_chance(flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"{flag} 1")
    assert str(error.value) == f"unknown flag {flag}"


def test_advice_names_supported_flags_only() -> None:
    supported = {name for flag in FLAGS for name in flag.names} | {"--help"}
    reasons = {name: flag.reason for name, flag in WITHOUT_EFFECT.items()}
    for flag, advice in {**UNSUPPORTED_FLAGS, **reasons}.items():
        named = {word.strip(",.;:()'") for word in advice.split() if word.strip("('").startswith("--")}
        assert named <= supported, flag


def test_all_that_is_wrong_is_told_at_once_and_each_once() -> None:
    """Names, values, what is missing, what excludes one another, what has no effect, and what does not fit."""
    wrong = (
        "--fp4-format e2m1 --skip-train --hiden-size 4 --skip-train --seed x --swiglu 1 --lr 0.1 --min-lr 1 --min-lr 2 "
        "--bf16 --fp16 --finetune --num-attention-heads 5 --lr-decay-iters 9 --lr-warmup-iters 9 "
        "--no-position-embedding"
    )
    with pytest.raises(ConfigError) as error:
        parse(wrong, without="--mock-data --micro-batch-size")
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == [
        "--fp4-format is not supported",
        "--skip-train is not supported",
        "unknown flag --hiden-size (did you mean '--hidden-size'?)",
        "--seed",
        "--swiglu takes no value, found '1'",
        "required and missing",
        "--bf16 and --fp16 exclude each other",
        "--finetune has no effect without --load",
        "--no-position-embedding is not supported without --position-embedding-type rope",
        "--num-attention-heads 5 does not divide --hidden-size 48",
        "--min-lr 2.0 is above --lr 0.1",
        "the warmup of 9 steps does not end before the decay of the learning rate does, after 9",
    ]


@pytest.mark.parametrize(
    ("wrong", "without", "told"),
    [
        # Heads, warmup, batches and vocabulary cannot be judged.
        ("--hidden-size x --swiglu --train-iters y", "", ["--hidden-size", "--train-iters"]),
        ("--global-batch-size x --micro-batch-size 3", "", ["--global-batch-size"]),
        ("--lr-warmup-iters 200", "--lr --train-iters", ["required and missing"]),
        ("--load= --finetune", "", ["--load"]),
        ("--tokenizer-type x", "--vocab-size", ["--tokenizer-type"]),
    ],
)
def test_what_follows_from_a_flag_without_value_is_not_judged(wrong: str, without: str, told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(wrong, without=without)
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == told


def test_flags_without_effect_are_accepted_and_listed() -> None:
    for name, flag in WITHOUT_EFFECT.items():
        values = ["1", "2"][: 2 if flag.most_values > 1 else int(flag.most_values)]
        context = "--position-embedding-type rope" if flag.needs else ""
        assert parse(context, " ".join([name, *values])).notes == ((name, flag.reason),)
        if flag.most_values < 2:
            with pytest.raises(ConfigError, match=f"{name} takes no value|after the value of {name}"):
                parse(context, " ".join([name, *values, "3"]))


def test_one_warning_lists_them_with_the_reasons() -> None:
    config = parse(
        "--use-mcore-models --manual-gc --manual-gc-interval 3 --split 1 --train-samples 83", without="--train-iters"
    )
    console = Console(width=130)
    with console.capture() as capture:
        console.print(flag_notes(config))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines[0] == "warning: 4 flags have no effect here"
    assert [line.split()[0] for line in lines[2:]] == [
        *("--use-mcore-models", "--manual-gc", "--manual-gc-interval", "--split", "--train-samples")
    ]
    assert "garbage collection and allocator are left to Python" in lines[3]
    assert lines[-1].startswith("--train-samples 83 are 10 steps of 8; the last 3 fill no step and are left out")
    assert flag_notes(parse()) is None
