"""Which tensors a Hugging Face folder has, and whether its head is tied, is as ``transformers`` reads its files."""

# Classes of transformers in annotations would load it, which takes seconds, where tests are only collected.
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hetero.checkpoint.interchange import huggingface
from hetero.checkpoint.interchange.huggingface import HuggingFaceSource
from hetero.errors import CheckpointError
from tests.helpers.transformers_models import SMALL
from tools.convert_checkpoint import main

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gpt2")
INDEX = "model.safetensors.index.json"
TOKENS_BS = torch.arange(24).reshape(2, 12) * 7 % 61


def random_model(family: str) -> transformers.PreTrainedModel:
    """A model whose head is not its embedding."""
    torch.manual_seed(5)
    config = transformers.CONFIG_MAPPING[family](**SMALL[family], tie_word_embeddings=False)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def set_tied(folder: Path, tied: bool) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))


def embedding_name(family: str) -> str:
    return "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Set tensors of a folder with one file; ``None`` takes one out."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=TOKENS_BS).logits


def through_ours(folder: Path) -> Path:
    """Convert to our format and back."""
    ours, back = folder.parent / "ours", folder.parent / "back"
    assert main(["--from", "hf", "--to", "hetero", "--input", str(folder), "--output", str(ours)]) == 0
    assert main(["--from", "hetero", "--to", "hf", "--input", str(ours), "--output", str(back)]) == 0
    return back


@pytest.mark.parametrize("max_shard_size", ["20KB", "5GB"], ids=["many files", "one file"])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_head_under_a_tied_config_is_kept(
    tmp_path: Path, family: str, max_shard_size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head was dropped, and the logits were those of another model."""
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path / "in", max_shard_size=max_shard_size)
    assert (tmp_path / "in" / INDEX).exists() == (max_shard_size == "20KB")
    set_tied(tmp_path / "in", True)
    back = through_ours(tmp_path / "in")
    assert "tie_word_embeddings is true, but lm_head.weight is not the embedding" in capsys.readouterr().out
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(back), logits(tmp_path / "in"))
    with torch.no_grad():
        assert torch.equal(logits(back), theirs(input_ids=TOKENS_BS).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("repeated", [True, False])
def test_a_head_that_repeats_the_embedding_is_tied(tmp_path: Path, family: str, repeated: bool) -> None:
    random_model(family).save_pretrained(tmp_path / "in")
    set_tied(tmp_path / "in", True)
    embedding = load_file(tmp_path / "in" / "model.safetensors")[embedding_name(family)]
    change_tensors(tmp_path / "in", {"lm_head.weight": embedding.clone() if repeated else None})
    source = HuggingFaceSource(tmp_path / "in", divisible_by=64)
    assert source.model.tied_embeddings
    assert source.notes == ()
    assert torch.equal(logits(through_ours(tmp_path / "in")), logits(tmp_path / "in"))


@pytest.mark.parametrize("row", [0, 59, 60])
def test_one_number_makes_another_head(tmp_path: Path, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is; also in the last part of those that are compared one after the other."""
    monkeypatch.setattr(huggingface, "_COMPARED_ROWS", 20)
    random_model("llama").save_pretrained(tmp_path)
    set_tied(tmp_path, True)
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    change_tensors(tmp_path, {"lm_head.weight": head})
    assert HuggingFaceSource(tmp_path, divisible_by=64).model.tied_embeddings
    head[row, 7] += 1
    change_tensors(tmp_path, {"lm_head.weight": head})
    assert not HuggingFaceSource(tmp_path, divisible_by=64).model.tied_embeddings


def test_a_head_of_another_type_is_tied_if_its_numbers_are_the_same(tmp_path: Path) -> None:
    random_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    set_tied(tmp_path, True)
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].float()
    change_tensors(tmp_path, {"lm_head.weight": head})
    assert HuggingFaceSource(tmp_path, divisible_by=64).model.tied_embeddings
    change_tensors(tmp_path, {"lm_head.weight": head + 1e-6})
    assert not HuggingFaceSource(tmp_path, divisible_by=64).model.tied_embeddings


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    set_tied(tmp_path, True)
    change_tensors(tmp_path, {"lm_head.weight": torch.ones(60, 32)})
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[60, 32\], config.json makes it \[61, 32\]"):
        HuggingFaceSource(tmp_path, divisible_by=64)


@pytest.mark.parametrize("stated", [True, False])
def test_an_untied_model_without_a_head_is_refused(tmp_path: Path, stated: bool) -> None:
    """As transformers would draw it at random, and warn. Llama's default is untied."""
    random_model("llama").save_pretrained(tmp_path)
    change_tensors(tmp_path, {"lm_head.weight": None})
    if not stated:
        config = json.loads((tmp_path / "config.json").read_text())
        del config["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"no lm_head.weight, and tie_word_embeddings is false .*set tie_word_emb"
    ):
        HuggingFaceSource(tmp_path, divisible_by=64)


def test_a_tensor_that_the_index_leaves_out_counts(tmp_path: Path) -> None:
    """transformers reads all tensors of the files that the index names; here it was lost."""
    random_model("llama").save_pretrained(tmp_path / "in", max_shard_size="20KB")
    set_tied(tmp_path / "in", True)
    index = json.loads((tmp_path / "in" / INDEX).read_text())
    weight_map = index["weight_map"]
    # The file of the head is named for another tensor, too.
    moved = load_file(tmp_path / "in" / weight_map["model.norm.weight"])["model.norm.weight"]
    path = tmp_path / "in" / weight_map.pop("lm_head.weight")
    first = tmp_path / "in" / weight_map["model.norm.weight"]
    rest = {name: tensor for name, tensor in load_file(first).items() if name != "model.norm.weight"}
    save_file(rest, first, metadata={"format": "pt"})
    save_file({**load_file(path), "model.norm.weight": moved}, path, metadata={"format": "pt"})
    weight_map["model.norm.weight"] = path.name
    (tmp_path / "in" / INDEX).write_text(json.dumps(index))
    assert torch.equal(logits(through_ours(tmp_path / "in")), logits(tmp_path / "in"))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    [name] = list(load_file(files[0]))[:1]
    tensors = load_file(files[0])
    save_file({**load_file(files[1]), name: tensors[name] + 1}, files[1], metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"tensor {name} is here and in {files[0].name}; keep one"):
        HuggingFaceSource(tmp_path, divisible_by=64)


def test_one_file_besides_an_index_of_others_is_refused(tmp_path: Path) -> None:
    """transformers reads the one, here it was the others."""
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    other = {name: tensor + 1 for name, tensor in theirs.state_dict().items()}
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"it has model.safetensors, which transformers reads, and .*move away"):
        HuggingFaceSource(tmp_path, divisible_by=64)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(read.lm_head.weight, other["lm_head.weight"])
