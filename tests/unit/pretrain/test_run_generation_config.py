"""The checkpoints of a run say which tokens begin and end a text, by its tokenizer and by what it started from."""

from pathlib import Path
from typing import Any

import pytest

from megatron.pretrain.generation_config import generation_config_of, generation_config_of_run
from megatron.pretrain.tokenizer import (
    ByteLevelTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
)
from tests.helpers.small_tokenizers import write_sentencepiece, write_tokenizer


def test_the_end_of_document_ends_a_text(tmp_path: Path) -> None:
    model = HuggingFaceTokenizer.load(write_tokenizer(tmp_path, "<pad>", "<|endoftext|>"))
    assert generation_config_of(model) == {"eos_token_id": model.eod}
    assert model.eod == 1
    assert generation_config_of(ByteLevelTokenizer()) == {"eos_token_id": 256}


def test_a_sentencepiece_model_names_its_own(tmp_path: Path) -> None:
    model = SentencePieceTokenizer.load(write_sentencepiece(tmp_path, bos_id=2, eos_id=1), asked_by="Llama2Tokenizer")
    assert generation_config_of(model) == {"bos_token_id": 2, "eos_token_id": 1}


CHAT = {"bos_token_id": 5, "eos_token_id": [256, 8, 9], "temperature": 0.6}


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ({}, {"eos_token_id": 256}),
        ({"eos_token_id": 256, "bos_token_id": 5}, {"eos_token_id": 256, "bos_token_id": 5}),
        (CHAT, CHAT),
        ({**CHAT, "eos_token_id": [8, 9]}, {**CHAT, "eos_token_id": 256}),
        ({"eos_token_id": 8}, {"eos_token_id": 256}),
    ],
)
def test_what_a_run_started_from_stays_if_its_documents_end_so(
    loaded: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert generation_config_of_run(ByteLevelTokenizer(), loaded) == expected


@pytest.mark.parametrize("loaded", [{}, CHAT])
def test_numbers_that_were_tokenized_elsewhere_say_nothing(loaded: dict[str, Any]) -> None:
    """The last id of a NullTokenizer was no token of the model that the run started from."""
    assert generation_config_of_run(NullTokenizer(vocab_size=61), loaded) == loaded
