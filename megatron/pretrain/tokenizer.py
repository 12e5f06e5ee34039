"""Turns text into token ids and back.

These stand in for ``megatron.core.tokenizers`` of 0.16, which does not serve here:

* Its byte-level tokenizer ends documents with id 0 and pads with id 1. Both are bytes, too, and GPTDataset takes
  every label that equals the pad id out of the loss and turns it into 0.
* Its Hugging Face tokenizer needs ``transformers``, and many models pad with a token that documents contain.
* Its null tokenizer adds an id to the vocabulary that it is given, so that its end of document lies outside.
* Importing it imports the whole of megatron-core, which is seconds for every process that only reads text.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, get_args

from hetero.errors import ConfigError
from hetero.extras import require
from hetero.serialization import near_match, parse_json, read_bytes, read_text
from hetero.spec.hugging_face.folder import hugging_face_folder
from hetero.units import MIB
from megatron.pretrain.cli.value_types import TOKENIZER_FILES, TokenizerType, missing_tokenizer_file
from megatron.pretrain.end_of_document import EndOfDocument, find_end_of_document

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

TOKENIZER_TYPES: tuple[str, ...] = get_args(TokenizerType)

MAX_VOCABULARY = 2**24
"""Sixty times the largest in use. A model has a row of weights for each id, whether a token has it or not."""


_SMALL_BYTES = MIB
"""Of a JSON file that is parsed to see what it is. A model's other files are smaller; a tokenizer.json of a hundred
thousand tokens takes a second."""

NO_TOKEN = -1
"""An id that no token has."""


class Tokenizer(Protocol):
    """Turns text into token ids and back, with all that megatron-core's GPTDataset asks of a tokenizer.

    pad: :data:`NO_TOKEN`. GPTDataset drops labels equal to it from the loss; samples are cut from one stream of tokens
        and never padded, so nothing may be dropped.
    """

    pad: ClassVar[int]

    @property
    def vocab_size(self) -> int:
        """Ids are below it, ``eod`` included."""

    @property
    def eod(self) -> int:
        """Id of the end of a document."""

    @property
    def eod_origin(self) -> str:
        """The end of a document and how it is known, for people."""

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """Part of the key of the dataset's index cache."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of a document, without an end of document."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids; ends of documents are left out."""


