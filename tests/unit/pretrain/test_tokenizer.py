import inspect
import json
import pickle
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer as MegatronsTokenizer
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer as MegatronsNullTokenizer

from hetero.errors import ConfigError
from megatron.pretrain.generation_config import generation_config_of
from megatron.pretrain.tokenizer import Tokenizer, _naming, build_tokenizer
from tests.helpers.small_tokenizers import write_gpt2, write_sentencepiece, write_tokenizer, write_word_level

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def hugging_face(path: Path, vocab_size: int | None = None) -> Tokenizer:
    return build_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path), vocab_size=vocab_size)


def byte_level() -> Tokenizer:
    return build_tokenizer(tokenizer_type="ByteLevelTokenizer", tokenizer_model=None, vocab_size=None)


def sentence_pieces(kind: str, path: Path) -> Tokenizer:
    return build_tokenizer(tokenizer_type=kind, tokenizer_model=str(path), vocab_size=None)


def test_sentencepiece_models_are_read_as_megatron_reads_them(tmp_path: Path) -> None:
    """Documents end with EOS; of Llama 2 they begin with BOS."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(write_sentencepiece(tmp_path)))
    text = "to be that question"
    ids = library.encode(text, out_type=int)
    for kind, expected in (
        ("GPTSentencePieceTokenizer", ids),
        ("SentencePieceTokenizer", ids),
        ("Llama2Tokenizer", [library.bos_id(), *ids]),
    ):
        tokenizer = sentence_pieces(kind, tmp_path)
        assert (tokenizer.vocab_size, tokenizer.eod) == (library.get_piece_size(), library.eos_id())
        assert tokenizer.tokenize(text) == expected
        assert tokenizer.detokenize([*expected, tokenizer.eod]) == text
        assert pickle.loads(pickle.dumps(tokenizer)).tokenize(text) == expected
    keys = [
        sentence_pieces(kind, tmp_path).unique_identifiers for kind in ("Llama2Tokenizer", "SentencePieceTokenizer")
    ]
    assert keys[0] != keys[1], "their tokens differ"


def test_what_is_no_sentencepiece_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.model: no such file"):
        sentence_pieces("Llama2Tokenizer", tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no SentencePiece model; a tokenizer\.json is for"):
        sentence_pieces("Llama2Tokenizer", write_tokenizer(tmp_path, "</s>"))
    write_sentencepiece(tmp_path, bos_id=-1)
    with pytest.raises(ConfigError, match="the model has no BOS, which Llama2Tokenizer needs"):
        sentence_pieces("Llama2Tokenizer", tmp_path)
    assert sentence_pieces("GPTSentencePieceTokenizer", tmp_path).tokenize("to be")
    write_sentencepiece(tmp_path, eos_id=-1)
    with pytest.raises(ConfigError, match="the model has no EOS, which GPTSentencePieceTokenizer needs"):
        sentence_pieces("GPTSentencePieceTokenizer", tmp_path)


def gpt2(folder: Path, vocab_size: int | None = None) -> Tokenizer:
    return build_tokenizer(
        tokenizer_type="GPT2BPETokenizer",
        tokenizer_model=None,
        vocab_size=vocab_size,
        vocab_file=folder / "vocab.json",
        merge_file=folder / "merges.txt",
    )


@given(TEXTS)
def test_gpt2s_two_files_give_the_ids_of_its_one(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "gpt2"
    if not folder.exists():
        folder.mkdir()
        write_gpt2(folder)
    one, two = hugging_face(folder), gpt2(folder)
    assert (two.vocab_size, two.eod) == (one.vocab_size, one.eod)
    if "<|" not in text:
        assert two.tokenize(text) == one.tokenize(text)
    assert two.detokenize([*two.tokenize(text), two.eod]) == text


@pytest.mark.parametrize(
    ("vocabulary", "merges", "message"),
    [
        (None, "#version\n", r"vocab\.json: "),
        ("[1]", "#version\n", r"vocab\.json: no vocabulary, which is an object"),
        ('{"a": "b"}', "#version\n", r"vocab\.json: no vocabulary, which is an object"),
        ('{"a": 0, "b": 1}', "#version\na c\n", r"merges\.txt: not the merges of .*vocab\.json"),
        ('{"a": 0, "b": 1}', "#version\na\n", r"merges\.txt: not the merges of .*vocab\.json"),
        ('{"a": 0, "b": 1}', "#version\n", r"merges\.txt: not the merges of .*: it has none"),
        ('{"a": 0, "b": 1, "ab": 2}', "#version\na b\n", r"vocab\.json: the vocabulary has no end of document"),
    ],
)
def test_a_damaged_file_of_gpt2_is_named(tmp_path: Path, vocabulary: str | None, merges: str, message: str) -> None:
    if vocabulary is not None:
        (tmp_path / "vocab.json").write_text(vocabulary)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ConfigError, match=message):
        gpt2(tmp_path)


@given(TEXTS)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text
    assert all(0 <= i < tokenizer.eod for i in ids)


def test_bytes_end_documents_with_an_id_that_is_no_byte() -> None:
    tokenizer = byte_level()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.tokenize("é🚀\0\1") == [*"é🚀".encode(), 0, 1]


def test_half_a_character_is_shown_and_does_not_raise() -> None:
    assert byte_level().detokenize([0xF0, 0x9F, ord("a")]) == "\N{REPLACEMENT CHARACTER}a"


@pytest.mark.parametrize("by_folder", [True, False])
def test_hugging_face_round_trip_ignores_truncation_and_padding(tmp_path: Path, by_folder: bool) -> None:
    path = write_tokenizer(tmp_path, "<pad>", "</s>")
    tokenizer = hugging_face(tmp_path if by_folder else path)
    ids = tokenizer.tokenize("to be or not to be, é🚀 is the question")
    assert tokenizer.eod == 1
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == "to be or not to be, é🚀 is the question"
    assert max(ids) < tokenizer.vocab_size


def test_hugging_face_is_identified_by_content_and_can_be_pickled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (hugging_face(write_tokenizer(tmp_path / name, "</s>")) for name in "ab")
    assert first.unique_identifiers == second.unique_identifiers
    (tmp_path / "b" / "tokenizer.json").unlink()
    assert hugging_face(write_tokenizer(tmp_path / "b", "<eos>")).unique_identifiers != first.unique_identifiers
    assert pickle.loads(pickle.dumps(first)).tokenize("to be") == first.tokenize("to be")


def test_vocabulary_with_gaps_reaches_to_its_largest_id(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "</s>")
    content = json.loads(path.read_text())
    content["model"]["vocab"]["zebra"] = 999
    path.write_text(json.dumps(content))
    assert hugging_face(path).vocab_size == 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON, line 1"),
        ('{"hidden_size": 8}', "no 'model' section"),
        (None, "no such file"),
    ],
)
def test_what_is_no_tokenizer_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("section", "content"),
    [
        ("decoder", {"type": "Nobody"}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
        ("pre_tokenizer", 3),
        ("added_tokens", [{"id": -1, "content": "</s>"}]),
        ("added_tokens", [{"id": 4_000_000_000, "content": "</s>"}]),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
        ("model", {"type": "BPE", "vocab": {"</s>": 2**32 - 2}, "merges": []}),
    ],
)
def test_a_damaged_section_is_named(tmp_path: Path, section: str, content: object) -> None:
    """The library raises bare exceptions."""
    path = write_tokenizer(tmp_path, "</s>")
    path.write_text(json.dumps(json.loads(path.read_text()) | {section: content}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        hugging_face(path)


def test_text_that_has_no_tokens_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "</s>")
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "be": 1}, "unk_token": "?"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model, "added_tokens": []}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot tokenize"):
        hugging_face(path).tokenize("to be")


def test_a_panic_of_the_library_is_an_error_and_an_interrupt_is_not() -> None:
    class PanicException(BaseException):
        """As Rust's are called, which cannot be imported."""

    with (
        pytest.raises(ConfigError, match=r"^t\.json: damaged: index out of bounds"),
        _naming(Path("t.json"), "damaged"),
    ):
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), _naming(Path("t.json"), "damaged"):
        raise KeyboardInterrupt


