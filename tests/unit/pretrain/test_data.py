"""Tensor shapes: B samples of a microbatch, S the whole sequence."""

import dataclasses
import multiprocessing
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero.errors import ConfigError
from hetero.plan.batch_sizes import BatchRampup
from hetero.plan.ir import Plan
from megatron.pretrain.cli.training_config import DataConfig
from megatron.pretrain.corpus_index import TYPE_CODES
from megatron.pretrain.data import build_dataset, microbatches
from megatron.pretrain.tokenizer import NullTokenizer
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.unit.pretrain.corpora import EOD, SEQ, byte_level, data_config, write_corpus

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """40 documents; document i says i, eight times, and ends."""
    return write_corpus(tmp_path / "corpus", [[i] * 8 + [EOD] for i in range(40)])


def tokens(dataset: Any, i: int) -> list[int]:
    return dataset[i]["tokens"].tolist()


def test_labels_are_the_next_tokens_and_none_is_lost_to_padding(tmp_path: Path) -> None:
    everything = list(range(EOD + 1))
    prefix = write_corpus(tmp_path / "all", [everything])
    dataset = build_dataset(data_config(train_data_path=(prefix,)), byte_level(), split="train", num_samples=32)
    seen: set[int] = set()
    for i in range(32):
        sample = dataset[i]
        first = int(sample["tokens"][0])
        assert sample["tokens"].tolist() == everything[first : first + SEQ]
        assert sample["labels"].tolist() == everything[first + 1 : first + 1 + SEQ]
        assert sample["loss_mask"].tolist() == [1.0] * SEQ
        assert sample["position_ids"].tolist() == list(range(SEQ))
        seen.update(sample["labels"].tolist())
    assert seen == set(everything[1:])


def test_eod_mask_loss_leaves_out_what_follows_the_end_of_a_document(corpus: str) -> None:
    dataset = build_dataset(
        data_config(data_path=(corpus,), eod_mask_loss=True), byte_level(), split="train", num_samples=40
    )
    for i in range(40):
        sample = dataset[i]
        assert torch.equal(sample["loss_mask"] == 0, sample["tokens"] == EOD)
    assert any(EOD in dataset[i]["tokens"] for i in range(40))


def test_one_corpus_repeats_until_it_is_enough(corpus: str) -> None:
    dataset = build_dataset(data_config(data_path=(corpus,)), byte_level(), split="train", num_samples=500)
    assert len(dataset) >= 500
    assert all(len(tokens(dataset, i)) == SEQ for i in range(500))


def test_split_keeps_other_documents_out(corpus: str) -> None:
    dataset = build_dataset(data_config(data_path=(corpus,), split="1,3"), byte_level(), split="train", num_samples=60)
    assert {t for i in range(60) for t in tokens(dataset, i)} == {*range(10), EOD}


@pytest.mark.parametrize("cached", [True, False])
def test_weights_decide_the_blend(tmp_path: Path, cached: bool) -> None:
    a = write_corpus(tmp_path / "a", [[1] * 100])
    b = write_corpus(tmp_path / "b", [[2] * 100])
    config = data_config(train_data_path=("3", a, "1.0", b), data_cache_path=tmp_path / "cache" if cached else None)
    dataset = build_dataset(config, byte_level(), split="train", num_samples=400)
    assert Counter(tokens(dataset, i)[0] for i in range(400)) == {1: 300, 2: 100}


@pytest.mark.slow
def test_heavy_corpus_among_many_light_ones(tmp_path: Path) -> None:
    """Rounding up every light corpus asks the heavy one for more than its share of the samples."""
    heavy = write_corpus(tmp_path / "heavy", [[1] * (SEQ * 19 + 1)])
    light = [write_corpus(tmp_path / str(i), [[2] * (SEQ + 1)]) for i in range(11)]
    blend = ("0.9", heavy, *(item for prefix in light for item in ("0.009", prefix)))
    assert len(build_dataset(data_config(train_data_path=blend), byte_level(), split="train", num_samples=20)) >= 20