@dataclass(frozen=True)
class ByteLevelTokenizer:
    """Takes the bytes of the UTF-8 text for ids, and one id after them for the end of a document."""

    pad: ClassVar[int] = NO_TOKEN
    vocab_size: int = 257
    eod: int = 256

    @property
    def eod_origin(self) -> str:
        return f"id {self.eod}, the one after the bytes"

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        return {"class": "ByteLevelTokenizer"}

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        # A model's bytes need not be UTF-8.
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class NullTokenizer:
    """Reads ids written as decimal numbers, for mock data and data that was tokenized elsewhere.

    given_eod: id that ends a document; ``None`` for the last one of the vocabulary.
    """

    pad: ClassVar[int] = NO_TOKEN
    vocab_size: int
    given_eod: int | None = None

    @property
    def eod(self) -> int:
        return self.vocab_size - 1 if self.given_eod is None else self.given_eod

    @property
    def eod_origin(self) -> str:
        origin = "the last one of --vocab-size" if self.given_eod is None else "given by --null-tokenizer-eod-id"
        return f"id {self.eod}, {origin}"

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        given = {} if self.given_eod is None else {"eod_id": self.given_eod}
        return {"class": "NullTokenizer", "vocab_size": self.vocab_size, **given}

    def tokenize(self, text: str) -> list[int]:
        """Return the ids that are written in ``text``.

        Raises:
            ConfigError: a word is not a number of the vocabulary.
        """
        words = text.split()
        for word in words:
            # A number of more digits than Python converts is none of them either.
            is_short = len(word.lstrip("0")) <= len(str(self.vocab_size))
            if not (word.isascii() and word.isdigit() and is_short and int(word[-20:]) < self.vocab_size):
                raise ConfigError(f"NullTokenizer: {word[:40]!r} is no token id from 0 to {self.vocab_size - 1}")
        return [int(word[-20:]) for word in words]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids if i != self.eod)


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """Tokenizes with a model's ``tokenizer.json`` by Hugging Face's ``tokenizers`` library.

    file: where it was read, for messages.
    digest: SHA-256 of the file. The cache key follows what the file says, not where it lies.
    includes_special_tokens: each document gets the special tokens that the tokenizer's post-processor adds, of most
        models a BOS; by default it does not.
    """

    pad: ClassVar[int] = NO_TOKEN
    model: "tokenizers.Tokenizer"
    file: Path
    digest: str
    vocab_size: int
    end_of_document: EndOfDocument
    includes_special_tokens: bool = False

    @property
    def eod(self) -> int:
        return self.end_of_document.id

    @property
    def eod_origin(self) -> str:
        return str(self.end_of_document)

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        return {"class": "HuggingFaceTokenizer", "sha256": self.digest}

    def added_tokens(self) -> list[str]:
        """Return the tokens that the post-processor adds to an empty document, whether or not they are included."""
        with _naming(self.file, "cannot tokenize an empty text; is it the file of a whole tokenizer?"):
            return list(self.model.encode("", add_special_tokens=True).tokens)

    def tokenize(self, text: str) -> list[int]:
        """The ids of a document.

        Raises:
            ConfigError: the tokenizer has no token for a part of it, nor one for what it does not know.
        """
        with _naming(self.file, "cannot tokenize; is it the file of a whole tokenizer?"):
            return self.model.encode(text, add_special_tokens=self.includes_special_tokens).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.model.decode([i for i in ids if i != self.eod], skip_special_tokens=False)

    @classmethod
    def load(cls, path: Path, *, includes_special_tokens: bool = False) -> "HuggingFaceTokenizer":
        """Read ``tokenizer.json``, or the file of that name in a folder or in the local cache of the hub.

        Raises:
            ConfigError: there is no such file, it is no tokenizer, its vocabulary has no end of document, or the
                tokenizers library is not installed.
        """
        require("tokenizers", asked_by="HuggingFaceTokenizer")
        import tokenizers  # noqa: PLC0415  (optional: byte-level and mock runs need none)

        file = _file_of(path, "tokenizer.json")
        text = read_text(file)
        _check_is_tokenizer(file, text)
        with _naming(file, "not a tokenizer that the tokenizers library reads; fetch the file anew, or update it"):
            model = tokenizers.Tokenizer.from_str(text)
            # Fine-tuning leaves these in the file; documents are neither cut nor filled up.
            model.no_truncation()
            model.no_padding()
            vocabulary = model.get_vocab(with_added_tokens=True)
        return cls._of(model, vocabulary, file=file, content=text, includes_special_tokens=includes_special_tokens)

    @classmethod
    def of_gpt2_files(cls, vocab_file: Path, merge_file: Path) -> "HuggingFaceTokenizer":
        """Read the two files of GPT-2's byte-pair encoding, as Megatron-LM's ``GPT2BPETokenizer`` does.

        Raises:
            ConfigError: a file is missing or damaged, the vocabulary has no end of document, or the tokenizers library
                is not installed.
        """
        require("tokenizers", asked_by="GPT2BPETokenizer")
        import tokenizers  # noqa: PLC0415

        vocabulary, merges = _read_vocabulary(vocab_file), read_text(merge_file)
        with _naming(merge_file, f"not the merges of {vocab_file}; fetch both anew"):
            pairs = _pairs(merges)
            model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
            model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            model.decoder = tokenizers.decoders.ByteLevel()
        return cls._of(model, vocabulary, file=vocab_file, content=json.dumps([vocabulary, merges]))

    @classmethod
    def _of(
        cls,
        model: "tokenizers.Tokenizer",
        vocabulary: Mapping[str, int],
        *,
        file: Path,
        content: str,
        includes_special_tokens: bool = False,
    ) -> "HuggingFaceTokenizer":
        # The count would be too small where ids have gaps.
        vocab_size = max(vocabulary.values(), default=-1) + 1
        if vocab_size > MAX_VOCABULARY:
            token = max(vocabulary, key=vocabulary.__getitem__)
            raise ConfigError(f"{file}: token {token!r} has the id {vocab_size - 1}, must be below {MAX_VOCABULARY}")
        special_tokens = {token.content for token in model.get_added_tokens_decoder().values() if token.special}
        return cls(
            model=model,
            file=file,
            digest=hashlib.sha256(content.encode("utf-8")).hexdigest(),
            vocab_size=vocab_size,
            end_of_document=find_end_of_document(file, vocabulary, special_tokens),
            includes_special_tokens=includes_special_tokens,
        )


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """Tokenizes with the file of a SentencePiece model (arXiv 1808.06226), by Google's library.

    Its end of document is the model's EOS.
    file: where it was read, for messages.
    digest: SHA-256 of the file.
    bos: put in front of each document, as Megatron-LM's ``Llama2Tokenizer`` does; ``None`` for nothing.
    """

    pad: ClassVar[int] = NO_TOKEN
    model: "sentencepiece.SentencePieceProcessor"
    file: Path
    digest: str
    vocab_size: int
    eod: int
    bos: int | None

    @property
    def eod_origin(self) -> str:
        return f"{self.model.id_to_piece(self.eod)!r} (id {self.eod}), the EOS of {self.file.name}"

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        return {
            "class": "SentencePieceTokenizer",
            "sha256": self.digest,
            "bos": NO_TOKEN if self.bos is None else self.bos,
        }

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.model.encode(text, out_type=int)
        return ids if self.bos is None else [self.bos, *ids]

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self.model.decode([int(i) for i in ids if i not in (self.eod, self.bos)])
        return text

    @classmethod
    def load(cls, path: Path, *, asked_by: str) -> "SentencePieceTokenizer":
        """Read a model's file, or ``tokenizer.model`` in a folder or in the local cache of the hub.

        Args:
            asked_by: the name of the tokenizer, which says whether documents begin with BOS.

        Raises:
            ConfigError: there is no such file, it is no model, it has no EOS or no BOS where that is asked for, or the
                sentencepiece library is not installed.
        """
        require("sentencepiece", asked_by=asked_by)
        import sentencepiece  # noqa: PLC0415  (optional, as above)

        file = _file_of(path, "tokenizer.model")
        content = read_bytes(file)
        with _naming(file, _NO_SENTENCE_PIECE):
            model = sentencepiece.SentencePieceProcessor(model_proto=content)
        begins = asked_by == "Llama2Tokenizer"
        if model.eos_id() < 0 or (begins and model.bos_id() < 0):
            raise ConfigError(
                f"{file}: the model has no {'EOS' if model.eos_id() < 0 else 'BOS'}, which {asked_by} needs; train it "
                "with one"
            )
        return cls(
            model=model,
            file=file,
            digest=hashlib.sha256(content).hexdigest(),
            vocab_size=model.get_piece_size(),
            eod=model.eos_id(),
            bos=model.bos_id() if begins else None,
        )


