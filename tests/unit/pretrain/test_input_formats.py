"""What a file of documents is read as, by its content; what is refused, and with which advice."""

import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import ConfigError
from megatron.pretrain import input_formats, json_objects
from megatron.pretrain.documents import FoundInput, Record, cut_into_chunks, find_input, records_of
from megatron.pretrain.input_formats import HEAD_BYTES, look_at

LINES = b'{"text": "a"}\n{"text": "b"}\n'
MARK = b"\xef\xbb\xbf"


def found_in(folder: Path, *, keys: tuple[str, ...] = ("text",), skip_bad: bool = False) -> FoundInput:
    return find_input([str(folder)], input_format="auto", pattern="*", keys=keys, skip_bad=skip_bad)


def records(found: FoundInput) -> list[Record]:
    return [record for chunk in cut_into_chunks(found.files, chunk_bytes=40) for record in records_of(chunk)]


def texts_in(found: FoundInput) -> list[str]:
    return [record.texts(("text",))["text"] for record in records(found)]


@pytest.mark.parametrize(
    "name", ["a.JSONL", "a.jl", "a.jsonlines", "a.ndjson", "a.jsonl.1", "part-00000", "a.txt", "a", "a.json", "a.gz"]
)
def test_json_lines_under_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LINES)
    found = found_in(tmp_path)
    assert found.summary() == [f"read as JSON lines: {tmp_path / name}"]
    assert texts_in(found) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (MARK + LINES, "jsonl"),
        (LINES.replace(b"\n", b"\r\n"), "jsonl"),
        (b"\n \n" + LINES, "jsonl"),
        (LINES + MARK + LINES, "jsonl"),
        (LINES + MARK, "jsonl"),
        (LINES.replace(b"\n", b"\r"), "json"),
        (b'[{"text": "a"}, {"text": "b"}]', "json"),
        (MARK + b'[{"text": "a"},\n {"text": "b"}]\n', "json"),
        (b'[\n{"text": "a"}\n]\n[]\n[\n{"text": "b"}\n]\n', "json"),
        (b'{"text": "a"},\n{"text": "b"},\n', "json"),
        (b'{\n "text": "a"\n}\n{\n "text": "b"\n}', "json"),
        (b'{"text": "a"} {"text": "b"}', "json"),
    ],
)
def test_every_way_to_write_the_same_objects(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "a").write_bytes(content)
    found = found_in(tmp_path)
    assert found.files[0].format == expected
    assert [text for text in texts_in(found) if text] == ["a", "b"] * (2 if content.count(b"a") > 1 else 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.c", b"{ int x; }\n{ int y; }\n"),
        ("a.c", b"{\n int x;\n}\n"),
        ("a.js", b'{ let a = "}"; }'),
        ("a.md", b'[link](x)\nSay {"text": 1}.\n'),
        ("a.txt", b"[1, 2]"),
        ("a.js", b'["a", "b"].map(f)\n'),
        ("a.txt", b'["a quotation]'),
        ("a.txt", b"PAR1 is a magic number, BZh another"),
        ("a.md", b"title\n\nline three\n" + LINES),
        ("a.txt", b"{" + b"x" * HEAD_BYTES + b"\n" + LINES),
    ],
)
def test_what_looks_alike_and_is_text(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    found = found_in(tmp_path)
    assert found.summary() == [f"read as text, a file per document: {tmp_path / name}"]
    assert texts_in(found) == [content.decode()]


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(MARK + b"text")
    assert texts_in(found_in(tmp_path)) == ["text"]


def test_a_first_line_longer_than_what_is_looked_at(tmp_path: Path) -> None:
    long = "x" * (HEAD_BYTES + 9)
    (tmp_path / "a").write_text(json.dumps({"text": long}) + '\n{"text": "b"}')
    (tmp_path / "b").write_text(json.dumps([{"text": long}, {"text": "b"}]))
    found = found_in(tmp_path)
    assert [file.format for file in found.files] == ["jsonl", "json"]
    assert texts_in(found) == [long, "b"] * 2


def test_a_damaged_first_line_does_not_make_one_document_of_all(tmp_path: Path) -> None:
    """A file that was cut into parts of equal size begins like that."""
    (tmp_path / "a.txt").write_bytes(b'xt": "half"}\n' + LINES)
    bad, *rest = records(found_in(tmp_path))
    with pytest.raises(ConfigError, match="not JSON, line 1 column 1"):
        bad.texts(("text",))
    assert str(bad.place) == f"{tmp_path / 'a.txt'}, line 1"
    assert [record.texts(("text",)) for record in rest] == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("name", ["_SUCCESS", "empty.jsonl", "blank.txt", "empty.json"])
@pytest.mark.parametrize("content", [b" \n", b" [\n]\n"])
def test_an_empty_file_has_no_documents_and_no_keys(tmp_path: Path, name: str, content: bytes) -> None:
    """Such a file stands among those that Spark writes."""
    (tmp_path / name).write_bytes(MARK + content)
    (tmp_path / "part-0").write_bytes(LINES)
    found = found_in(tmp_path)
    assert f"read as empty, without a document: {tmp_path / name}" in found.summary()
    assert len(records(found)) == 2


def tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO())
    return content.getvalue()


def zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a.jsonl", LINES)
    return content.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "advice"),
    [
        ("a.tar", tar(), "a tar archive; unpack it"),
        ("a.tgz", gzip.compress(tar()), "a tar archive; unpack it"),
        ("a.zip", zipped(), "a zip archive; unpack it"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(LINES)), "compressed twice, the second time with gzip"),
        ("a.jsonl", LINES.decode().encode("utf-16"), "text in UTF-16, must be in UTF-8"),
        ("a.jsonl", LINES.decode().encode("utf-32"), "text in UTF-32, must be in UTF-8"),
        ("a.jsonl", b"\0\0\xfe\xff" + LINES.decode().encode("utf-32-be"), "text in UTF-32, must be in UTF-8"),
        ("a.jsonl", LINES.decode().encode("utf-16-le"), "holds NUL bytes: it is binary, or text in UTF-16"),
        ("a.txt", b"abc\0d", "holds NUL bytes: it is binary, or text in UTF-16"),
        ("a.idx", b"MMIDIDX\0\0", "the index of a Megatron dataset, which is tokenized already"),
        ("a.arrow", b"ARROW1\0\0", "an Arrow file; write its table as Parquet"),
        ("a.csv", b"text,id\nx,1\n", "a table in CSV; convert it to JSON lines or Parquet, or --input-format text"),
        ("a.warc.wet.gz", gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n"), "a web archive (WARC, WET); write"),
        ("a.json-seq", b'\x1e{"text": "a"}\n\x1e{"text": "b"}\n', "a JSON text sequence; take out its"),
        ("part-0", MARK + b'["a", "b"]', "a JSON array of strings, must be of objects; write objects with a text"),
        ("a.json", b'[\n  "a\\"b"\n]\n', "a JSON array of strings, must be of objects"),
        ("a", b'["a", "' + b"b" * HEAD_BYTES + b'"]', "a JSON array of strings, must be of objects"),
        ("a.json", b"[1, 2]", "named JSON and does not begin with an object or an array of objects"),
        ("tsconfig.json", b"// comment\n{}", "named JSON and does not begin with an object or an array of objects"),
    ],
)
def test_what_cannot_be_meant_is_refused_or_left_out(tmp_path: Path, name: str, content: bytes, advice: str) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.jsonl").write_bytes(LINES)
    with pytest.raises(ConfigError) as error:
        found_in(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / name}: {advice}")
    assert str(error.value).endswith("(--skip-bad leaves such files out)")
    found = found_in(tmp_path, skip_bad=True)
    assert found.left_out[0].startswith(f"{tmp_path / name}: {advice}")
    assert texts_in(found) == ["a", "b"]


@pytest.mark.parametrize("content", [b'{"body": "a"}\n', b'[{"body": "a"}]', b'{\n"body": "a"\n}'])
def test_a_first_record_without_the_key_is_named_before_anything_is_tokenized(tmp_path: Path, content: bytes) -> None:
    """A file of settings in a folder of source code is one, too."""
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.txt: no key 'text', its keys are 'body'; name one with --json-keys, or"):
        found_in(tmp_path)
    assert len(records(found_in(tmp_path, keys=("body",)))) == 1
    assert len(found_in(tmp_path, skip_bad=True).files) == 1, "its other records may have it"
    (text,) = find_input([str(tmp_path)], input_format="text", pattern="*").files
    assert text.format == "text"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"text": "a"}, {"text": "b"', "object 2 does not end, or has more than 1,073,741,824 bytes"),
        (b'[{"text": "a"}, {"text": "b}]', "object 2 does not end, or has more than"),
        (b'[{"text": "a"}, {"text": "b"},', "its array does not end after object 2; is the file complete?"),
        (b'[{"text": "a"}, "b"]', "holds '\"' after object 1, where only JSON objects may be"),
        (b'[{"text": "a"}]]', "holds ']' after object 1, where only JSON objects may be"),
    ],
)
def test_json_that_ends_early_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        records(found_in(tmp_path))
    assert str(error.value).startswith(f"{tmp_path / 'a.json'}: {message}")


def test_an_object_beyond_the_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_objects, "MIB", 16)
    (tmp_path / "a.json").write_bytes(b'[{"text": "a"}, {"text": "' + b"b" * 90 + b'"}]')
    with (tmp_path / "a.json").open("rb") as stream:
        found = json_objects.json_objects(stream, limit_bytes=40, source="a.json")
        assert next(found) == b'{"text": "a"}'
        with pytest.raises(ConfigError, match=r"a\.json: object 2 does not end, or has more than 40 bytes"):
            next(found)


@given(
    st.lists(
        st.dictionaries(st.text(max_size=3), st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.text()))
    ),
    st.integers(1, 40),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
)
def test_objects_are_cut_where_json_ends_them(
    objects: list[object], read_bytes: int, indent: int | None, ascii_only: bool
) -> None:
    written = json.dumps(objects, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_objects, "MIB", read_bytes)
        cut = json_objects.json_objects(io.BytesIO(written), limit_bytes=2**20, source="")
        assert [json.loads(text) for text in cut] == objects


def test_thousands_of_files_are_a_line_per_format(tmp_path: Path) -> None:
    for i in range(300):
        (tmp_path / f"{i:03}.{'abcdefg'[i % 7]}").write_text("text")
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    assert found_in(tmp_path).summary() == [
        "read as text, a file per document: 300 files (43 .a, 43 .b, 43 .c, 43 .d, 43 .e, 85 others)",
        f"read as JSON lines: {tmp_path / 'a.jsonl'}",
        f"read as JSON lines, gzip: {tmp_path / 'b.jsonl.gz'}",
    ]


def test_a_pipe_is_named(tmp_path: Path) -> None:
    """As of a shell's <(zcat a.gz); its content would be gone after the look at it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"--input .*pipe: a pipe or a device, which is read only once; write its"):
        found_in(tmp_path / "pipe")


def test_a_given_format_is_taken_and_compression_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"abc\0"))
    assert look_at(tmp_path / "a.txt", "text", ("text",)) == input_formats.Content(format="text", packing="gzip")