def test_blend_without_weights_reads_each_corpus_once(tmp_path: Path) -> None:
    a = write_corpus(tmp_path / "a", [[1] * (SEQ * 6 + 1)])
    b = write_corpus(tmp_path / "b", [[2] * (SEQ * 2 + 1)])
    config = data_config(train_data_path=(a, b))
    dataset = build_dataset(config, byte_level(), split="train", num_samples=8)
    assert Counter(tokens(dataset, i)[0] for i in range(8)) == {1: 6, 2: 2}
    with pytest.raises(ConfigError, match=r"8 samples of 8 tokens, the run needs 9; a blend repeats only with weights"):
        build_dataset(config, byte_level(), split="train", num_samples=9)


def test_mock_data_keeps_to_the_vocabulary_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = build_dataset(data_config(mock_data=True), NullTokenizer(vocab_size=100), split="train", num_samples=50)
    assert max(t for i in range(50) for t in tokens(dataset, i)) < 100
    assert list(tmp_path.iterdir()) == []


def test_building_prints_and_warns_nothing(
    corpus: str,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in every process of a training; megatron-core 0.19 says that it has none otherwise.
    monkeypatch.setenv("RANK", "0")
    for config in (data_config(data_path=("1", corpus, "1", corpus)), data_config(mock_data=True)):
        build_dataset(config, byte_level(), split="train", num_samples=4)
    assert capfd.readouterr() == ("", "")
    # From Python 3.12 on there is one about any fork of a process with threads; Python shows no user this category.
    seen = [str(each.message) for each in recwarn.list if each.category is not DeprecationWarning]
    assert seen == []


def test_corpus_that_is_written_anew_is_not_read_by_its_old_indices(corpus: str, tmp_path: Path) -> None:
    config = data_config(data_path=(corpus,), split="1")
    build_dataset(config, byte_level(), split="train", num_samples=30)
    write_corpus(tmp_path / "corpus", [[7] * 20, [8] * 300])
    dataset = build_dataset(config, byte_level(), split="train", num_samples=30)
    assert {t for i in range(30) for t in tokens(dataset, i)} == {7, 8}


def test_missing_file_is_named(tmp_path: Path, corpus: str) -> None:
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(ConfigError, match=r"corpus\.bin: no such file"):
        build_dataset(data_config(data_path=(corpus,)), byte_level(), split="train", num_samples=1)
    with pytest.raises(ConfigError, match=r"corpus\.idx\.idx: no such file"):
        build_dataset(data_config(data_path=(corpus + ".idx",)), byte_level(), split="train", num_samples=1)


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        (".idx", b"not an index", "no index of a Megatron dataset"),
        (".idx", None, "damaged, 842 bytes are due and 421 there"),
        (".bin", None, "360 bytes, its index counts 720; was it copied whole"),
    ],
)
def test_damaged_files_are_named(corpus: str, suffix: str, content: bytes | None, message: str) -> None:
    file = Path(corpus + suffix)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(ConfigError, match=message):
        build_dataset(data_config(data_path=(corpus,)), byte_level(), split="train", num_samples=1)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        # 40 documents: 34 bytes of header, int32 lengths, int64 offsets, int64 documents.
        (18, 2**62, "damaged, [0-9]+ bytes are due and 842 there"),
        (26, 0, "damaged, 514 bytes are due"),
        (34, 0xFFFFFFFF_FFFFFFFF, "its lengths and offsets do not agree"),
        (34 + 4 * 40 + 8 * 7, 10**15, "its lengths and offsets do not agree"),
        (34 + 4 * 40 + 8 * 7, 0, "its lengths and offsets do not agree"),
        (34 + 12 * 40 + 8 * 7, 2**40, "its documents do not ascend"),
        (34 + 12 * 40, -1, "its documents do not begin with its first sequence"),
        (34 + 12 * 40 + 8 * 40, 41, "its documents end after 41 of 40 sequences"),
    ],
)
def test_an_index_that_contradicts_itself_is_named(corpus: str, at: int, value: int, message: str) -> None:
    """megatron-core reads where the offsets say, in C++."""
    index = Path(corpus + ".idx")
    content = bytearray(index.read_bytes())
    content[at : at + 8] = (value % 2**64).to_bytes(8, "little")
    index.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"corpus\.idx: .*{message}"):
        build_dataset(data_config(data_path=(corpus,)), byte_level(), split="train", num_samples=1)


