"""Which token ends a document, by the files of a tokenizer: the one of transformers and of Megatron-LM."""

# Classes of transformers in annotations would load it, which takes seconds, where tests are only collected.
from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer as MegatronsTokenizer

from hetero.errors import ConfigError
from megatron.pretrain.tokenizer import HuggingFaceTokenizer
from tests.helpers.small_tokenizers import write_word_level
from tests.helpers.tokenizer_families import FAMILIES, tokenizer_config, write_family, write_json_files


def end_of(folder: Path) -> str:
    return HuggingFaceTokenizer.load(folder).end_of_document.token


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_end_as_in_megatron_and_transformers(tmp_path: Path, family: str) -> None:
    write_family(tmp_path, family)
    expected = FAMILIES[family].eos
    write_json_files(tmp_path, tokenizer_config=tokenizer_config(eos_token=expected))
    ours = HuggingFaceTokenizer.load(tmp_path)
    assert ours.eod == transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert ours.eod == MegatronsTokenizer(str(tmp_path)).eod
    assert ours.eod_origin == f"{expected!r} (id {ours.eod}), the eos_token of tokenizer_config.json"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["tokenizer.json", "mine.json"])
def test_without_other_files_a_special_token_counts_before_any_other(tmp_path: Path, family: str, name: str) -> None:
    file = write_family(tmp_path, family).rename(tmp_path / name)
    origin = HuggingFaceTokenizer.load(file).eod_origin
    assert origin.startswith(repr(FAMILIES[family].likeliest))
    assert origin.endswith(f"as {name} has this special token and no file in its folder names an eos_token")


def test_a_vocabulary_without_special_tokens_has_a_token_of_a_usual_name(tmp_path: Path) -> None:
    write_word_level(tmp_path, special=["<unk>"], words=["</s>", "a"])
    assert "as tokenizer.json has this token and no file" in HuggingFaceTokenizer.load(tmp_path).eod_origin


@pytest.mark.parametrize("named", ["<|im_end|>", {"__type": "AddedToken", "content": "<|im_end|>", "special": True}])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_the_token_as_a_text_or_as_an_object(tmp_path: Path, file: str, named: Any) -> None:
    write_family(tmp_path, "qwen3")
    write_json_files(tmp_path, tokenizer_config=tokenizer_config())
    write_json_files(
        tmp_path, **{file: tokenizer_config(eos_token=named) if file == "tokenizer_config" else {"eos_token": named}}
    )
    assert end_of(tmp_path) == "<|im_end|>"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"


@pytest.mark.parametrize("has_decoder", [False, True])
def test_of_two_files_that_differ_the_one_counts_that_transformers_takes(tmp_path: Path, has_decoder: bool) -> None:
    write_family(tmp_path, "qwen3")
    decoder = {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}}} if has_decoder else {}
    write_json_files(tmp_path, tokenizer_config=tokenizer_config(eos_token="<|endoftext|>", **decoder))
    write_json_files(tmp_path, special_tokens_map={"eos_token": "<|im_end|>"})
    assert end_of(tmp_path) == transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token
    assert end_of(tmp_path) == ("<|endoftext|>" if has_decoder else "<|im_end|>")


def test_a_separator_where_there_is_no_eos_as_in_megatron(tmp_path: Path) -> None:
    write_word_level(tmp_path, special=["[CLS]", "[SEP]", "<unk>"], words=["a"])
    write_json_files(tmp_path, tokenizer_config=tokenizer_config(eos_token=None, sep_token="[SEP]"))
    assert end_of(tmp_path) == "[SEP]"
    assert MegatronsTokenizer(str(tmp_path)).eod == HuggingFaceTokenizer.load(tmp_path).eod


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"config": {"eos_token_id": 2}}, "'<|im_end|>' (id 2), the eos_token_id of config.json"),
        (
            {"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [2, 0]}},
            "'<|im_end|>' (id 2), the first eos_token_id of generation_config.json",
        ),
        (
            {"config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": "<|endoftext|>"}},
            "'<|endoftext|>' (id 0), the eos_token of tokenizer_config.json",
        ),
        (
            {"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": []}, "tokenizer_config": {}},
            "'<|endoftext|>' (id 0), as tokenizer.json has this special token and no file in its folder names an "
            "eos_token",
        ),
    ],
)
def test_ids_of_the_model_count_where_no_file_names_a_token(
    tmp_path: Path, contents: dict[str, Any], expected: str
) -> None:
    write_family(tmp_path, "qwen3")
    write_json_files(tmp_path, **contents)
    assert HuggingFaceTokenizer.load(tmp_path).eod_origin == expected


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (
            {"tokenizer_config": {"eos_token": "<end>"}},
            r"tokenizer_config\.json: eos_token '<end>' is not in the vocabulary of tokenizer\.json; take both files",
        ),
        (
            {"config": {"eos_token_id": [151643, 2]}},
            r"config\.json: eos_token_id 151643 is not in the vocabulary of tokenizer\.json; take both files",
        ),
        ({"tokenizer_config": []}, r"tokenizer_config\.json: not a JSON object"),
        ({"special_tokens_map": "<|im_end|>"}, r"special_tokens_map\.json: not a JSON object"),
    ],
)
def test_files_that_cannot_be_meant_are_named(tmp_path: Path, contents: dict[str, Any], message: str) -> None:
    write_family(tmp_path, "qwen3")
    write_json_files(tmp_path, **contents)
    with pytest.raises(ConfigError, match=message):
        HuggingFaceTokenizer.load(tmp_path)


def test_files_that_belong_to_another_tokenizer_are_not_asked(tmp_path: Path) -> None:
    shutil.move(write_family(tmp_path, "qwen3"), tmp_path / "mine.json")
    write_json_files(tmp_path, tokenizer_config=tokenizer_config(eos_token="<other>"))
    assert HuggingFaceTokenizer.load(tmp_path / "mine.json").end_of_document.token == "<|endoftext|>"