def test_vocabulary_without_end_of_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no end of document, looked for <\|endoftext\|>"):
        hugging_face(write_tokenizer(tmp_path, "<pad>"))


@pytest.mark.parametrize("includes_special_tokens", [False, True])
def test_special_tokens_are_included_as_in_megatron(tmp_path: Path, includes_special_tokens: bool) -> None:
    write_word_level(tmp_path, special=["<unk>", "<bos>", "<eos>"], words=["to", "be"], begin="<bos>")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}'
    )
    ours = build_tokenizer(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(tmp_path),
        vocab_size=None,
        includes_special_tokens=includes_special_tokens,
    )
    megatrons = MegatronsTokenizer(str(tmp_path), include_special_tokens=includes_special_tokens)
    assert ours.tokenize("to be") == megatrons.text_to_ids("to be")
    assert ours.tokenize("to be") == ([1, 3, 4] if includes_special_tokens else [3, 4])
    assert hugging_face(tmp_path).tokenize("to be") == [3, 4]


def test_null_tokenizer_keeps_to_the_vocabulary_it_is_given() -> None:
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.detokenize(tokenizer.tokenize("3 1\n4")) == "3 1 4"
    assert tokenizer.tokenize("0" * 5000 + "7") == [7]
    for text in ("100", "-1", "x", "²", "9" * 5000):
        with pytest.raises(ConfigError, match="no token id from 0 to 99"):
            tokenizer.tokenize(text)


