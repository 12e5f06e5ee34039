import bz2
import gzip
import json
import lzma
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from hetero import extras
from megatron.pretrain import documents as reading
from megatron.pretrain.documents import cut_into_chunks, find_input
from tests.helpers.small_tokenizers import write_word_level
from tools import preprocess_data
from tools.preprocess_data import Recipe, main, preprocess, tokenize_chunk

EOD = 256
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def recipe(**overrides: Any) -> Recipe:
    values = {
        "tokenizer_type": "ByteLevelTokenizer",
        "tokenizer_model": None,
        "vocab_size": None,
        "json_keys": ("text",),
        "append_eod": False,
        "includes_special_tokens": None,
        "skip_bad": False,
    }
    return Recipe(**{**values, **overrides})


def run(folder: Path, *flags: str) -> int:
    """Byte-level tokens of ``folder/in`` to ``folder/out/x``."""
    common = ["--output-prefix", str(folder / "out" / "x"), "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    return main(["--input", str(folder / "in"), *common, *flags])


def write_jsonl(file: Path, texts: list[str], *, key: str = "text") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")


def documents(folder: Path, key: str = "text") -> list[list[int]]:
    dataset = IndexedDataset(str(folder / "out" / f"x_{key}_document"))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def as_text(ids: list[int]) -> str:
    return bytes(ids).decode()


def output_files(folder: Path) -> set[str]:
    return {file.name for file in (folder / "out").glob("*")}


PAIR = {"x_text_document.bin", "x_text_document.idx"}


def test_jsonl_comes_back_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["one\ntwo", "drei é🚀", "", "\0\1"]
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    assert run(tmp_path, "--append-eod") == 0
    found = documents(tmp_path)
    assert all(ids[-1] == EOD for ids in found)
    assert [as_text(ids[:-1]) for ids in found] == [text for text in texts if text]
    captured = capsys.readouterr()
    assert captured.err == ""
    read_as, end, written = captured.out.splitlines()
    assert read_as == f"read as JSON lines: {tmp_path / 'in' / 'a.jsonl'}"
    assert end == "end of document: id 256, the one after the bytes"
    assert "3 documents, 23 tokens" in written
    assert "left out 1 empty" in written


def test_numbers_end_in_the_id_that_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["3 1", "4"])
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]
    assert run(tmp_path, *null, "--append-eod", "--null-tokenizer-eod-id", "7") == 0
    assert documents(tmp_path) == [[3, 1, 7], [4, 7]]
    assert "end of document: id 7, given by --null-tokenizer-eod-id" in capsys.readouterr().out
    assert run(tmp_path, "--null-tokenizer-eod-id", "7", "--overwrite") == 2
    assert "ByteLevelTokenizer has an end of document of its own, remove the flag" in capsys.readouterr().err


def test_each_text_file_is_a_document_in_the_order_of_names(tmp_path: Path) -> None:
    for name, text in {"b.py": "B\r\n", "a.py": "A", "sub/c.py": "C", "a.txt": "T", ".git/d.py": "D"}.items():
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    assert run(tmp_path, "--pattern", "*.py") == 0
    assert [as_text(ids) for ids in documents(tmp_path)] == ["A", "B\r\n", "C"]


def test_several_inputs_in_the_order_given_and_none_twice(tmp_path: Path) -> None:
    for name in ("1.txt", "2.txt", "3.txt"):
        (tmp_path / name).write_text(name)
    found = find_input(
        [str(tmp_path / "3.txt"), str(tmp_path / "[12].txt"), str(tmp_path)], input_format="auto", pattern="*"
    )
    assert [file.path.name for file in found.files] == ["3.txt", "1.txt", "2.txt"]


