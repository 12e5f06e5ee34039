"""Flags of Megatron-LM that are refused, each with what to do instead."""

import pytest

from hetero.errors import ConfigError
from megatron.training.cli.config import FLAGS
from megatron.training.cli.unsupported import _GROUPS, UNSUPPORTED_FLAGS
from tests.helpers.flags import parse


def test_no_flag_is_both_supported_and_unsupported() -> None:
    assert {name for flag in FLAGS for name in flag.names} & set(UNSUPPORTED_FLAGS) == set()


def test_each_is_listed_once() -> None:
    listed = [flag for _, flags in _GROUPS for flag in flags.split()]
    assert len(listed) == len(set(listed)) == len(UNSUPPORTED_FLAGS)
    assert all(flag.startswith("--") for flag in listed)


@pytest.mark.parametrize("form", ["{}", "{} 1", "{}=1"])
def test_each_is_refused_by_name_with_advice(form: str) -> None:
    for flag, advice in UNSUPPORTED_FLAGS.items():
        with pytest.raises(ConfigError) as error:
            parse(form.format(flag))
        assert str(error.value) == f"{flag} is not supported: {advice}"


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--no-save-optim", "checkpoints have one format here"),
        ("--exit-signal-handler", "SIGTERM saves and leaves"),
        ("--accumulate-allreduce-grads-in-fp32", "gradients are summed and weights updated in fp32"),
        ("--fp8-param-gather", "weights stay in bf16 under --fp8-format"),
        ("--main-params-dtype", "--use-distributed-optimizer"),
        ("--use-torch-fsdp2", "--hetero-plan"),
        ("--microbatch-group-size-per-virtual-pipeline-stage", "as many microbatches as there are pipeline ranks"),
        ("--virtual-pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"),
        ("--decoder-first-pipeline-num-layers", "--hetero-plan"),
        ("--pipeline-model-parallel-layout", "--hetero-plan"),
        ("--cp-comm-type", "context parallelism is not there yet"),
        ("--moe-token-dispatcher-type", "expert parallelism is not there yet"),
        ("--recompute-activations", "--recompute-granularity selective"),
        ("--rampup-batch-size", "--global-batch-size"),
        ("--full-validation", "--eval-iters"),
        ("--vocab-file", "--tokenizer-type HuggingFaceTokenizer"),
        ("--padded-vocab-size", "--vocab-size"),
        ("--warmup", "--lr-warmup-iters"),
        ("--batch-size", "--micro-batch-size"),
        ("--wandb-project", "--tensorboard-dir"),
        ("--use-flash-attn", "--transformer-impl"),
        ("--multi-latent-attention", "--group-query-attention"),
    ],
)
def test_advice(flag: str, advice: str) -> None:
    assert advice in UNSUPPORTED_FLAGS[flag]


def test_advice_names_supported_flags_only() -> None:
    supported = {name for flag in FLAGS for name in flag.names} | {"--help"}
    for flag, advice in UNSUPPORTED_FLAGS.items():
        named = {word.strip(",.;:()'") for word in advice.split() if word.strip("('").startswith("--")}
        assert named <= supported, flag


def test_all_wrong_names_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse("--fp4-format e2m1 --skip-train --hiden-size 4 --skip-train")
    lines = str(error.value).splitlines()
    assert [line.split()[0] for line in lines] == ["--fp4-format", "--skip-train", "unknown"]
