"""Reads tokens for training: megatron-core's dataset over ``.bin`` and ``.idx`` files, cut into microbatches.

Tensor shapes: B samples of a microbatch on this rank, S the whole sequence.

megatron-core checks its input with assertions on whatever rank meets them first, while the others wait for it at a
barrier. Here every rank looks at the files before that, and all of them fail together with one message.
"""

import contextlib
import copy
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise, tee
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from hetero.distributed.rank_consensus import check_same_everywhere, on_all_ranks
from hetero.errors import ConfigError, DataError
from hetero.plan.batch_shares import with_batch_size
from hetero.plan.batch_sizes import BatchSizes, VaryingBatch
from hetero.plan.ir import Placement, Plan
from hetero.plan.sample_order import microbatch_indices
from hetero.runtime.microbatch import Microbatch
from megatron.pretrain.cli.training_config import DataConfig
from megatron.pretrain.core_datasets import (
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    DType,
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)
from megatron.pretrain.corpus_index import HEADER_BYTES, parse_blend, read_index_header
from megatron.pretrain.data_readers import read_ahead
from megatron.pretrain.index_cache import built_completely, make_cache
from megatron.pretrain.token_files import read_from_files
from megatron.pretrain.token_ids import CheckedGPTDataset, check_first_tokens
from megatron.pretrain.tokenizer import Tokenizer

_CHECKED_AT_ONCE = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """Prefixes of ``.bin`` and ``.idx`` files, each with a weight or none.

    share: part of each one's documents that belongs here, as it begins and ends between 0 and 1.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    split: str
    flag: str
    share: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Corpus:
    """What the header of an ``.idx`` file says. ``lengths`` maps the file: tokens of each document."""

    prefix: str
    dtype: np.dtype[Any]
    lengths: np.ndarray


Sample = dict[str, torch.Tensor]
"""Tokens, position ids, labels and loss mask, each of shape [S]."""


class SampleDataset(Protocol):
    """Gives the samples of a run by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


Split = Literal["train", "valid", "test"]
_SPLITS: tuple[Split, ...] = ("train", "valid", "test")


def build_dataset(config: DataConfig, tokenizer: Tokenizer, *, split: Split, num_samples: int) -> SampleDataset:
    """Build a dataset whose item i is sample i of the run, the same on every rank and under every plan.

    One corpus repeats in epochs, each in its own order, until it fills ``train_samples``; so does a blend with
    weights, whose samples come in proportion to them. A blend without weights reads each corpus once. The order
    depends on the seed, the sequence length, the shares of ``--split`` and ``num_samples``: a run that resumes keeps
    all four.

    Collective over the world, if there is one: every rank calls it, idle ranks too. It gathers what each rank found in
    the files; then rank 0 builds the indices while the others wait at one barrier, and load what it built.

    Args:
        split: training, validation or test.
        num_samples: samples that the whole run will read.

    Raises:
        ConfigError: a file is missing, damaged, or of another vocabulary; too few tokens; ranks see different files;
            the index cache cannot be written or read.
    """
    if config.seq_length < 2:
        raise ConfigError(f"--seq-length {config.seq_length}: a sample needs at least 2 tokens")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"--seed {config.seed}: the order of samples is drawn by numpy, which takes 0 to {2**32 - 1}")
    blend = find_blend(config, split)
    if blend is None:
        core = _core_config(config, tokenizer)
        return _build(core, MockGPTDataset, split=split, num_samples=num_samples)

    cache = _check_on_all_ranks(blend, config, tokenizer)
    core = _core_config(
        config,
        tokenizer,
        blend=(list(blend.prefixes), list(blend.weights) if blend.weights else None),
        # megatron-core reads no exponents.
        split=",".join(f"{share:.9f}" for share in _split_around(blend.share, split)),
        path_to_cache=str(cache),
        # They are read by ranges, see read_from_files.
        mmap_bin_files=False,
        # A blend is one sample per corpus longer than asked for, and its heaviest corpus has to fill that: half a
        # percent more, as is the default, does not do it when corpora are many and samples few.
        mid_level_dataset_surplus=max(0.005, 2 * len(blend.prefixes) / max(num_samples, 1)),
    )
    dataset = _build(core, CheckedGPTDataset, split=split, num_samples=num_samples)
    if len(dataset) < num_samples:
        raise ConfigError(
            f"{blend.flag} {' '.join(blend.prefixes)}: {len(dataset)} samples of {config.seq_length} tokens, the run "
            f"needs {num_samples}; a blend repeats only with weights, e.g. 1.0 {' 1.0 '.join(blend.prefixes)}"
        )
    return dataset


