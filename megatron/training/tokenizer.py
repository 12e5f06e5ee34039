"""Text to token ids and back.

These stand in for ``megatron.core.tokenizers`` of 0.16, which does not serve here:

* Its byte-level tokenizer ends documents with id 0 and pads with id 1. Both are bytes, too, and GPTDataset takes
  every label that equals the pad id out of the loss and turns it into 0.
* Its Hugging Face tokenizer needs ``transformers``, and many models pad with a token that documents contain.
* Its null tokenizer adds an id to the vocabulary that it is given, so that its end of document lies outside.
* Importing it imports the whole of megatron-core, which is seconds for every process that only reads text.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hetero.errors import ConfigError
from hetero.serialization import near_match, read_text

try:
    import tokenizers
except ModuleNotFoundError:  # an optional dependency: byte-level and mock runs need none
    tokenizers = None

TOKENIZER_TYPES = ("ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer")

END_OF_DOCUMENT_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|end▁of▁sentence|>",
    "<|eos|>",
    "[EOS]",
)
"""Names under which published vocabularies keep the end of a document; the first that exists is taken."""


class Tokenizer(ABC):
    """What megatron-core's GPTDataset and this harness ask of a tokenizer.

    vocab_size: ids are below it, ``eod`` included.
    eod: id of the end of a document.
    pad: an id that no token has. GPTDataset drops labels equal to it from the loss; samples are cut from one stream
        of tokens and never padded, so nothing may be dropped.
    unique_identifiers: part of the key of the dataset's index cache.
    """

    vocab_size: int
    eod: int
    pad: ClassVar[int] = -1

    @property
    @abstractmethod
    def unique_identifiers(self) -> dict[str, Any]: ...

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """The ids of a document, without an end of document."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids; ends of documents are left out."""


@dataclass(frozen=True)
class ByteLevelTokenizer(Tokenizer):
    """Bytes of the UTF-8 text, and one id after them for the end of a document."""

    vocab_size: int = 257
    eod: int = 256

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "ByteLevelTokenizer"}

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        # A model's bytes need not be UTF-8.
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class NullTokenizer(Tokenizer):
    """Ids written as decimal numbers, for mock data and for data that was tokenized elsewhere. The last id is eod."""

    vocab_size: int

    @property
    def eod(self) -> int:
        return self.vocab_size - 1

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "NullTokenizer", "vocab_size": self.vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """The ids that are written in ``text``.

        Raises:
            ConfigError: a word is not a number of the vocabulary.
        """
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                raise ConfigError(f"NullTokenizer: {word!r} is no token id from 0 to {self.vocab_size - 1}")
        return [int(word) for word in words]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids if i != self.eod)


@dataclass(frozen=True)
class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` in the hands of Hugging Face's ``tokenizers`` library.

    digest: SHA-256 of the file. The cache key follows what the file says, not where it lies.
    """

    model: "tokenizers.Tokenizer"
    digest: str
    vocab_size: int
    eod: int

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "HuggingFaceTokenizer", "sha256": self.digest}

    def tokenize(self, text: str) -> list[int]:
        return self.model.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.model.decode([i for i in ids if i != self.eod], skip_special_tokens=False)

    @classmethod
    def load(cls, path: Path) -> "HuggingFaceTokenizer":
        """Read ``tokenizer.json``, or the file of that name in a folder.

        Raises:
            ConfigError: there is no such file, it is no tokenizer, or its vocabulary has no end of document.
        """
        if tokenizers is None:
            raise ConfigError("HuggingFaceTokenizer: the tokenizers package is missing; run: pip install tokenizers")
        file = path / "tokenizer.json" if path.is_dir() else path
        text = read_text(file)
        _check_is_tokenizer(file, text)
        model = tokenizers.Tokenizer.from_str(text)
        # Fine-tuning leaves these in the file; documents are neither cut nor filled up.
        model.no_truncation()
        model.no_padding()
        return cls(
            model=model,
            digest=hashlib.sha256(text.encode("utf-8")).hexdigest(),
            # The count would be too small where ids have gaps.
            vocab_size=max(model.get_vocab(with_added_tokens=True).values()) + 1,
            eod=_end_of_document(file, model),
        )


def build_tokenizer(*, tokenizer_type: str, tokenizer_model: str | None, vocab_size: int | None) -> Tokenizer:
    """The tokenizer that the flags ask for.

    Args:
        tokenizer_type: one of :data:`TOKENIZER_TYPES`.
        tokenizer_model: ``HuggingFaceTokenizer`` only: ``tokenizer.json`` or a folder with one.
        vocab_size: the model's; ``NullTokenizer`` has no other, the rest must fit into it.

    Raises:
        ConfigError: an unknown type, a missing or superfluous flag, or a vocabulary that the model cannot hold.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        hint = near_match(tokenizer_type, list(TOKENIZER_TYPES)) or f" (known: {', '.join(TOKENIZER_TYPES)})"
        raise ConfigError(f"--tokenizer-type {tokenizer_type}: unknown{hint}")
    tokenizer: Tokenizer
    if tokenizer_type == "HuggingFaceTokenizer":
        if tokenizer_model is None:
            raise ConfigError("HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json or a folder with one")
        tokenizer = HuggingFaceTokenizer.load(Path(tokenizer_model))
    else:
        if tokenizer_model is not None:
            raise ConfigError(f"--tokenizer-model {tokenizer_model}: {tokenizer_type} reads no file, remove the flag")
        if tokenizer_type == "NullTokenizer":
            if vocab_size is None or vocab_size < 2:
                raise ConfigError(f"NullTokenizer needs --vocab-size of at least 2, got {vocab_size}")
            tokenizer = NullTokenizer(vocab_size=vocab_size)
        else:
            tokenizer = ByteLevelTokenizer()
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is below the {tokenizer.vocab_size} ids of {tokenizer_type}; raise or remove it"
        )
    return tokenizer


def _check_is_tokenizer(file: Path, text: str) -> None:
    """The library raises bare exceptions; this names what users get wrong most: another of the model's files."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: not JSON, line {error.lineno}: {error.msg}; it must be a tokenizer.json") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ConfigError(f"{file}: no tokenizer, it has no 'model' section; --tokenizer-model wants a tokenizer.json")


def _end_of_document(file: Path, model: "tokenizers.Tokenizer") -> int:
    for name in END_OF_DOCUMENT_TOKENS:
        token = model.token_to_id(name)
        if token is not None:
            return int(token)
    raise ConfigError(
        f"{file}: the vocabulary has no end of document, looked for {', '.join(END_OF_DOCUMENT_TOKENS)}; "
        "add one of them to its added_tokens"
    )