def test_null_tokenizer_ends_documents_as_megatron_cores() -> None:
    """From 0.18 on it takes the id, too; it is part of what the indices of samples are known by."""
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=100, null_eod=7)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 7)
    assert tokenizer.eod_origin == "id 7, given by --null-tokenizer-eod-id"
    assert tokenizer.unique_identifiers == {"class": "NullTokenizer", "vocab_size": 100, "eod_id": 7}
    assert tokenizer.detokenize([3, 7, 99]) == "3 99"
    assert generation_config_of(tokenizer) == {"eos_token_id": 7}
    if "eod_id" in inspect.signature(MegatronsNullTokenizer.__init__).parameters:
        megatrons = MegatronsNullTokenizer(100, eod_id=7)
        assert (megatrons.vocab_size, megatrons.eod) == (tokenizer.vocab_size, tokenizer.eod)


@pytest.mark.parametrize(
    ("kind", "eod", "message"),
    [
        ("NullTokenizer", 300, "--null-tokenizer-eod-id 300 is not from 0 to 299: change it or --vocab-size"),
        ("ByteLevelTokenizer", 7, "7: ByteLevelTokenizer has an end of document of its own, remove the flag"),
    ],
)
def test_an_end_of_document_that_cannot_be(kind: str, eod: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(tokenizer_type=kind, tokenizer_model=None, vocab_size=300, null_eod=eod)


@pytest.mark.parametrize("kind", ["ByteLevelTokenizer", "NullTokenizer"])
def test_no_token_is_padding(kind: str) -> None:
    tokenizer = build_tokenizer(tokenizer_type=kind, tokenizer_model=None, vocab_size=300)
    assert tokenizer.pad not in range(tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("kind", "model", "vocab_size", "message"),
    [
        ("ByteLevelTokeniser", None, None, "did you mean 'ByteLevelTokenizer'"),
        ("GPT2BPETokenizer", None, None, "GPT2BPETokenizer needs --vocab-file"),
        ("HuggingFaceTokenizer", None, None, "needs --tokenizer-model"),
        ("ByteLevelTokenizer", "gpt2", None, "remove the flag"),
        ("ByteLevelTokenizer", None, 256, "--vocab-size 256 is below the 257"),
        ("NullTokenizer", None, None, "needs --vocab-size"),
        ("NullTokenizer", None, 1, "needs --vocab-size"),
    ],
)
def test_flags_that_do_not_go_together(kind: str, model: str | None, vocab_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(tokenizer_type=kind, tokenizer_model=model, vocab_size=vocab_size)


def test_without_the_library_its_tokenizer_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.extras.EXTRAS", {"tokenizers": ("no_such_module",)})
    with pytest.raises(ConfigError, match=r"run: pip install 'megatron-hetero\[tokenizers\]'"):
        hugging_face(write_tokenizer(tmp_path, "</s>"))