def microbatches(
    dataset: SampleDataset,
    plan: Plan,
    placement: Placement,
    *,
    first_step: int,
    num_steps: int,
    num_workers: int,
    varying_batch: VaryingBatch | None = None,
) -> Iterator[list[Microbatch]]:
    """Yield this rank's microbatches, one list per step, read ahead by ``num_workers`` processes; 0 reads in this one.

    About one step is kept ready beyond the one in hand. Only ranks of first and last stages need it.

    Args:
        placement: of any of the rank's stages, which all see the same samples.
        dataset: as :func:`build_dataset` returns it, of ``plan.seq_length`` tokens per sample.
        first_step: steps done before, by a run that is resumed.
        varying_batch: changes the batch of a step, at most to that of ``plan``.

    Raises:
        ConfigError: the dataset ends before step ``first_step + num_steps``; or, when the iterator comes to the step,
            a sample holds what is no id of the tokenizer.
        DataError: when the iterator comes to the step, a file of the dataset or a process that reads it was lost.
    """
    batches = BatchSizes(plan.global_batch_size, varying_batch)
    needed = batches.first_sample(first_step + num_steps)
    if needed > len(dataset):
        raise ConfigError(
            f"dataset: {len(dataset)} samples, but step {first_step + num_steps} with --global-batch-size "
            f"{plan.global_batch_size} ends at sample {needed}; build it for the whole run"
        )
    # The loader goes through the steps ahead of who takes what it has loaded.
    ahead, counted = tee(_indices_of_steps(plan, placement, batches, range(first_step, first_step + num_steps)))
    read = read_ahead(
        partial(_read, dataset),
        (list(indices) for step in ahead for indices in step),
        num_workers=num_workers,
        ahead=plan.replicas[placement.replica].num_microbatches(placement.stage),
    )
    return _by_step(read, map(len, counted))


