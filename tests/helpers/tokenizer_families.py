"""Small tokenizers with the special tokens of published families, and what their files say of the end of a text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.small_tokenizers import write_word_level

DEEPSEEK_BEGIN, DEEPSEEK_END = (f"<\uff5c{word}\u2581of\u2581sentence\uff5c>" for word in ("begin", "end"))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family as published (gemma-3-4b-it, DeepSeek-V3, Llama-3.1-8B-Instruct, Qwen3-8B, gpt-oss-20b).

    eos: the eos_token of tokenizer_config.json.
    ends: the tokens of eos_token_id in generation_config.json.
    likeliest: what ends a document where no file names it.
    """

    special: tuple[str, ...]
    eos: str
    ends: tuple[str, ...]
    likeliest: str
    others: tuple[str, ...] = ()


FAMILIES = {
    # In Gemma 3 </s> is an HTML tag, which ends struck-through text.
    "gemma": Family(
        special=("<pad>", "<eos>", "<bos>", "<end_of_turn>", "<unk>"),
        others=("<s>", "</s>"),
        eos="<eos>",
        ends=("<eos>", "<end_of_turn>"),
        likeliest="<eos>",
    ),
    "deepseek": Family(
        special=(DEEPSEEK_BEGIN, DEEPSEEK_END, "<unk>"), eos=DEEPSEEK_END, ends=(DEEPSEEK_END,), likeliest=DEEPSEEK_END
    ),
    "llama-3.1-instruct": Family(
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<unk>"),
        eos="<|eot_id|>",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        likeliest="<|end_of_text|>",
    ),
    "qwen3": Family(
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"),
        eos="<|im_end|>",
        ends=("<|im_end|>", "<|endoftext|>"),
        likeliest="<|endoftext|>",
    ),
    "gpt-oss": Family(
        special=("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>", "<unk>"),
        eos="<|return|>",
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        likeliest="<|endoftext|>",
    ),
}


def write_family(folder: Path, family: str) -> Path:
    """Write the ``tokenizer.json`` of a family, without other files."""
    return write_word_level(folder, special=FAMILIES[family].special, words=[*FAMILIES[family].others, "a", "b"])


def write_json_files(folder: Path, **contents: Any) -> None:
    """Write JSON files by their names without the suffix."""
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def tokenizer_config(**content: Any) -> dict[str, Any]:
    """Return a ``tokenizer_config.json`` that transformers reads."""
    return {"tokenizer_class": "PreTrainedTokenizerFast", **content}
