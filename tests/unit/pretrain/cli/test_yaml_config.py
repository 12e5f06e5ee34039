"""``--yaml-cfg``: a file of settings says what its flags say."""

from pathlib import Path

import pytest

from hetero.errors import ConfigError
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.config import PretrainConfig
from tests.helpers.flags import command, parse

SETTINGS = """
language_model:
  num_layers: 6
  layernorm_epsilon: 1.e-6
  layernorm_zero_centered_gamma: True
  add_bias_linear: False
  gated_linear_unit: False
  activation_func: swiglu
  num_moe_experts: null
  bias_dropout_fusion: True
  masked_softmax_fusion: False
  apply_rope_fusion: False
  fp8_margin: 0
  moe_router_topk: 2
model_parallel:
  pipeline_model_parallel_size: 2
  bf16: True
  fp16: False
  batch_p2p_comm: True
  timers: null
  async_tensor_model_parallel_allreduce: True
position_embedding_type: rope
add_position_embedding: False
overlap_grad_reduce: False
check_for_nan_in_loss_and_grad: True
initial_loss_scale: 4294967296
lr_warmup_iters: 0
train_samples: 803
save_interval: 20000
wandb_project: ''
data_path: [0.3, a, 0.7, b]
split: '99,1,0'
seed: 7
"""


def with_file(path: Path, text: str, *flags: str, without: str = "") -> PretrainConfig:
    path.write_text(text)
    return parse_args(command(f"--yaml-cfg {path}", *flags, without=without))


def test_a_file_says_what_its_flags_say(tmp_path: Path) -> None:
    """But for what has no effect: a file states it all the same."""
    without = "--num-layers --train-iters --mock-data"
    found = with_file(tmp_path / "run.yaml", SETTINGS, "--seed 8", without=without)
    flags = (
        "--num-layers 6 --norm-epsilon 1e-6 --apply-layernorm-1p --disable-bias-linear --swiglu --no-rope-fusion "
        "--no-masked-softmax-fusion --pipeline-model-parallel-size 2 --bf16 --position-embedding-type rope "
        "--no-position-embedding --no-overlap-grad-reduce --train-samples 803 --data-path 0.3 a 0.7 b "
        "--split 99,1,0 --seed 8"
    )
    expected = parse(flags, without=without)
    for part in ("model", "stage", "data", "parallel", "optimizer", "loss_scale"):
        assert getattr(found, part) == getattr(expected, part)
    assert (found.run.train_samples, found.run.seed) == (803, 8), "the command line counts"
    assert set(found.notes) == {*expected.notes, ("--save-interval", "it needs --save")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- num_layers", "no configuration, which is a mapping of settings"),
        ("a: [", "not YAML"),
        ("num_layers: 4\nlanguage_model: {num_layers: 5}", "num_layers stands there twice"),
        ("training: {seed: 5}", "training: sections are language_model and model_parallel"),
        ("batch_p2p_comm: False", "batch_p2p_comm is False, must be True"),
        ("activation_func: tanh", "activation_func 'tanh' is not one of swiglu, gelu, relu, squaredrelu"),
        ("seed: x\nnum_layer: 4\nnum_heads: True\nfp8_margin: 1\nqk_clip: True", None),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str, message: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        with_file(tmp_path / "run.yaml", text)
    if message is not None:
        assert str(error.value).startswith(str(tmp_path / "run.yaml"))
        assert message in str(error.value)
        return
    assert [line.split(" (")[0].split(":")[0] for line in str(error.value).splitlines()] == [
        "--seed",
        "unknown flag --num-layer",
        "unknown flag --num-heads",
        "--fp8-margin is not supported",
        "--qk-clip is not supported",
    ]


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^no/where\.yaml: no such file"):
        parse("--yaml-cfg=no/where.yaml")
    with pytest.raises(ConfigError, match="--yaml-cfg: expected one argument"):
        parse("--yaml-cfg")
