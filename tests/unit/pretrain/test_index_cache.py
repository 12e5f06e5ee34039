"""A run that is killed while it writes sample indices leaves nothing that the next one takes for whole."""

import ctypes
import errno
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.errors import ConfigError, DataError
from megatron.pretrain.cli.training_config import DataConfig
from megatron.pretrain.data import _read, build_dataset
from megatron.pretrain.index_cache import built_completely
from tests.helpers.refusing_file_system import refuse_links
from tests.unit.pretrain.corpora import byte_level, data_config, write_corpus


def samples(config: DataConfig) -> list[list[int]]:
    dataset = build_dataset(config, byte_level(), split="train", num_samples=5)
    return [dataset[i]["tokens"].tolist() for i in range(5)]


def die_while_saving(config: DataConfig, file: int) -> None:
    """The whole rank is killed with half of a file written."""
    save, seen, rank = np.save, iter(range(10)), os.getpid()

    def half(path: str, array: np.ndarray, **options: Any) -> None:
        save(path, array, **options)
        if next(seen) == file:
            os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(rank, signal.SIGKILL)
            time.sleep(60)

    np.save = half
    samples(config)


@pytest.mark.slow
@pytest.mark.parametrize("file", [0, 1, 2])
def test_killed_while_writing(tmp_path: Path, file: int) -> None:
    corpus = write_corpus(tmp_path / "corpus", [[document] * 40 for document in range(5)])
    cache = tmp_path / "cache"
    config = data_config(data_path=(corpus,), data_cache_path=cache)
    expected = samples(data_config(data_path=(corpus,), data_cache_path=tmp_path / "other"))
    process = multiprocessing.get_context("fork").Process(target=die_while_saving, args=(config, file))
    process.start()
    process.join(timeout=30)
    assert process.exitcode == -signal.SIGKILL
    assert list(cache.rglob(".building.*"))
    assert samples(config) == expected
    assert not list(cache.rglob(".building.*"))
    names = sorted(path.name for path in cache.rglob("*") if path.is_file())
    assert names == sorted(path.name for path in (tmp_path / "other").rglob("*") if path.is_file())


def test_what_is_there_is_read_and_not_written_again(tmp_path: Path) -> None:
    (tmp_path / "old.npy").write_text("old")

    def build(folder: Path) -> str:
        (folder / "new.npy").write_text("new")
        return (folder / "old.npy").read_text()

    before = (tmp_path / "old.npy").stat()
    assert built_completely(tmp_path, build) == "old"
    assert (tmp_path / "old.npy").stat().st_mtime_ns == before.st_mtime_ns
    assert {path.name for path in tmp_path.iterdir()} == {"old.npy", "new.npy"}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV], ids=errno.errorcode.get)
