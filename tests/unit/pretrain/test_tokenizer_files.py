"""The folder of an export has the tokenizer with which transformers reads text as the run did."""

# Classes of transformers in annotations would load it, which takes seconds, where tests are only collected.
from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import transformers

from hetero.errors import ConfigError
from megatron.pretrain.generation_config import generation_config_of_run
from megatron.pretrain.tokenizer import build_tokenizer
from megatron.pretrain.tokenizer_files import tokenizer_files
from tests.helpers.small_tokenizers import write_gpt2, write_sentencepiece, write_tokenizer
from tests.helpers.tokenizer_families import FAMILIES, tokenizer_config, write_family, write_json_files
from tools.convert_checkpoint import main

TEXT = "to be, or not to be? \u00e4\U0001f680"


def written(folder: Path, model_type: str, **flags: str | Path | None) -> transformers.PreTrainedTokenizerBase:
    """What transformers reads from an export of a model of this family."""
    given = {"tokenizer_model": None, "vocab_file": None, "merge_file": None, **flags}
    folder.mkdir()
    for name, content in tokenizer_files(**given).contents.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "GPT2BPETokenizer"])
def test_transformers_reads_the_same_ids(tmp_path: Path, kind: str, model_type: str) -> None:
    (tmp_path / "in").mkdir()
    write_gpt2(tmp_path / "in")
    flags: dict[str, str | Path | None] = {"tokenizer_type": kind}
    if kind == "GPT2BPETokenizer":
        flags |= {"vocab_file": tmp_path / "in/vocab.json", "merge_file": tmp_path / "in/merges.txt"}
    else:
        (tmp_path / "in/tokenizer.json").rename(tmp_path / "in/of_the_run.json")
        flags |= {"tokenizer_model": str(tmp_path / "in/of_the_run.json")}
    theirs = written(tmp_path / "out", model_type, **flags)
    ours = build_tokenizer(vocab_size=None, **{"tokenizer_model": None, **flags})
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ours.tokenize(TEXT)
    assert theirs.eos_token_id == ours.eod


@pytest.mark.parametrize("name", ["tokenizer.model", "of_the_run.model"])
def test_a_sentencepiece_model_is_copied(tmp_path: Path, name: str) -> None:
    file = write_sentencepiece(tmp_path).rename(tmp_path / name)
    found = tokenizer_files(
        tokenizer_type="Llama2Tokenizer", tokenizer_model=str(file), vocab_file=None, merge_file=None
    )
    assert found.contents == {"tokenizer.model": file.read_bytes()}


def test_what_lies_beside_the_tokenizer_comes_along_as_it_is(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, "<|endoftext|>")
    beside = {"tokenizer_config.json": b'{"tokenizer_class": "GPT2Tokenizer"}', "chat_template.jinja": b"{{ x }}"}
    for name, content in {**beside, "model.safetensors": b"0", "config.json": b"{}"}.items():
        (tmp_path / name).write_bytes(content)
    expected = {"tokenizer.json": file.read_bytes(), **beside}
    for given in (file, tmp_path):
        found = tokenizer_files(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(given), vocab_file=None, merge_file=None
        )
        assert found.contents == expected


def test_a_tokenizer_without_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tokenizer-type NullTokenizer has no files"):
        tokenizer_files(tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_file=None, merge_file=None)


def test_the_tool_adds_the_files_and_wants_a_model_that_has_the_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tokenizer(tmp_path, "<|endoftext|>")
    ours = build_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(file), vocab_size=None)
    for vocab_size in (ours.vocab_size, ours.vocab_size - 1):
        config = transformers.GPT2Config(vocab_size=vocab_size, n_embd=8, n_layer=1, n_head=1, n_positions=8)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / f"in{vocab_size}")
        paths = ["--input", str(tmp_path / f"in{vocab_size}"), "--output", str(tmp_path / f"out{vocab_size}")]
        flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(file)]
        code = main(["--from", "hf", "--to", "hf", *paths, *flags])
        assert code == (0 if vocab_size == ours.vocab_size else 2)
    said = capsys.readouterr()
    assert "with the tokenizer's tokenizer.json, tokenizer_config.json" in said.out
    assert f"the model has {ours.vocab_size - 1} tokens, the tokenizer {ours.vocab_size}; give the" in said.err
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / f"out{ours.vocab_size}")
    assert theirs(TEXT)["input_ids"] == ours.tokenize(TEXT)


