"""Files of training data that change while they are read: one error that names the file, in readers and without."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from hetero.errors import DataError
from megatron.pretrain import token_files
from megatron.pretrain.data import SampleDataset, build_dataset, microbatches
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.unit.pretrain.corpora import EOD, SEQ, byte_level, data_config, write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NUM_DOCUMENTS = 4000
"""Enough that what is read lies in many pages, of which the first stay when a file is cut."""


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", [[i % EOD] * 8 + [EOD] for i in range(NUM_DOCUMENTS)])


def build(prefix: str) -> SampleDataset:
    config = data_config(data_path=(prefix,), split="100, 0, 0")
    return build_dataset(config, byte_level(), split="train", num_samples=NUM_DOCUMENTS)


def read_all(dataset: SampleDataset, *, num_workers: int) -> None:
    whole = plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,), mbs=3), num_samples=12)], seq_length=SEQ)
    place = whole.placement(0)
    assert place is not None
    steps = NUM_DOCUMENTS // 12
    for _ in microbatches(dataset, whole, place, first_step=0, num_steps=steps, num_workers=num_workers):
        pass


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ["corpus.bin", "corpus.idx", "document_index", "sample_index", "shuffle_index"])
def test_a_file_that_is_cut_is_named(name: str, num_workers: int, prefix: str, tmp_path: Path) -> None:
    dataset = build(prefix)
    (path,) = [path for path in tmp_path.rglob("*") if name in path.name]
    size = path.stat().st_size
    os.truncate(path, 4096)
    with pytest.raises(DataError) as raised:
        read_all(dataset, num_workers=num_workers)
    said = f"{path}: 4096 bytes now, its index counts {size}; it was cut or written again while it was read: restore"
    assert str(raised.value).startswith(said)


def test_a_file_that_is_replaced_is_read_to_its_end(prefix: str) -> None:
    """What replaces it is another file, as a copy under another name that is then renamed."""
    dataset, before = build(prefix), [build(prefix)[i]["tokens"].tolist() for i in range(50)]
    Path(prefix + ".new").write_bytes(b"")
    Path(prefix + ".new").replace(prefix + ".bin")
    assert [dataset[i]["tokens"].tolist() for i in range(50)] == before


def test_a_disk_that_fails_is_named(prefix: str) -> None:
    dataset = build(prefix)
    failing = mock.patch.object(token_files.os, "pread", side_effect=OSError(5, "Input/output error"))
    with failing, pytest.raises(DataError, match=r"shuffle_index\.npy: cannot be read any more: Input/output error;"):
        dataset[0]


def test_samples_are_those_that_megatron_core_maps(prefix: str) -> None:
    """Of one corpus and of a blend, which has a dataset of megatron-core's for each."""

    def samples(*path: str) -> Sequence[torch.Tensor]:
        config = data_config(data_path=path, split="100, 0, 0")
        dataset = build_dataset(config, byte_level(), split="train", num_samples=NUM_DOCUMENTS)
        return [dataset[i]["tokens"] for i in range(200)]

    for path in ((prefix,), ("0.3", prefix, "0.7", prefix)):
        with contextlib.ExitStack() as stack:
            mapped = mock.patch("megatron.pretrain.data.read_from_files", lambda dataset, cache: dataset)
            stack.enter_context(mapped)
            theirs = samples(*path)
        assert np.array_equal(torch.stack(theirs).numpy(), torch.stack(samples(*path)).numpy())