def _indices_of_steps(
    plan: Plan, placement: Placement, batches: BatchSizes, steps: Iterable[int]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The samples of each microbatch of each step."""
    sized = plan
    for step in steps:
        if (size := batches.size(step)) != sized.global_batch_size:
            sized = with_batch_size(plan, size)
        yield microbatch_indices(sized, placement, first_sample=batches.first_sample(step))


def _by_step(batches: Iterator[Microbatch], counts: Iterable[int]) -> Iterator[list[Microbatch]]:
    for count in counts:
        yield list(islice(batches, count))


def _read(dataset: SampleDataset, indices: Sequence[int]) -> Microbatch:
    samples = []
    for index in indices:
        try:
            samples.append(dataset[index])
        except ConfigError as error:
            raise ConfigError(f"sample {index}: {error}") from None
        except (IndexError, ValueError, OverflowError) as error:
            raise DataError(
                f"sample {index}: its indices lead outside the data ({error}); remove the folder of indices "
                "(--data-cache-path, or the one next to the data whose name ends in _cache), and go on from the last "
                "checkpoint"
            ) from error
    return Microbatch(
        tokens_BS=torch.stack([sample["tokens"] for sample in samples]),
        position_ids_BS=torch.stack([sample["position_ids"] for sample in samples]),
        labels_BS=torch.stack([sample["labels"] for sample in samples]),
        loss_mask_BS=torch.stack([sample["loss_mask"] for sample in samples]),
    )


class _Builder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]  # megatron-core has no types
    """Builds indices with errors that say what to do.

    A blend's own index is not cached but computed by each rank, which takes milliseconds: BlendedDataset asks
    torch.distributed for the rank before it writes, also where it was never initialised.
    """

    @staticmethod
    def build_generic_dataset(cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any) -> Any:
        *rest, config = args
        if cls is BlendedDataset:
            return BlendedDataset(*rest, _cached_in(config, None))
        cache = None if config.path_to_cache is None else Path(config.path_to_cache)

        def build(*args: Any) -> Any:
            try:
                # The first rank writes what is not there yet; the others read it after a barrier.
                if cache is None or (dist.is_initialized() and dist.get_rank() != 0):
                    return read_from_files(cls(*args), cache)
                return built_completely(
                    cache, lambda folder: read_from_files(cls(*rest, _cached_in(config, folder)), cache)
                )
            except (OSError, ValueError) as error:
                raise _cache_error(config.path_to_cache, error) from error

        return BlendedMegatronDatasetBuilder.build_generic_dataset(build, is_built_on_rank, synchronize_ranks, *args)


def _cached_in(config: GPTDatasetConfig, folder: Path | None) -> GPTDatasetConfig:
    changed = copy.copy(config)
    changed.path_to_cache = None if folder is None else str(folder)
    return changed


def _build(core: GPTDatasetConfig, cls: type[GPTDataset], *, split: Split, num_samples: int) -> SampleDataset:
    # Without this the builder makes the other splits as well, and one without documents is an endless loop.
    wanted = _SPLITS.index(split)
    core.split_matrix = [core.split_matrix[i] if i == wanted else None for i in range(len(_SPLITS))]
    sizes = [num_samples if i == wanted else 0 for i in range(len(_SPLITS))]
    with _quiet():
        built: SampleDataset = _Builder(cls, sizes, lambda: True, core).build()[wanted]
    return built


def _core_config(config: DataConfig, tokenizer: Tokenizer, **source: Any) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.seq_length,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=config.eod_mask_loss,
        create_attention_mask=False,
        **source,
    )


def _cache_error(folder: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{folder}: the sample indices cannot be written or read: {error}. --data-cache-path must name a writable "
        "folder that all machines share; if this one is damaged, remove it"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence megatron-core, which warns that it keeps no index cache where it is told to keep none."""
    logger = logging.getLogger("megatron.core.datasets")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def find_blend(config: DataConfig, split: Split) -> Blend | None:
    """Find where the data of ``split`` comes from; ``None`` for mock data."""
    if config.mock_data:
        return None
    if not config.data_path:
        own = {"train": config.train_data_path, "valid": config.valid_data_path, "test": config.test_data_path}
        flag = f"--{split}-data-path"
        prefixes, weights = parse_blend(own[split], flag=flag)
        return Blend(prefixes=prefixes, weights=weights, split=split, flag=flag)
    prefixes, weights = parse_blend(config.data_path, flag="--data-path")
    shares = [float(share) for share in config.split.split(",")]
    edges = [sum(shares[:i]) / sum(shares) for i in range(len(shares) + 1)] + [1.0, 1.0]
    i = _SPLITS.index(split)
    if edges[i] == edges[i + 1]:
        raise ConfigError(f"--split {config.split}: leaves nothing for {split}; give it a share above 0")
    return Blend(prefixes=prefixes, weights=weights, split=split, flag="--data-path", share=(edges[i], edges[i + 1]))


def _split_around(share: tuple[float, float], split: Split) -> tuple[float, ...]:
    """Return shares of training, validation and test such that ``share`` is that of ``split``."""
    start, end = share
    i = _SPLITS.index(split)
    edges = [0.0] * i + [start] + [end] * (len(_SPLITS) - i)
    edges[0], edges[-1] = 0.0, 1.0
    return tuple(after - before for before, after in pairwise(edges))


def _check_on_all_ranks(blend: Blend, config: DataConfig, tokenizer: Tokenizer) -> Path:
    """Check the files and return the folder for their indices, the same on every rank.

    megatron-core knows indices by the path of the data and not by their content, and would read files that are
    written anew with the indices of the old ones. Here each content has a folder of its own.

    Collective over the world, if there is one: two gathers of a short object.

    Raises:
        ConfigError: on every rank, if one of them objects or sees other files than the rest.
    """

    def check() -> Path:
        corpora = [_open_corpus(prefix) for prefix in blend.prefixes]
        for corpus in corpora:
            _check_corpus(corpus, blend, config, tokenizer)
        folder = (config.data_cache_path or Path(blend.prefixes[0] + "_cache")) / _digest(corpora)
        try:
            make_cache(folder)
        except OSError as error:
            raise _cache_error(str(folder), error) from None
        return folder

    if not dist.is_initialized():
        return check()
    folder = on_all_ranks(check)
    check_same_everywhere(f"data files {' '.join(blend.prefixes)}", folder.name, fix="copy them anew")
    return folder


def _open_corpus(prefix: str) -> _Corpus:
    """Read the header of ``prefix.idx`` and check both files against it."""
    header = read_index_header(prefix)
    index, data, num_sequences = header.index, header.data, header.num_sequences
    dtype = np.dtype(DType.dtype_from_code(header.code))
    if dtype.kind not in "iu":
        raise ConfigError(f"{index}: says that token ids are {dtype}, must be integers; make it anew")
    corpus = _Corpus(
        prefix=prefix,
        dtype=dtype,
        lengths=np.memmap(index, dtype=np.int32, mode="r", offset=HEADER_BYTES, shape=(num_sequences,)),
    )
    _check_index(index, corpus, header.num_documents)
    expected = int(corpus.lengths.sum(dtype=np.int64)) * corpus.dtype.itemsize
    if data.stat().st_size != expected:
        raise ConfigError(f"{data}: {data.stat().st_size} bytes, its index counts {expected}; was it copied whole?")
    return corpus


def _check_index(index: Path, corpus: _Corpus, num_documents: int) -> None:
    """Check that sequences lie end to end, and documents too: megatron-core takes both as they are, in C++.

    Raises:
        ConfigError: they do not.
    """
    num_sequences, start = len(corpus.lengths), HEADER_BYTES + 4 * len(corpus.lengths)
    offsets = np.memmap(index, dtype=np.int64, mode="r", offset=start, shape=(num_sequences,))
    documents = np.memmap(index, dtype=np.int64, mode="r", offset=start + 8 * num_sequences, shape=(num_documents,))
    end = 0
    # Part by part: of 100 million documents, a sum alone would be 800 MB in every rank.
    for first in range(0, num_sequences, _CHECKED_AT_ONCE):
        lengths = corpus.lengths[first : first + _CHECKED_AT_ONCE].astype(np.int64)
        ends = end + np.cumsum(lengths) * corpus.dtype.itemsize
        if lengths.min() < 0 or (ends - lengths * corpus.dtype.itemsize != offsets[first : first + len(ends)]).any():
            raise ConfigError(f"{index}: damaged, its lengths and offsets do not agree; make it anew")
        end = int(ends[-1])
    for first in range(0, num_documents, _CHECKED_AT_ONCE):
        if (np.diff(documents[first : first + _CHECKED_AT_ONCE + 1]) < 0).any():
            raise ConfigError(f"{index}: damaged, its documents do not ascend; make it anew")
    if documents[0] != 0:
        raise ConfigError(f"{index}: damaged, its documents do not begin with its first sequence; make it anew")
    if documents[-1] != num_sequences:
        # megatron-core's IndexedDataset stops at this with a bare AssertionError.
        raise ConfigError(
            f"{index}: its documents end after {documents[-1]} of {num_sequences} sequences; write it again with "
            "IndexedDatasetBuilder.end_document() after the last item of each document"
        )


def _check_corpus(corpus: _Corpus, blend: Blend, config: DataConfig, tokenizer: Tokenizer) -> None:
    """Check that there are enough tokens for one sample, and that the first ones are of the tokenizer."""
    # Rounded as megatron-core does it.
    first, end = (round(edge * float(len(corpus.lengths))) for edge in blend.share)
    num_tokens = int(corpus.lengths[first:end].sum(dtype=np.int64))
    if num_tokens <= config.seq_length:
        raise ConfigError(
            f"{corpus.prefix}: {num_tokens} tokens for {blend.split} (documents {first} to {end} of "
            f"{len(corpus.lengths)}), one sample needs {config.seq_length + 1}; give more data, a shorter --seq-length "
            "or a larger share of --split"
        )
    check_first_tokens(corpus.prefix, tokenizer)


def _digest(corpora: list[_Corpus]) -> str:
    """Hash what sample indices are computed from, the length of every sequence, and the sizes of the files."""
    digest = hashlib.sha256()
    for corpus in corpora:
        digest.update(f"{corpus.dtype} {len(corpus.lengths)} {Path(corpus.prefix + '.bin').stat().st_size} ".encode())
        # All of them: 2 GB/s, so 0.2 s for 100 million documents, less than it takes to check them.
        digest.update(corpus.lengths.data)
    return digest.hexdigest()[:16]