def test_an_index_with_something_behind_it_is_named(corpus: str) -> None:
    index = Path(corpus + ".idx")
    index.write_bytes(index.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match="damaged, 842 bytes are due and 843 there"):
        build_dataset(data_config(data_path=(corpus,)), byte_level(), split="train", num_samples=1)


def test_tokens_below_zero_are_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[1] * 20])
    tokens = np.fromfile(prefix + ".bin", np.uint16)
    tokens[3] = 2**16 - 2
    tokens.tofile(prefix + ".bin")
    index = bytearray(Path(prefix + ".idx").read_bytes())
    index[17] = DType.int16.value
    Path(prefix + ".idx").write_bytes(index)
    with pytest.raises(
        ConfigError, match="token id -2 in sequence 0 at position 3, ByteLevelTokenizer has ids from 0 to"
    ):
        build_dataset(data_config(train_data_path=(prefix,)), byte_level(), split="train", num_samples=1)


def test_corpus_without_documents(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "none", [])
    with pytest.raises(ConfigError, match="holds no documents"):
        build_dataset(data_config(data_path=(prefix,)), byte_level(), split="train", num_samples=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"seq_length": 400}, r"351 tokens for train \(documents 0 to 39 of 40\), one sample needs 401"),
        ({"split": "1,99"}, "0 tokens for train"),
        ({"seq_length": 1}, "at least 2 tokens"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_too_few_tokens(corpus: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_dataset(data_config(data_path=(corpus,), **overrides), byte_level(), split="train", num_samples=1)


def test_data_of_another_tokenizer_are_refused(corpus: str) -> None:
    message = "corpus: token id 256 in sequence 0 at position 8, NullTokenizer has ids from 0 to 99: raise --vocab-size"
    with pytest.raises(ConfigError, match=message):
        build_dataset(data_config(data_path=(corpus,)), NullTokenizer(vocab_size=100), split="train", num_samples=1)


LATE = 2**16 + 100
"""Tokens in front of the first wrong one: more than are looked at when a run starts."""

LONG = 1024
"""Tokens of a sample, so that few samples read them all."""


def corpus_with_a_late_token(prefix: Path, dtype: type[np.integer[Any]], token: int) -> str:
    """Sequence 0 has ids that every tokenizer has, sequence 1 has ``token`` at position 5."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    good, bad = np.ones(LATE, dtype), np.ones(2 * LONG, dtype)
    bad[5] = token
    for ids in (good, bad):
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "token"),
    [
        (np.uint16, 100, 100),
        (np.uint16, 100, 2**16 - 1),
        (np.int32, 100, 2**31 - 1),
        (np.int32, 100, -1),
        (np.int64, 2**20, -(2**63)),
        # Their largest id is below the vocabulary.
        (np.int8, 200, -1),
        (np.int16, 2**17, -1),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_ids_that_the_tokenizer_lacks_are_named_where_they_are_read(
    tmp_path: Path, dtype: type[np.integer[Any]], vocab_size: int, token: int, num_workers: int
) -> None:
    """In one line also if another process reads, and with the corpus of the blend that has them."""
    good = write_corpus(tmp_path / "good", [[1] * LATE])
    bad = corpus_with_a_late_token(tmp_path / "bad", dtype, token)
    num_steps = 2 * (LATE // LONG + 2) // 12 + 1
    dataset = build_dataset(
        data_config(train_data_path=("1", good, "1", bad), seq_length=LONG),
        NullTokenizer(vocab_size=vocab_size),
        split="train",
        num_samples=12 * num_steps,
    )
    a_plan = one_rank_plan()
    place = a_plan.placement(0)
    assert place is not None
    steps = microbatches(dataset, a_plan, place, first_step=0, num_steps=num_steps, num_workers=num_workers)
    with pytest.raises(ConfigError) as caught:
        for _ in steps:
            pass
    assert re.fullmatch(
        rf"sample [0-9]+: {bad}: token id {token} in sequence 1 at position 5, NullTokenizer has ids from 0 to "
        rf"{vocab_size - 1}: raise --vocab-size, or preprocess the text again",
        str(caught.value),
    )


@pytest.mark.parametrize(("dtype", "vocab_size"), [(np.uint16, 2**16 + 1), (np.int8, 2**7), (np.int32, 2**31)])
def test_the_largest_id_of_a_type_may_be_one_of_the_tokenizer(
    tmp_path: Path, dtype: type[np.integer[Any]], vocab_size: int
) -> None:
    largest = int(np.iinfo(dtype).max)
    prefix = corpus_with_a_late_token(tmp_path / "corpus", dtype, largest)
    dataset = build_dataset(
        data_config(train_data_path=(prefix,), seq_length=LONG),
        NullTokenizer(vocab_size=vocab_size),
        split="train",
        num_samples=LATE // LONG + 2,
    )
    assert largest in {token for i in range(len(dataset)) for token in dataset[i]["labels"].tolist()}


def test_tokens_that_are_no_integers(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[1] * 40])
    index = bytearray(Path(prefix + ".idx").read_bytes())
    index[17] = DType.float32.value
    Path(prefix + ".idx").write_bytes(index)
    with pytest.raises(ConfigError, match=r"corpus\.idx: says that token ids are float32, must be integers"):
        build_dataset(data_config(train_data_path=(prefix,)), byte_level(), split="train", num_samples=1)


@pytest.mark.parametrize("ended", [0, 2])
def test_sequences_that_no_document_ends_with(tmp_path: Path, ended: int) -> None:
    """Whoever writes sequences one by one has to end documents; megatron-core reads such files no more than we do."""
    prefix = str(tmp_path / "corpus")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for i in range(3):
        builder.add_item(torch.ones(40, dtype=torch.int32))
        if i < ended:
            builder.end_document()
    builder.finalize(prefix + ".idx")
    with pytest.raises(AssertionError):
        IndexedDataset(prefix)
    message = rf"corpus\.idx: its documents end after {ended} of 3 sequences; .*end_document\(\) after the last item"
    with pytest.raises(ConfigError, match=message):
        build_dataset(data_config(train_data_path=(prefix,)), byte_level(), split="train", num_samples=1)


def test_indices_follow_the_lengths_of_all_documents(tmp_path: Path) -> None:
    """Also where the first quarter of a million are the same, as is the size of the files."""
    first = np.full(2**18, 1)

    def rows(last: list[int], cache: str) -> list[list[int]]:
        lengths = [*first, *last]
        builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.uint16)
        builder.add_document(np.arange(sum(lengths)) % 250, lengths)
        builder.finalize(str(tmp_path / "corpus.idx"))
        config = data_config(
            data_path=(str(tmp_path / "corpus"),), split="1", data_cache_path=tmp_path / cache, seq_length=LONG
        )
        dataset = build_dataset(config, byte_level(), split="train", num_samples=2**18 // LONG)
        return [tokens(dataset, i) for i in range(0, len(dataset), 2**18 // LONG // 8)]

    rows([90, 10], "cache")
    assert rows([10, 90], "cache") == rows([10, 90], "other cache")


@pytest.mark.parametrize(
    "blend", [("0.5", "a", "b"), ("a", "0.5", "b", "0.5"), ("-1", "a"), ("0", "a", "1", "b"), ("1",)]
)
def test_malformed_blends(blend: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="give prefixes alone, or a positive weight before each"):
        build_dataset(data_config(data_path=blend), byte_level(), split="train", num_samples=1)


def test_no_data_at_all() -> None:
    with pytest.raises(ConfigError, match="nothing to read; give --train-data-path"):
        build_dataset(data_config(), byte_level(), split="train", num_samples=1)


def test_cache_that_cannot_be_written_or_is_damaged(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--data-cache-path must name a writable folder"):
        build_dataset(
            data_config(data_path=(corpus,), data_cache_path=tmp_path / "file"),
            byte_level(),
            split="train",
            num_samples=1,
        )
    config = data_config(data_path=(corpus,), data_cache_path=tmp_path / "cache")
    build_dataset(config, byte_level(), split="train", num_samples=1)
    (index,) = (tmp_path / "cache").rglob("*shuffle_index.npy")
    index.write_bytes(index.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="if this one is damaged, remove it"):
        build_dataset(config, byte_level(), split="train", num_samples=1)


def rank_reads(rank: int, configs: list[DataConfig]) -> list[list[int]]:
    datasets = [build_dataset(config, byte_level(), split="train", num_samples=20) for config in configs]
    return [tokens(dataset, i) for dataset in datasets for i in range(20)]


def rank_reports(rank: int, configs: list[DataConfig]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_dataset(configs[rank], byte_level(), split="train", num_samples=20)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_read_what_one_process_reads(corpus: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", [[200] * 100])
    blends = ((corpus,), (corpus, other), ("1", corpus, "2", other))
    alone, shared = (
        [data_config(data_path=blend, data_cache_path=tmp_path / name) for blend in blends]
        for name in ("alone", "shared")
    )
    assert run_ranks(rank_reads, 2, shared) == [rank_reads(0, alone)] * 2
    indices = [sorted(file.name for file in (tmp_path / name).rglob("*.npy")) for name in ("alone", "shared")]
    assert indices[0] == indices[1]


@pytest.mark.dist
def test_ranks_fail_together(corpus: str, tmp_path: Path) -> None:
    good, bad = data_config(data_path=(corpus,)), data_config(data_path=(str(tmp_path / "nowhere"),))
    messages = run_ranks(rank_reports, 2, [good, bad])
    assert len(set(messages)) == 1
    assert f"{tmp_path}/nowhere.idx: no such file" in messages[0]
    (tmp_path / "copy").mkdir()
    copy = write_corpus(tmp_path / "copy" / "corpus", [[1] * 20])
    messages = run_ranks(rank_reports, 2, [good, data_config(data_path=(copy,))])
    assert all("corpus: ranks 1 have another one than rank 0; copy them anew" in message for message in messages)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    shared = data_config(data_path=(corpus,), data_cache_path=tmp_path / "cache")
    messages = run_ranks(rank_reports, 2, [good, shared])
    assert len(set(messages)) == 1
    assert f"{tmp_path}/cache: every user may write it (mode 0777)" in messages[0]


def uneven_plan() -> Plan:
    coarse = replica(
        stage(layers=(0, 4), ranks=(0, 1), dp=2, mbs=2), stage(layers=(4, 6), ranks=(2,), mbs=2), num_samples=8
    )
    return plan(gpt2_model(), [coarse, replica(stage(layers=(0, 6), ranks=(3,)), num_samples=4)], seq_length=SEQ)


def interleaved_plan() -> Plan:
    """Ranks 0 and 1 have the first stage and the last one."""
    there, back = (stage(layers=held, ranks=(0, 1), dp=2, mbs=3) for held in ((0, 1), (4, 6)))
    between = stage(layers=(1, 4), ranks=(2,), mbs=6)
    model = gpt2_model(tied_embeddings=False)
    return plan(model, [replica(there, between, back, num_samples=12)], seq_length=SEQ)


def one_rank_plan() -> Plan:
    return plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,), mbs=3), num_samples=12)], seq_length=SEQ)


def rows_of_steps(dataset: Any, a_plan: Plan, ranks: Sequence[int], **steps: int) -> list[list[tuple[int, ...]]]:
    """Samples of each step as the ranks of a plan read them, sorted."""
    per_step: list[list[tuple[int, ...]]] = [[] for _ in range(steps["num_steps"])]
    for rank in ranks:
        place = a_plan.placement(rank)
        assert place is not None
        for rows, step in zip(per_step, microbatches(dataset, a_plan, place, num_workers=0, **steps), strict=True):
            rows += [tuple(row) for batch in step for row in batch.tokens_BS.tolist()]
    return [sorted(rows) for rows in per_step]


def test_plans_read_the_same_samples_at_the_same_step(corpus: str) -> None:
    dataset = build_dataset(data_config(data_path=(corpus,)), byte_level(), split="train", num_samples=36)
    expected = [sorted(tuple(tokens(dataset, i)) for i in range(n * 12, n * 12 + 12)) for n in range(3)]
    first_stages, last_stages = (0, 1, 3), (2, 3)
    for a_plan, ranks in (
        (one_rank_plan(), (0,)),
        (uneven_plan(), first_stages),
        (uneven_plan(), last_stages),
        (interleaved_plan(), (0, 1)),
    ):
        assert rows_of_steps(dataset, a_plan, ranks, first_step=0, num_steps=3) == expected
        assert rows_of_steps(dataset, a_plan, ranks, first_step=2, num_steps=1) == expected[2:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_microbatches_are_the_samples_in_order(corpus: str, num_workers: int) -> None:
    config = data_config(data_path=(corpus,), eod_mask_loss=True)
    dataset = build_dataset(config, byte_level(), split="train", num_samples=36)
    a_plan = uneven_plan()
    place = a_plan.placement(1)
    assert place is not None
    random_state = torch.get_rng_state()
    steps = list(microbatches(dataset, a_plan, place, first_step=1, num_steps=2, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [len(step) for step in steps] == [2, 2]
    for step, first in zip(steps, (12, 24), strict=True):
        for batch, indices in zip(step, ((first + 2, first + 3), (first + 6, first + 7)), strict=True):
            for name in ("tokens", "position_ids", "labels", "loss_mask"):
                expected = torch.stack([dataset[i][name] for i in indices])
                assert torch.equal(getattr(batch, f"{name}_BS"), expected)
            assert {getattr(batch, f.name).dtype for f in dataclasses.fields(batch)} == {torch.int64, torch.float32}
            assert batch.loss_mask_BS.dtype == torch.float32


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_grows(corpus: str, num_workers: int) -> None:
    """Of 6, 12 and 12 samples; the first stage of the first replica has two thirds, on two ranks of 2 each."""
    dataset = build_dataset(data_config(data_path=(corpus,)), byte_level(), split="train", num_samples=30)
    a_plan = uneven_plan()
    place = a_plan.placement(1)
    assert place is not None
    rampup = BatchRampup(start=6, increment=6, samples=6)
    steps = microbatches(
        dataset, a_plan, place, first_step=0, num_steps=3, num_workers=num_workers, varying_batch=rampup
    )
    expected = [[(2, 3)], [(8, 9), (12, 13)], [(20, 21), (24, 25)]]
    assert [[tuple(row) for batch in step for row in batch.tokens_BS.tolist()] for step in steps] == [
        [tuple(tokens(dataset, i)) for indices in step for i in indices] for step in expected
    ]
    with pytest.raises(ConfigError, match="with --global-batch-size 12 ends at sample"):
        microbatches(
            dataset, a_plan, place, first_step=len(dataset) // 12 + 1, num_steps=1, num_workers=0, varying_batch=rampup
        )


def test_readers_are_forks_whoever_started_the_rank() -> None:
    """Under a fork server's own method they would import everything anew, a minute for each rank of a busy host."""

    class Parents:
        def __len__(self) -> int:
            return 36

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            one = torch.ones(SEQ)
            ids = (one * os.getppid()).long()
            return {"tokens": ids, "position_ids": ids, "labels": ids, "loss_mask": one}

    a_plan = one_rank_plan()
    place = a_plan.placement(0)
    assert place is not None
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        step = next(microbatches(Parents(), a_plan, place, first_step=0, num_steps=1, num_workers=1))
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert {int(batch.tokens_BS.unique()) for batch in step} == {os.getpid()}


def test_steps_beyond_the_dataset_are_refused_at_once(corpus: str) -> None:
    dataset = build_dataset(data_config(data_path=(corpus,)), byte_level(), split="train", num_samples=36)
    a_plan = one_rank_plan()
    place = a_plan.placement(0)
    assert place is not None
    steps = len(dataset) // 12
    with pytest.raises(ConfigError, match=rf"step {steps + 1} with --global-batch-size 12 ends at sample"):
        microbatches(dataset, a_plan, place, first_step=steps, num_steps=1, num_workers=0)


def test_types_of_tokens_are_megatron_cores() -> None:
    """They are numbered here as well, where megatron-core is not loaded."""
    assert {member.value for member in DType} == set(TYPE_CODES)