def test_keys_go_to_datasets_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"title": "t1", "text": "x1"}\n{"title": "", "text": "x2"}\n')
    assert run(tmp_path, "--json-keys", "title", "text") == 0
    assert [as_text(ids) for ids in documents(tmp_path, "title")] == ["t1"]
    assert [as_text(ids) for ids in documents(tmp_path)] == ["x1", "x2"]


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXTS, max_size=12), st.integers(1, 60), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_chunks_hold_every_line_once_and_in_order(texts: list[str], chunk_bytes: int, newline: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = newline.join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
        file = Path(folder) / "a.jsonl"
        file.write_bytes(lines.encode())
        files = find_input([str(file), str(file)], input_format="auto", pattern="*").files
        found: list[str] = []
        for chunk in cut_into_chunks(files, chunk_bytes=chunk_bytes):
            tokens = tokenize_chunk(recipe(), chunk)[0]["text"]
            ends = np.cumsum(tokens.lengths, dtype=int)
            found += [as_text(ids.tolist()) for ids in np.split(tokens.ids, ends)[:-1]]
    assert found == [text for text in texts if text.strip()]


def test_number_of_workers_does_not_change_a_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", [f"{name} {i} " * (i % 7) for i in range(300)])
    for i in range(20):
        (tmp_path / "in" / f"{i}.txt").write_text(f"text {i}")
    found = find_input([str(tmp_path / "in")], input_format="auto", pattern="*")
    outputs = {}
    for workers in (1, 3):
        prefix = tmp_path / str(workers)
        preprocess(recipe(), found, output_prefix=str(prefix), overwrite=False, workers=workers, chunk_bytes=700)
        outputs[workers] = [Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    assert outputs[1] == outputs[3]


def zstandard(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard,
}


def write_parquet(file: Path, columns: dict[str, Any]) -> None:
    """In groups of 70 rows, which no chunk ends with."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file, row_group_size=70)


def test_every_form_of_the_same_documents_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_data, "CHUNK_BYTES", 700)
    texts = [f"{i} grün\n🚀 " * (i % 7) for i in range(300)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    plain = (tmp_path / "a.jsonl").read_bytes()
    half = plain.index(b"\n", len(plain) // 2) - 5
    for suffix, compress in COMPRESS.items():
        (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(plain))
        # As what several writers, or one that compresses in parallel, leave behind.
        (tmp_path / f"two.json{suffix}").write_bytes(compress(plain[:half]) + compress(plain[half:]))
    objects = [{"text": text, "brackets": ["}", {"]": '"\\'}]} for text in texts]
    (tmp_path / "array.json").write_text(json.dumps(objects))
    (tmp_path / "array.indented").write_text(json.dumps(objects, indent=1, ensure_ascii=False), encoding="utf-8-sig")
    (tmp_path / "objects.json.gz").write_bytes(
        gzip.compress("\n".join(json.dumps(each, indent=4) for each in objects).encode())
    )
    write_parquet(tmp_path / "a.parquet", {"id": list(range(300)), "text": texts})
    write_parquet(tmp_path / "b.parquet", {"text": pa.array(texts, pa.large_string()).dictionary_encode()})
    inputs = sorted(tmp_path.glob("*.*"))
    assert len(inputs) == 14
    outputs = set()
    for workers, file in enumerate(inputs):
        prefix = tmp_path / "out" / file.name
        flags = ["--output-prefix", str(prefix), "--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]
        assert main(["--input", str(file), *flags, "--workers", "2" if workers == 3 else "1"]) == 0, file
        chunks = cut_into_chunks(find_input([str(file)], input_format="auto", pattern="*").files, chunk_bytes=700)
        assert sum(piece.num_bytes for chunk in chunks for piece in chunk) == file.stat().st_size
        outputs.add(tuple(Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")))
    assert len(outputs) == 1


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_that_ends_early_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    file = tmp_path / "in" / f"a.jsonl{suffix}"
    write_jsonl(file, ["text " * 1000, "more"])
    file.write_bytes(COMPRESS[suffix](file.read_bytes())[:-9])
    assert run(tmp_path) == 2
    said = capsys.readouterr().err
    assert f"{file}: cannot be read as " in said
    assert said.endswith("is the file complete?\n")
    assert output_files(tmp_path) == set()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"content": ["x"], "id": [1]}, "no column 'text', its columns are 'content', 'id'; name one with --json-keys"),
        ({"text": [1], "body": ["x"]}, "column 'text' is of int64, must be a text; name one with --json-keys ('body')"),
        ({"text": ["x", None]}, "row 2: key 'text' is not a text but NoneType"),
    ],
)
def test_a_wrong_column_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: dict[str, Any], message: str
) -> None:
    file = tmp_path / "in" / "a.parquet"
    write_parquet(file, columns)
    assert run(tmp_path) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(file) in said
    assert message in said


@pytest.mark.parametrize("damage", [slice(-1), slice(1, None)])
def test_a_damaged_parquet_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: slice) -> None:
    file = tmp_path / "in" / "a.parquet"
    write_parquet(file, {"text": ["x" * 99] * 9})
    file.write_bytes(file.read_bytes()[damage].replace(b"\x00", b"0"))
    assert run(tmp_path) == 2
    assert "a.parquet: cannot be read as Parquet: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_what_is_not_installed_is_told_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = tmp_path / "in" / name
    write_parquet(file, {"text": ["x"]})
    if name.endswith(".zst"):
        file.write_bytes(zstandard(b'{"text": "x"}'))
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "pyarrow")
    assert run(tmp_path) == 2
    assert f"{name} needs pyarrow, which is not installed; run: pip install 'meg" in capsys.readouterr().err


def test_chunks_grow_from_small_ones(tmp_path: Path) -> None:
    """So that something is done within the first second, and handing over costs nothing later."""
    write_jsonl(tmp_path / "a.jsonl", ["x" * 2**20] * 8)
    files = find_input([str(tmp_path / "a.jsonl")], input_format="auto", pattern="*").files
    sizes = [sum(piece.num_bytes for piece in chunk) for chunk in cut_into_chunks(files, chunk_bytes=2**18)]
    assert sizes[0] == reading.FIRST_CHUNK_BYTES
    assert sizes[-2] == 2**18
    assert sum(sizes) == files[0].num_bytes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "not JSON, line 1 column 13: Expecting ',' delimiter"),
        (b'{"body": "x"}', "no key 'text', its keys are 'body'"),
        (b'{"text": 3}', "key 'text' is not a text but int"),
        (b'["x"]', "not a JSON object but list"),
        (b'{"text": "\\ud800"}', "key 'text' holds half a surrogate pair"),
        (b'{"text": "\xff"}', "not UTF-8: invalid start byte at byte 10"),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_line_is_named_or_left_out(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: bytes,
    message: str,
    workers: str,
) -> None:
    monkeypatch.setattr(preprocess_data, "CHUNK_BYTES", 16)
    file = tmp_path / "in" / "a.jsonl"
    write_jsonl(file, ["first", "second"])
    file.write_bytes(file.read_bytes() + b"\n" + line + b'\n{"text": "last"}\n[]\n')
    assert run(tmp_path, "--workers", workers) == 2
    # One line of progress comes in every second.
    [error] = [each for each in capsys.readouterr().err.splitlines() if not each.startswith("tokenizing: ")]
    assert f"{file}, line 4: {message}" in error
    assert output_files(tmp_path) == set()
    assert run(tmp_path, "--workers", workers, "--skip-bad") == 0
    assert [as_text(ids) for ids in documents(tmp_path)] == ["first", "second", "last"]
    assert f"left out 2 bad, the first: {file}, line 4" in capsys.readouterr().out


def test_text_file_that_is_not_utf8_is_named_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes("grün".encode("latin-1"))
    (tmp_path / "in" / "b.txt").write_text("b")
    assert run(tmp_path) == 2
    assert "a.txt: not UTF-8: invalid start byte at byte 2" in capsys.readouterr().err
    assert run(tmp_path, "--skip-bad") == 0
    assert [as_text(ids) for ids in documents(tmp_path)] == ["b"]


def test_ids_beyond_the_vocabulary_are_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("1 2 9")
    flags = ["--output-prefix", str(tmp_path / "x"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert main(["--input", str(tmp_path / "a.txt"), *flags]) == 2
    assert "a.txt: NullTokenizer: '9' is no token id from 0 to 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pattern", "*.py"], r"no file in this folder matches --pattern '\*.py'"),
        (["--input", "nowhere/*.txt"], "nowhere/.* no such file or folder"),
        (["--json-keys", "body"], "plain text has one key"),
        (["--tokenizer-model", "gpt2"], "does not read it"),
        (["--pattern", "empty*"], "no document with any text under 'text'"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "empty.txt").touch()
    (tmp_path / "in" / "full.txt").write_text("x")
    assert run(tmp_path, *flags) == 2
    captured = capsys.readouterr()
    assert not [line for line in captured.out.splitlines() if not line.startswith("read as ")]
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err)
    assert output_files(tmp_path) == set()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "\n"),
        ("a.txt", " \t\r\n\u00a0\u3000"),
        ("a.jsonl", '{"text": "\\n"}\n{"text": " "}\n{"text": ""}\n'),
        ("a.jsonl", "\n\n  \n"),
        ("a.json", '{"text": "   "}'),
    ],
)
def test_white_space_is_no_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(content)
    assert run(tmp_path, "--append-eod") == 2
    assert "no document with any text under 'text'" in capsys.readouterr().err
    assert output_files(tmp_path) == set()


def test_white_space_beside_text_is_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["one", "\n", "", " \t", " two\n"])
    assert run(tmp_path, "--append-eod") == 0
    assert [as_text(ids[:-1]) for ids in documents(tmp_path)] == ["one", " two\n"]
    assert "2 documents" in (out := capsys.readouterr().out)
    assert "left out 3 empty" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x", "n": ' + "9" * 5000 + "}", "n: a number of 5,000 digits"),
        ("[" * 100_000, "lists or objects in each other, deeper than 64 levels"),
        ('{"text": "x", "text": "y"}', "key 'text' is given twice"),
    ],
)
def test_lines_that_would_end_in_a_traceback_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(f'{{"text": "one", "score": NaN}}\n{line}\n')
    assert run(tmp_path) == 2
    assert f"a.jsonl, line 2: {message}" in capsys.readouterr().err
    assert run(tmp_path, "--skip-bad") == 0
    assert [as_text(ids) for ids in documents(tmp_path)] == ["one"]


def test_a_line_beyond_the_limit_is_bad_and_the_next_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 40)
    write_jsonl(tmp_path / "in" / "a.jsonl", ["one", "x" * 100, "two"])
    assert run(tmp_path) == 2
    assert "a.jsonl, line 2: a line of more than 40 bytes" in capsys.readouterr().err
    assert run(tmp_path, "--skip-bad") == 0
    assert [as_text(ids) for ids in documents(tmp_path)] == ["one", "two"]


def test_output_is_replaced_only_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["old"])
    assert run(tmp_path) == 0
    write_jsonl(tmp_path / "in" / "a.jsonl", ["new"])
    assert run(tmp_path) == 2
    assert "x_text_document.bin: exists already" in capsys.readouterr().err
    assert as_text(documents(tmp_path)[0]) == "old"
    assert run(tmp_path, "--overwrite") == 0
    assert as_text(documents(tmp_path)[0]) == "new"
    assert output_files(tmp_path) == PAIR


def fail_at_the_second_call(function: Any, error: BaseException) -> Any:
    calls = iter(range(10))

    def failing(*args: Any) -> Any:
        if next(calls) == 1:
            raise error
        return function(*args)

    return failing


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (preprocess_data, "tokenize_chunk", KeyboardInterrupt()),
        (preprocess_data, "tokenize_chunk", MemoryError()),
        (os, "fsync", OSError("disk full")),
    ],
)
def test_what_was_interrupted_leaves_the_output_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: BaseException
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["old"])
    assert run(tmp_path) == 0
    for text in ("one", "two"):
        write_jsonl(tmp_path / "in" / f"{text}.jsonl", [text])
    monkeypatch.setattr(preprocess_data, "CHUNK_BYTES", 8)
    monkeypatch.setattr(module, name, fail_at_the_second_call(getattr(module, name), error))
    if isinstance(error, KeyboardInterrupt):
        assert run(tmp_path, "--overwrite") == 130
    else:
        with pytest.raises(type(error)):
            run(tmp_path, "--overwrite")
    assert output_files(tmp_path) == PAIR
    assert [as_text(ids) for ids in documents(tmp_path)] == ["old"]


def test_death_of_a_worker_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenize_chunk(*_: Any) -> None:
        os._exit(1)

    tokenize_chunk.__module__, tokenize_chunk.__qualname__ = preprocess_data.__name__, "tokenize_chunk"
    monkeypatch.setattr(preprocess_data, "tokenize_chunk", tokenize_chunk)
    write_jsonl(tmp_path / "in" / "a.jsonl", ["x"])
    assert run(tmp_path, "--workers", "2") == 2
    assert "--workers 2: a worker was killed" in capsys.readouterr().err
    assert output_files(tmp_path) == set()


def words_of(folder: Path, *flags: str) -> tuple[int, list[list[int]]]:
    """Tokens of ``to be`` by a tokenizer whose post-processor adds a BOS, of which the last id is the EOS."""
    write_word_level(folder, special=["<unk>", "<bos>", "<eos>"], words=["to", "be"], begin="<bos>")
    write_jsonl(folder / "in" / "a.jsonl", ["to be"])
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    code = run(folder, "--overwrite", *model, *flags)
    return code, documents(folder)


def test_special_tokens_that_are_left_out_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words_of(tmp_path, "--append-eod") == (0, [[3, 4, 2]])
    said = capsys.readouterr().out
    assert "documents are without '<bos>', which Megatron-LM's HuggingFaceTokenizer adds by default;" in said
    assert "end of document: '<eos>' (id 2), as tokenizer.json has this special token and no file in its" in said
    assert words_of(tmp_path, "--tokenizer-hf-no-include-special-tokens") == (0, [[3, 4]])
    assert "<bos>" not in capsys.readouterr().out


def test_special_tokens_are_included_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words_of(tmp_path, "--tokenizer-hf-include-special-tokens", "--append-eod") == (0, [[1, 3, 4, 2]])
    assert "documents have '<bos>' added\n" in capsys.readouterr().out
    assert run(tmp_path, "--tokenizer-hf-include-special-tokens", "--overwrite") == 0
    said = capsys.readouterr().out
    assert "without effect: --tokenizer-hf-include-special-tokens: only HuggingFaceTokenizer reads it" in said


def test_an_end_of_document_that_is_there_twice_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_word_level(tmp_path, special=["<unk>", "<eos>"], words=["to"], begin="<eos>")
    content = json.loads(file.read_text())
    content["post_processor"]["single"].reverse()
    file.write_text(json.dumps(content))
    write_jsonl(tmp_path / "in" / "a.jsonl", ["to"])
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    assert run(tmp_path, *model, "--append-eod", "--tokenizer-hf-include-special-tokens") == 0
    assert documents(tmp_path) == [[2, 1, 1]]
    assert "added, so that the end of document is there twice" in capsys.readouterr().out


def test_flags_of_megatron_that_have_no_effect_are_told_and_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", [f"text {i}" for i in range(9)])
    assert run(tmp_path) == 0
    expected = documents(tmp_path)
    capsys.readouterr()
    flags = "--dataset-impl mmap --partitions=4 --keep-sequential-samples --log-interval 100 --trust-remote-code"
    assert run(tmp_path, "--overwrite", "--vocab-extra-ids=0", *flags.split()) == 0
    assert documents(tmp_path) == expected
    said = capsys.readouterr().out
    assert "without effect: --partitions, --keep-sequential-samples: --workers share each file, and documents" in said
    assert "without effect: --log-interval: progress is shown as time passes" in said
    assert "without effect: --trust-remote-code: no tokenizer here reads it" in said
    assert "without effect: --vocab-extra-ids: with this value it asks for nothing" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--split-sentences", "--split-sentences is not supported: sentences are for BERT and T5"),
        ("--lang english", "--lang is not supported: sentences are for BERT and T5"),
        ("--lang=english --keep-newlines", "leave it out; --keep-newlines is not supported: "),
        ("--find-optimal-num-workers", "no trials are made: leave it out; --workers is all cores by default"),
        ("--vocab gpt2-vocab.json", "--vocab is not supported: use --vocab-file"),
        ("--vocab-extra-ids 100", "--vocab-extra-ids is not supported: use --tokenizer-type HuggingFaceTokenizer"),
        ("--dataset-impl lazy", "--dataset-impl is 'lazy', must be one of mmap"),
        ("--partitions 2 3", "unexpected '3' after the value of --partitions"),
        ("--split-sentence", "unknown flag --split-sentence"),
        ("--append-eod=true", "--append-eod takes no value, found 'true'"),
    ],
)
def test_flags_of_megatron_that_would_write_other_data_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["text"])
    assert run(tmp_path, *flags.split()) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert message in said.err
    # As the program gets them from the shell.
    monkeypatch.setattr(sys, "argv", ["preprocess_data.py", *flags.split()])
    assert main() == 2
    assert message in capsys.readouterr().err
    assert output_files(tmp_path) == set()