class TestGeneration:
    """Which tokens of an export begin and end a text."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        """A model that says nothing of tokens."""
        config = transformers.LlamaConfig(
            vocab_size=320,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=8,
            bos_token_id=None,
            eos_token_id=None,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "in")
        return tmp_path / "in"

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """A tokenizer in which documents end with 1."""
        (tmp_path / "tokenizer").mkdir()
        return write_tokenizer(tmp_path / "tokenizer", "<pad>", "<|endoftext|>", "<|im_end|>", "<s>")

    def exported(self, source: Path, file: Path) -> transformers.GenerationConfig:
        flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(file)]
        out = source.parent / "out"
        assert main(["--from", "hf", "--to", "hf", "--input", str(source), "--output", str(out), *flags]) == 0
        config = transformers.AutoConfig.from_pretrained(out)
        found = transformers.AutoModelForCausalLM.from_pretrained(out).generation_config
        assert (found.bos_token_id, found.eos_token_id) == (config.bos_token_id, config.eos_token_id)
        return found

    def test_the_end_of_document_of_training(self, source: Path, file: Path) -> None:
        assert self.exported(source, file).eos_token_id == 1

    def test_what_the_checkpoint_says(self, source: Path, file: Path) -> None:
        (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
        assert self.exported(source, file).eos_token_id == [1, 2]

    def test_what_the_tokenizers_files_say(self, source: Path, file: Path) -> None:
        (source / "generation_config.json").write_text('{"eos_token_id": 1, "bos_token_id": 9, "top_k": 7}')
        tokens = {"eos_token": {"content": "<|im_end|>", "special": True}, "bos_token": None, "pad_token": "<gone>"}
        (file.parent / "tokenizer_config.json").write_text(json.dumps(tokens))
        found = self.exported(source, file)
        assert (found.eos_token_id, found.bos_token_id, found.pad_token_id, found.top_k) == (2, 9, None, 7)

    def test_what_lies_in_the_folder_of_the_tokenizer(self, source: Path, file: Path) -> None:
        (file.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<s>"}))
        (file.parent / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.5}')
        found = self.exported(source, file)
        assert (found.eos_token_id, found.bos_token_id, found.temperature) == ([1, 2], 3, 0.5)

    def test_what_a_sentencepiece_model_says(self, source: Path, tmp_path: Path) -> None:
        file = write_sentencepiece(tmp_path, bos_id=2, eos_id=1)
        found = tokenizer_files(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(file), vocab_file=None, merge_file=None
        )
        assert found.generation_config == {}
        assert found.generation_defaults == {"bos_token_id": 2, "eos_token_id": 1}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<unheard>"}))
        found = tokenizer_files(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(file), vocab_file=None, merge_file=None
        )
        assert found.generation_config == {"eos_token_id": 1}

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("has_several_ends", [False, True])
    @pytest.mark.parametrize("where", ["config", "map", "map overrules config", "config overrules map", "separator"])
    def test_a_text_ends_as_documents_do(
        self, source: Path, tmp_path: Path, family: str, where: str, has_several_ends: bool
    ) -> None:
        """Preprocessing, training and the export have one answer; several ends have that among them."""
        published = FAMILIES[family]
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        write_family(folder, family)
        (source / "generation_config.json").write_text('{"eos_token_id": 300}')  # of another tokenizer
        other = next(token for token in published.special if token not in published.ends)
        decoder = {"added_tokens_decoder": {"0": {"content": published.special[0], "special": True}}}
        config, special_tokens_map = {
            "config": ({"eos_token": published.eos}, None),
            "map": ({}, {"eos_token": {"content": published.eos}}),
            "map overrules config": ({"eos_token": other}, {"eos_token": published.eos}),
            "config overrules map": ({"eos_token": published.eos, **decoder}, {"eos_token": other}),
            "separator": ({"sep_token": published.eos}, None),
        }[where]
        write_json_files(folder, tokenizer_config=tokenizer_config(**config))
        if special_tokens_map is not None:
            write_json_files(folder, special_tokens_map=special_tokens_map)
        model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        ends = [model.token_to_id(token) for token in published.ends]
        if has_several_ends:
            write_json_files(folder, generation_config={"eos_token_id": ends})
        run = build_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), vocab_size=None)
        assert run.eod == model.token_to_id(published.eos)
        assert generation_config_of_run(run, {"eos_token_id": 300}) == {"eos_token_id": run.eod}
        assert self.exported(source, folder).eos_token_id == (ends if has_several_ends else run.eod)
        if where != "separator":
            assert transformers.AutoTokenizer.from_pretrained(source.parent / "out").eos_token_id == run.eod

    @pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer"])
    def test_the_end_of_document_is_one_of_those_that_files_name(self, tmp_path: Path, kind: str) -> None:
        """A model that was trained with the tokenizer ends texts with it, whatever its files say."""
        if kind == "HuggingFaceTokenizer":
            write_family(tmp_path, "qwen3")
            write_json_files(tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"})
            write_json_files(tmp_path, generation_config={"eos_token_id": 2})
        else:
            write_sentencepiece(tmp_path, bos_id=2, eos_id=1)
            write_json_files(tmp_path, tokenizer_config={"eos_token": "<s>"})
        flags = {"tokenizer_type": kind, "tokenizer_model": str(tmp_path), "vocab_file": None, "merge_file": None}
        found = tokenizer_files(**flags)
        assert found.generation_config["eos_token_id"] == [2, found.generation_defaults["eos_token_id"]]

    def test_a_tokenizer_config_that_is_none(self, file: Path) -> None:
        (file.parent / "tokenizer_config.json").write_text("[]")
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not a JSON object"):
            tokenizer_files(
                tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(file), vocab_file=None, merge_file=None
            )
