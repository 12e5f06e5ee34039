"""A run that is killed while it writes sample indices leaves nothing that the next one takes for whole."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.training.config import DataConfig
from megatron.training.data import build_dataset
from megatron.training.index_cache import built_completely
from tests.unit.training.test_data import byte_level, data_config, write_corpus


def samples(config: DataConfig) -> list[list[int]]:
    dataset = build_dataset(config, byte_level(), split="train", num_samples=5)
    return [dataset[i]["tokens"].tolist() for i in range(5)]


def die_while_saving(config: DataConfig, file: int) -> None:
    """Killed with half of a file written."""
    save, seen = np.save, iter(range(10))

    def half(path: str, array: np.ndarray, **options: Any) -> None:
        save(path, array, **options)
        if next(seen) == file:
            os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    np.save = half
    samples(config)


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


def test_another_run_that_builds_at_the_same_time_is_left_alone(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "index.npy").write_text("whole")
        # Another process of this host, which lives: the one that started the tests.
        other = folder.with_suffix(f".{os.getppid()}")
        other.mkdir()
        built_completely(tmp_path / "inner", lambda inner: None)

    (tmp_path / "inner").mkdir()
    built_completely(tmp_path, build)
    (other,) = tmp_path.glob(".building.*")
    built_completely(tmp_path, lambda folder: None)
    assert other.is_dir()
    assert (tmp_path / "index.npy").read_text() == "whole"