def test_a_resumed_run_reads_the_indices_of_the_first_where_there_are_no_hard_links(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run has nothing to link. Data is read from the files that stay, not from copies that are deleted."""
    asked = refuse_links(monkeypatch, number)
    corpus = write_corpus(tmp_path / "corpus", [[document] * 40 for document in range(5)])
    cache = tmp_path / "cache"
    config = data_config(data_path=(corpus,), data_cache_path=cache)
    first = samples(config)
    assert not asked
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    monkeypatch.setattr("megatron.pretrain.index_cache.shutil.rmtree", scrubbing_rmtree)
    assert samples(config) == first
    assert sorted(asked) == sorted(path.name for path in before)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == before


RMTREE = shutil.rmtree


def scrubbing_rmtree(folder: Path, ignore_errors: bool = False) -> None:
    """Delete a folder, and what its files hold: a network file system keeps nothing for who has still mapped it."""
    for path in folder.iterdir() if folder.exists() else ():
        path.write_bytes(bytes(path.stat().st_size))
    RMTREE(folder, ignore_errors=ignore_errors)


def test_of_other_runs_only_what_they_left_when_they_died_is_deleted(tmp_path: Path) -> None:
    host = socket.gethostname()
    lives, died = (tmp_path / f".building.{host}.{process}" for process in (os.getppid(), 1 << 22))
    lives.mkdir()
    died.mkdir()
    built_completely(tmp_path, lambda folder: None)
    assert [path.name for path in tmp_path.iterdir()] == [lives.name]


def hold_the_interpreter(microseconds: int) -> None:
    """Let no other thread of this process run, as C code does that never lets go of the interpreter's lock."""
    ctypes.PyDLL(None).usleep(microseconds)


def test_the_interpreter_is_free_while_indices_are_built(tmp_path: Path) -> None:
    """Shuffling holds it: a rank would miss its beats, and be taken for lost."""
    beats, stop = list[float](), threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            beats.append(time.monotonic())

    def build(folder: Path) -> None:
        if not (folder / "held").exists():
            held = [time.monotonic()]
            hold_the_interpreter(1_000_000)
            held.append(time.monotonic())
            (folder / "held").write_text(" ".join(map(str, held)))

    thread = threading.Thread(target=beat)
    thread.start()
    built_completely(tmp_path, build)
    stop.set()
    thread.join()
    first_s, last_s = map(float, (tmp_path / "held").read_text().split())
    assert [at_s for at_s in beats if first_s + 0.1 < at_s < last_s - 0.1]


def test_an_error_of_the_build_is_raised_here(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        raise ValueError("no documents")

    with pytest.raises(ValueError, match="no documents"):
        built_completely(tmp_path, build)
    with pytest.raises(OSError, match=r"ended with -9; was it killed for memory\?"):
        built_completely(tmp_path, lambda folder: os.kill(os.getpid(), signal.SIGKILL))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=[0o022, 0o002, 0o000, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_others_may_not_write_what_is_made_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", [[document] * 40 for document in range(5)])
    for cache in (None, tmp_path / "deep" / "below" / "cache"):
        config = data_config(data_path=(corpus,), data_cache_path=cache)
        first = samples(config)
        folder = cache or Path(f"{corpus}_cache")
        modes = {path.name: path.stat().st_mode for path in (folder, *folder.rglob("*"))}
        assert len(modes) == 6
        assert {name: oct(mode) for name, mode in modes.items() if mode & 0o022} == {}
        assert samples(config) == first


def test_what_is_being_built_is_out_of_reach(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        if folder != tmp_path:
            (folder / "mode").write_text(oct(folder.stat().st_mode & 0o777))

    built_completely(tmp_path, build)
    assert (tmp_path / "mode").read_text() == "0o700"


@pytest.mark.parametrize("what", ["cache", "cache/DIGEST", "cache/DIGEST/INDEX"])
def test_a_cache_that_others_may_write_is_refused_by_name(what: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", [[document] * 40 for document in range(5)])
    config = data_config(data_path=(corpus,), data_cache_path=tmp_path / "cache")
    samples(config)
    (digest,) = (tmp_path / "cache").iterdir()
    index = next(digest.glob("*sample_index.npy"))
    path = tmp_path / what.replace("DIGEST", digest.name).replace("INDEX", index.name)
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(ConfigError, match=rf"^{path}: its group may write it .*--data-cache-path a folder of your own"):
        samples(config)
    path.chmod(path.stat().st_mode & ~0o020)
    samples(config)


def test_indices_that_lead_elsewhere_are_an_error_with_a_fix(tmp_path: Path) -> None:
    """Numbers that megatron-core would not have written."""
    corpus = write_corpus(tmp_path / "corpus", [[document] * 40 for document in range(5)])
    config = data_config(data_path=(corpus,), data_cache_path=tmp_path / "cache")
    samples(config)
    (index,) = (tmp_path / "cache").rglob("*document_index.npy")
    np.save(index, np.load(index) + 1000)
    dataset = build_dataset(config, byte_level(), split="train", num_samples=5)
    with pytest.raises(DataError, match=r"^sample 0: its indices lead outside the data \(.*remove the folder"):
        _read(dataset, [0])
