"""Sample indices are numbers: whatever a file of a cache holds, it runs nothing."""

import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hetero.errors import ConfigError
from megatron.pretrain import core_datasets, data
from megatron.pretrain.data import build_dataset
from tests.helpers.checkpoints import Touch
from tests.unit.pretrain.corpora import byte_level, data_config, write_corpus

INDICES = ("document_index", "sample_index", "shuffle_index")


def as_pickle(path: Path, trace: Path) -> None:
    path.write_bytes(pickle.dumps(Touch(trace)))


def as_array_of_objects(path: Path, trace: Path) -> None:
    np.save(path, np.array([Touch(trace)], dtype=object), allow_pickle=True)


def as_archive(path: Path, trace: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, array=np.array([Touch(trace)], dtype=object), allow_pickle=True)


def as_fractions(path: Path, trace: Path) -> None:
    np.save(path, np.load(path).astype(np.float64))


def by_columns(path: Path, trace: Path) -> None:
    np.save(path, np.asfortranarray(np.zeros((6, 2), dtype=np.int32)))


def of_another_shape(path: Path, trace: Path) -> None:
    np.save(path, np.zeros((2, 2, 2), dtype=np.int32))


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", [[document] * 40 for document in range(5)])


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize(
    "spoil", [as_pickle, as_array_of_objects, as_archive, as_fractions, by_columns, of_another_shape]
)
@pytest.mark.parametrize("by", ["the process that builds", "a rank that reads"])
def test_a_file_of_the_cache_runs_nothing(
    by: str,
    spoil: Callable[[Path, Path], None],
    index: str,
    corpus: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = data_config(data_path=(corpus,))
    build_dataset(config, byte_level(), split="train", num_samples=5)
    (path,) = Path(f"{corpus}_cache").rglob(f"*{index}.npy")
    spoil(path, tmp_path / "was_run")
    if by == "a rank that reads":
        # As every rank but the first does: here, from the folder itself.
        monkeypatch.setattr(data, "built_completely", lambda cache, build: build(cache))
    with pytest.raises(ConfigError, match=rf"_cache/\w+: the sample indices cannot be .*{index}.*remove it"):
        build_dataset(config, byte_level(), split="train", num_samples=5)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("spoil", [as_pickle, as_array_of_objects])
def test_numpy_itself_would_run_it(spoil: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """The traps work."""
    spoil(tmp_path / "index.npy", tmp_path / "was_run")
    np.load(tmp_path / "index.npy", allow_pickle=True)
    assert (tmp_path / "was_run").exists()


def modules_that_load() -> list[ModuleType]:
    """The modules of this megatron-core's datasets that load arrays, or whose loader they call."""
    loaded = [module for name, module in sys.modules.items() if name.startswith("megatron.core.datasets.")]
    calls = re.compile(r"\b(?:numpy|np)\.(?:load|fromfile|memmap)\b|\bsafe_numpy_load\b|\bpickle\b|\btorch\.load\b")
    return [each for each in loaded if each.__file__ and calls.search(Path(each.__file__).read_text(encoding="utf-8"))]


def test_every_module_of_the_datasets_that_loads_has_our_numpy() -> None:
    names = {module.__name__.rpartition(".")[2] for module in modules_that_load()}
    assert {"gpt_dataset", "blended_dataset"} <= names <= {"gpt_dataset", "blended_dataset", "indexed_dataset"}
    for module in modules_that_load():
        assert isinstance(module.numpy, core_datasets._NumpyWithoutPickles), module.__name__
        assert not any(hasattr(module, other) for other in ("pickle", "load")), module.__name__


def test_every_loader_of_the_datasets_refuses(tmp_path: Path) -> None:
    """Those of a blend, too, which keeps its index nowhere here, and the function that 0.19 and newer have for it."""
    as_pickle(tmp_path / "index.npy", tmp_path / "was_run")
    for module in modules_that_load():
        loader = getattr(module, "safe_numpy_load", module.numpy.load)
        with pytest.raises(ValueError, match=r"index\.npy is damaged, or no array of numbers"):
            loader(str(tmp_path / "index.npy"), allow_pickle=True, mmap_mode="r")
    assert not (tmp_path / "was_run").exists()


def test_the_rest_is_numpy(tmp_path: Path) -> None:
    ours = core_datasets._NumpyWithoutPickles()
    assert ours.int64 is np.int64
    assert ours.concatenate is np.concatenate
    np.save(tmp_path / "index.npy", np.arange(5))
    assert ours.load(str(tmp_path / "index.npy"), allow_pickle=True).tolist() == [0, 1, 2, 3, 4]
