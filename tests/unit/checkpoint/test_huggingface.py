"""Tiny random models of ``transformers`` go in and come out the same, through every format."""

# Classes of transformers in annotations would load it, which takes seconds, where tests are only collected.
from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hetero.checkpoint.interchange.convert import Conversion, convert, open_source
from hetero.checkpoint.interchange.families import config_of, join, model_types, rows, split
from hetero.checkpoint.interchange.huggingface import HuggingFaceSource, write_hugging_face
from hetero.checkpoint.interchange.native import NativeSource, write_native
from hetero.checkpoint.interchange.torch_dist import write_torch_dist
from hetero.checkpoint.reader import load_checkpoint
from hetero.checkpoint.state import CheckpointState
from hetero.errors import CheckpointError, ConfigError
from hetero.spec.model import ModelSpec
from hetero.spec.model_import import from_hugging_face
from hetero.spec.parameters import Parameter, parameters
from tests.helpers.checkpoints import MODEL, full_tensor, make_slices, plan_of, save_alone
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.transformers_models import LLAMA3
from tools.convert_checkpoint import main

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.25, "factor": 4.0}
MOE = {"num_local_experts": 3, "num_experts_per_tok": 2}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-attention-biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True),
    "llama-linear": lambda: transformers.LlamaConfig(**{**SIZES, "rope_parameters": LINEAR}),
    "mistral-llama3": lambda: transformers.MistralConfig(**{**SIZES, "rope_parameters": LLAMA3}, sliding_window=None),
    "qwen3-attention-biases": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **MOE),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt2-relu": lambda: transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, activation_function="relu"
    ),
    "gpt2-untied": lambda: transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=False
    ),
}
TOKENS_BS = torch.arange(24).reshape(2, 12) * 7 % 61


def random_model(family: str, *, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Every parameter random, the norms and biases too."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model.to(dtype)


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS_BS).logits


def run(source_format: str, source: Path, target_format: str, target: Path, **options: object) -> None:
    convert(
        Conversion(source_format=source_format, source=source, target_format=target_format, target=target, **options)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_out_comes_what_went_in(tmp_path: Path, family: str) -> None:
    """Hugging Face, sharded, to ours, to megatron-core's, to ours, to Hugging Face."""
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    run("hf", tmp_path / "in", "hetero", tmp_path / "ours", divisible_by=8)
    run("hetero", tmp_path / "ours", "megatron", tmp_path / "mcore")
    model_file = tmp_path / "in" / "config.json"
    run("megatron", tmp_path / "mcore", "hetero", tmp_path / "again", model=model_file, divisible_by=8)
    run("hetero", tmp_path / "again", "hf", tmp_path / "out", max_shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1

    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert back.dtype == torch.float32
    assert torch.equal(logits(back), logits(theirs))
    expected = theirs.state_dict()
    assert back.state_dict().keys() == expected.keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_mistral_stays_mistral_if_asked(tmp_path: Path) -> None:
    """Without a window it is Llama, which is the likelier."""
    theirs = random_model("mistral")
    theirs.save_pretrained(tmp_path / "in")
    for model_type in (None, "mistral"):
        out = tmp_path / str(model_type)
        run("hf", tmp_path / "in", "hf", out, model_type=model_type)
        back = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert back.config.model_type == (model_type or "llama")
        assert torch.equal(logits(back), logits(theirs))
    with pytest.raises(CheckpointError, match="is no qwen2; it can be written as llama or mistral"):
        run("hf", tmp_path / "in", "hf", tmp_path / "other", model_type="qwen2")


def test_the_vocabulary_is_padded_with_zeros(tmp_path: Path) -> None:
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path / "in")
    run("hf", tmp_path / "in", "hetero", tmp_path / "ours", divisible_by=64)
    source = NativeSource(tmp_path / "ours", step=None)
    assert source.model.padded_vocab_size == 64
    for parameter in parameters(source.model):
        if parameter.name.startswith(("embedding", "output_layer")):
            rows_VH = source.tensor(parameter, torch.float32)
            assert rows_VH.shape == (64, 32)
            assert not rows_VH[61:].any()
            assert rows_VH[:61].any(dim=1).all()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_precision_stays_unless_another_is_asked_for(tmp_path: Path, stored: torch.dtype) -> None:
    theirs = random_model("qwen2", dtype=stored)
    theirs.save_pretrained(tmp_path / "in")
    run("hf", tmp_path / "in", "hetero", tmp_path / "ours")
    run("hetero", tmp_path / "ours", "hf", tmp_path / "out")
    run("hetero", tmp_path / "ours", "hf", tmp_path / "float32", dtype=torch.float32)
    expected = load_file(tmp_path / "in" / "model.safetensors")
    for folder, dtype in (("out", stored), ("float32", torch.float32)):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected[name].to(dtype)), name
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_one_wider_tensor_loses_nothing(tmp_path: Path) -> None:
    random_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.rand(32)
    save_file(tensors, path)
    assert HuggingFaceSource(tmp_path, divisible_by=1).dtype == torch.float32