def build_tokenizer(
    *,
    tokenizer_type: str,
    tokenizer_model: str | None,
    vocab_size: int | None,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
    null_eod: int | None = None,
    includes_special_tokens: bool = False,
) -> Tokenizer:
    """Build the tokenizer that the flags ask for.

    Args:
        tokenizer_type: one of :data:`TOKENIZER_TYPES`.
        tokenizer_model: a ``tokenizer.json``, a SentencePiece model, or a folder with one.
        vocab_size: the model's; ``NullTokenizer`` has no other, the rest must fit into it.
        vocab_file, merge_file: of ``GPT2BPETokenizer``.
        null_eod: id that ends a document of ``NullTokenizer``; ``None`` for its last one.
        includes_special_tokens: of ``HuggingFaceTokenizer``, see there.

    Raises:
        ConfigError: an unknown type, a missing or superfluous flag, or a vocabulary that the model cannot hold.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        hint = near_match(tokenizer_type, list(TOKENIZER_TYPES)) or f" (known: {', '.join(TOKENIZER_TYPES)})"
        raise ConfigError(f"--tokenizer-type {tokenizer_type}: unknown{hint}")
    files = {"--tokenizer-model": tokenizer_model, "--vocab-file": vocab_file, "--merge-file": merge_file}
    _check_given(tokenizer_type, files, null_eod)
    tokenizer: Tokenizer
    if vocab_file is not None and merge_file is not None:
        tokenizer = HuggingFaceTokenizer.of_gpt2_files(vocab_file, merge_file)
    elif tokenizer_type == "HuggingFaceTokenizer":
        tokenizer = HuggingFaceTokenizer.load(
            Path(str(tokenizer_model)), includes_special_tokens=includes_special_tokens
        )
    elif tokenizer_model is not None:
        tokenizer = SentencePieceTokenizer.load(Path(tokenizer_model), asked_by=tokenizer_type)
    elif tokenizer_type == "NullTokenizer":
        tokenizer = _null_tokenizer(vocab_size, null_eod)
    else:
        tokenizer = ByteLevelTokenizer()
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is below the {tokenizer.vocab_size} ids of {tokenizer_type}; raise or remove it"
        )
    return tokenizer


def _check_given(tokenizer_type: str, files: Mapping[str, object], null_eod: int | None) -> None:
    """Check that what is given is what the tokenizer reads.

    Raises:
        ConfigError: a file is missing, or the tokenizer does not read what is given.
    """
    wanted = TOKENIZER_FILES.get(tokenizer_type, {})
    for name, value in files.items():
        if value is None and name in wanted:
            raise ConfigError(missing_tokenizer_file(tokenizer_type, name))
        if value is not None and name not in wanted:
            raise ConfigError(f"{name} {value}: {tokenizer_type} does not read it, remove the flag")
    if null_eod is not None and tokenizer_type != "NullTokenizer":
        raise ConfigError(
            f"--null-tokenizer-eod-id {null_eod}: {tokenizer_type} has an end of document of its own, remove the flag"
        )


def _null_tokenizer(vocab_size: int | None, eod: int | None) -> NullTokenizer:
    if vocab_size is None or vocab_size < 2:
        raise ConfigError(f"NullTokenizer needs --vocab-size of at least 2, got {vocab_size}")
    if eod is not None and not 0 <= eod < vocab_size:
        raise ConfigError(f"--null-tokenizer-eod-id {eod} is not from 0 to {vocab_size - 1}: change it or --vocab-size")
    return NullTokenizer(vocab_size=vocab_size, given_eod=eod)


def check_tokenizer_files(
    *, tokenizer_type: str, tokenizer_model: str | None, vocab_file: Path | None, merge_file: Path | None
) -> None:
    """Look at the files that the tokenizer reads, those of them that are given, as far as that takes no time.

    Raises:
        ConfigError: one is missing or cannot be read, or it is another of the model's files; or the library that reads
            it is not installed.
    """
    wanted = TOKENIZER_FILES.get(tokenizer_type, {})
    if "--tokenizer-model" in wanted and tokenizer_model is not None:
        if tokenizer_type == "HuggingFaceTokenizer":
            require("tokenizers", asked_by=tokenizer_type)
            _look_at_tokenizer(_file_of(Path(tokenizer_model), "tokenizer.json"))
        else:
            require("sentencepiece", asked_by=tokenizer_type)
            file = _file_of(Path(tokenizer_model), "tokenizer.model")
            if read_bytes(file).lstrip()[:1] in (b"", b"{"):
                raise ConfigError(f"{file}: {_NO_SENTENCE_PIECE}")
    if "--vocab-file" in wanted and vocab_file is not None and merge_file is not None:
        require("tokenizers", asked_by=tokenizer_type)
        _read_vocabulary(vocab_file)
        merges = read_text(merge_file)
        with _naming(merge_file, f"not the merges of {vocab_file}; fetch both anew"):
            _pairs(merges)


_NO_SENTENCE_PIECE = "no SentencePiece model; a tokenizer.json is for --tokenizer-type HuggingFaceTokenizer"


def _file_of(path: Path, name: str) -> Path:
    """The file itself, or that of this name in a folder or in the local cache of the hub."""
    folder = hugging_face_folder(path)
    return path if folder is None else folder / name


def _look_at_tokenizer(file: Path) -> None:
    text = read_text(file)
    if len(text) <= _SMALL_BYTES or not text.lstrip().startswith("{"):
        _check_is_tokenizer(file, text)


def _read_vocabulary(file: Path) -> dict[str, int]:
    vocabulary = parse_json(read_text(file), source=str(file))
    if not isinstance(vocabulary, dict) or not all(type(value) is int for value in vocabulary.values()):
        raise ConfigError(
            f"{file}: no vocabulary, which is an object with an id for each token; name GPT-2's vocab.json"
        )
    return vocabulary


def _pairs(merges: str) -> list[tuple[str, str]]:
    """What a merges.txt says; its first line names the version."""
    pairs = [(left, right) for left, right in (line.split(" ") for line in merges.splitlines()[1:] if line)]
    if not pairs:
        raise ValueError("it has none, a pair of tokens in each line below the first")
    return pairs


def _check_is_tokenizer(file: Path, text: str) -> None:
    """Refuse another of the model's files, which users get wrong most and the library does not name."""
    content = parse_json(text, source=str(file))
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ConfigError(f"{file}: no tokenizer, it has no 'model' section; --tokenizer-model wants a tokenizer.json")


@contextmanager
def _naming(file: Path, problem: str) -> Iterator[None]:
    """Turn what the library raises into an error that names the file: bare exceptions, and Rust's panics."""
    try:
        yield
    except BaseException as error:
        # A panic is no Exception, so that nobody handles it by chance; it has no name that could be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{file}: {problem}: {error}") from None