def test_names_without_the_models_own(tmp_path: Path) -> None:
    """As the published GPT-2 has them, with its constant masks."""
    theirs = random_model("gpt2")
    theirs.save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    save_file(tensors, path)
    run("hf", tmp_path / "in", "hf", tmp_path / "out")
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(theirs))


class TestRefused:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        random_model("llama").save_pretrained(tmp_path / "in")
        return tmp_path / "in"

    def open(self, folder: Path) -> HuggingFaceSource:
        return HuggingFaceSource(folder, divisible_by=64)

    def change(self, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    def test_a_missing_tensor(self, folder: Path) -> None:
        self.change(folder, lambda tensors: tensors.pop("model.norm.weight"))
        with pytest.raises(CheckpointError, match=r"tensor model.norm.weight is missing"):
            self.open(folder)

    def test_a_tensor_that_would_be_lost(self, folder: Path) -> None:
        name = "model.layers.0.self_attn.o_proj.bias"
        self.change(folder, lambda tensors: tensors.update({name: torch.ones(32)}))
        with pytest.raises(CheckpointError, match=f"tensor {name} is no part of the model"):
            self.open(folder)

    def test_another_shape(self, folder: Path) -> None:
        self.change(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(60, 32)}))
        with pytest.raises(
            CheckpointError, match=r"lm_head.weight has shape \[60, 32\], config.json makes it \[61, 32\]"
        ):
            self.open(folder)

    def test_integers(self, folder: Path) -> None:
        self.change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
        with pytest.raises(CheckpointError, match=r"model.norm.weight is I8"):
            self.open(folder)

    def test_pickled_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="only safetensors are read"):
            self.open(folder)

    def test_a_damaged_file(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"\xff" * 100)
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            self.open(folder)

    @pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3])
    def test_an_index_that_leaves_the_folder(self, folder: Path, file: object) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(CheckpointError, match="is not a file of this folder"):
            self.open(folder)

    def test_an_index_that_lies(self, folder: Path) -> None:
        index = {"weight_map": {"model.norm.bias": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"model.norm.bias is missing; .* says that it is here"):
            self.open(folder)

    def test_a_folder_without_configuration(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        with pytest.raises(ConfigError, match="no such file"):
            self.open(folder)

    def test_an_output_that_exists(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match="exists already"):
            run("hf", folder, "hf", folder)
        run("hf", folder, "hetero", folder.parent / "ours")
        with pytest.raises(CheckpointError, match="has checkpoints already"):
            run("hf", folder, "hetero", folder.parent / "ours")

    def test_a_model_that_no_family_computes(self) -> None:
        odd = gpt2_model(normalization="RMSNorm")
        with pytest.raises(CheckpointError, match="not gpt2: normalization RMSNorm"):
            model_types(odd)

    def test_one_expert_per_token_as_mixtral(self) -> None:
        """Whose router would weigh it with 1."""
        with pytest.raises(CheckpointError, match="not mixtral: moe_router_topk 1"):
            model_types(moe_model(moe_router_topk=1))

    def test_a_bias_of_attentions_output_alone(self) -> None:
        with pytest.raises(CheckpointError, match=r"not llama: proj_bias True.*not qwen3: .*proj_bias True"):
            model_types(llama_model(proj_bias=True))

    def test_opt(self, tmp_path: Path) -> None:
        config = transformers.OPTConfig(activation_function="gelu_new")
        config.save_pretrained(tmp_path / "opt")
        with pytest.raises(ConfigError, match="model_type opt is known for plans alone; weights of llama, "):
            self.open(tmp_path / "opt")

    def test_a_megatron_checkpoint_without_its_model(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match="give --model"):
            run("megatron", folder, "hf", folder.parent / "out")


@pytest.mark.parametrize(
    "model",
    [
        gpt2_model(),
        gpt2_model(tied_embeddings=False),
        llama_model(num_query_groups=2),
        llama_model(qkv_bias=True),
        llama_model(qkv_bias=True, proj_bias=True),
        moe_model(),
    ],
)
def test_the_map_is_one_to_one(model: ModelSpec) -> None:
    """Every parameter has its row, and what one side takes apart the other puts together."""
    by_name = {parameter.name: parameter for parameter in parameters(model)}
    table = rows(model)
    assert sorted(row.ours for row in table) == sorted(by_name)
    theirs = [name for row in table for name in row.theirs]
    assert len(theirs) == len(set(theirs))
    for row in table:
        ours = torch.rand(by_name[row.ours].shape)
        if row.layout == "vocabulary":
            ours[model.vocab_size :] = 0
        assert torch.equal(join(model, row.layout, split(model, row.layout, ours)), ours), row


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations_describe_the_same_model_to_old_and_new_transformers(family: str) -> None:
    config = FAMILIES[family]()
    model = from_hugging_face(config.to_dict(), source="in")
    for model_type in model_types(model):
        written = config_of(model, model_type, torch.float32)
        assert from_hugging_face(written, source="out") == model
        read = transformers.AutoConfig.for_model(**written)
        assert from_hugging_face(read.to_dict(), source="theirs") == model
        before_5 = {key: value for key, value in written.items() if key != "rope_parameters"}
        assert from_hugging_face(before_5, source="old") == model
        since_5 = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
        assert from_hugging_face(since_5, source="new") == model


class CountingSource:
    """Random weights that count how many of their bytes are alive at a time."""

    step = 0
    dtype = torch.float32

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self.alive_bytes = self.most_bytes = 0

    def tensor(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.rand(parameter.shape, dtype=dtype)
        self.alive_bytes += tensor.nbytes
        self.most_bytes = max(self.most_bytes, self.alive_bytes)
        weakref.finalize(tensor.untyped_storage(), self.release, tensor.nbytes)
        return tensor

    def release(self, num_bytes: int) -> None:
        self.alive_bytes -= num_bytes


@pytest.mark.parametrize("target_format", ["hf", "hetero", "megatron"])
def test_a_model_passes_that_does_not_fit_into_memory(tmp_path: Path, target_format: str) -> None:
    model = llama_model(num_layers=40)
    source = CountingSource(model)
    total_bytes = 4 * sum(parameter.numel for parameter in parameters(model))
    largest_bytes = 4 * max(parameter.numel for parameter in parameters(model))
    match target_format:
        case "hf":
            write_hugging_face(source, tmp_path / "a", dtype=source.dtype, model_type=None, max_shard_bytes=100_000)
        case "hetero":
            write_native(source, tmp_path / "a", dtype=source.dtype, max_shard_bytes=100_000)
        case "megatron":
            write_torch_dist(source, tmp_path / "a", dtype=source.dtype)
    limit_bytes = 4 * largest_bytes if target_format == "megatron" else 100_000 + 2 * largest_bytes
    assert limit_bytes < total_bytes / 8
    assert largest_bytes <= source.most_bytes <= limit_bytes


@pytest.mark.slow
def test_a_converted_checkpoint_starts_a_run(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "in")
    run("hf", tmp_path / "in", "hetero", tmp_path / "ours", divisible_by=64)
    source = open_source(
        Conversion(source_format="hf", source=tmp_path / "in", target_format="hf", target=tmp_path, divisible_by=64)
    ).weights
    plan = plan_of(source.model)
    slices = make_slices(step=None, model=source.model, cut=3)
    with pytest.raises(CheckpointError, match="holds weights only"):
        load_checkpoint(tmp_path / "ours", step=None, slices=slices, plan=plan, rank=0)
    load_checkpoint(tmp_path / "ours", step=None, slices=slices, plan=plan, rank=0, only_weights=True)
    by_name = {parameter.name: parameter for parameter in parameters(source.model)}
    for box in slices:
        kind, _, name = box.name.partition("/")
        if kind == "weights":
            index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.tensor.shape, strict=True))
            assert torch.equal(box.tensor, source.tensor(by_name[name], torch.float32)[index])


def test_master_weights_are_what_a_wider_type_is_made_of(tmp_path: Path) -> None:
    slices = make_slices(step=5, kinds=["weights", "master"], dtypes={"weights": torch.bfloat16})
    save_alone(tmp_path, [slices], CheckpointState(step=5, model=MODEL, precision="bf16"))
    source = NativeSource(tmp_path, step=None)
    assert source.dtype == torch.bfloat16
    for parameter in parameters(MODEL):
        for dtype, kind in ((torch.bfloat16, "weights"), (torch.float32, "master")):
            expected = full_tensor(f"{kind}/{parameter.name}", parameter.shape, step=5).to(dtype)
            assert torch.equal(source.tensor(parameter, dtype), expected)


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path / "in")
    arguments = ["--from", "hf", "--to", "hf", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--max-shard-size", "20KB"]) == 0
    assert "weights of 2 layers in float32" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(theirs))
    capsys.readouterr()
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"convert_checkpoint: {tmp_path / 'out'}: exists already; name a new")


@pytest.mark.parametrize("size", ["5 apples", "-1GB", "1TiB"])
def test_sizes_that_are_none(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--from", "hf", "--to", "hf", "--input", "a", "--output", "b", f"--max-shard-size={size}"]
    assert main(arguments) == 2
    assert "is not a size such as 500MB" in capsys.readouterr().err
