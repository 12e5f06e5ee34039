"""Draws the initial weights that a rank holds, on its device: the same values under every plan and on every device.

Each value is a function of the seed, the parameter's name and the value's place in the whole tensor, so a rank computes
its shard and nothing else. :mod:`.philox` gives 16 bits per value, and a table turns them into one of 65,536 equally
likely values of the normal distribution: its quantiles, with the outermost values moved from 4.32 to 4.40 deviations so
that the variance is exactly 1. (32 bits and an interpolation took twice as long on a CPU: 3.3 instead of 1.5 ns.)

The key of Philox is the seed. The upper half of the counter is a digest of the name, the lower half the number of a
block, which is 16 neighbouring values of a row. With one key for all names, a device draws many parameters at once.

The blocks of a tensor are a grid of rows and columns. They are counted column by column where tensor parallelism cuts
columns, else row by row, so that a shard has long runs of them.
"""

import functools
import hashlib
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero.runtime.philox import WORDS, blocks_on_device, blocks_on_host, signed_words
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import Parameter, ShardInterval, shard_intervals

_BITS = 16
_LANES = WORDS * 64 // _BITS
"""Values of a block."""

_HOST_BLOCKS = 2**13
"""Blocks that the host draws at once: what it computes of them stays in a core's cache."""

_DEVICE_BLOCKS = 2**19
"""Blocks that a device draws at once, of several parameters: about 500 kernels, and 100 MB while they run."""


def draw_weights(
    parameters: Mapping[str, tuple[Parameter, torch.nn.Parameter]],
    *,
    model: ModelSpec,
    tp: int,
    tp_rank: int,
    seed: int,
    std: float,
) -> None:
    """Set the initial values: normal with ``std``, divided by sqrt(2 L) before the residual sums (GPT-2)."""
    on_host: list[Iterator[_Run]] = []
    on_device: list[Iterator[_Run]] = []
    for parameter, held in parameters.values():
        tensor = held.detach()
        if parameter.init in ("zeros", "ones"):
            tensor.fill_(float(parameter.init == "ones"))
            continue
        deviation = std / math.sqrt(2.0 * model.num_layers) if parameter.init == "scaled_normal" else std
        intervals = shard_intervals(parameter, tp=tp, tp_rank=tp_rank)
        if _is_on_host(tensor):
            on_host.append(_runs(parameter, tensor, intervals, std=deviation, limit=_HOST_BLOCKS))
        else:
            on_device.append(_runs(parameter, tensor, intervals, std=deviation, limit=_DEVICE_BLOCKS))
    _draw_on_host(itertools.chain.from_iterable(on_host), seed=seed)
    for batch in _batches(itertools.chain.from_iterable(on_device)):
        _draw_on_device(batch, seed=seed)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of a parameter, ``outer`` x ``inner``, and the rectangle of a shard that takes their values.

    stream: 128 bits that tell the parameter from others.
    first: number of the first block.
    skipped: values of each row in front of the shard's first, in the first block.
    """

    stream: int
    first: int
    outer: int
    inner: int
    by_columns: bool
    skipped: int
    std: float
    target: torch.Tensor

    @property
    def count(self) -> int:
        return self.outer * self.inner

    def fill(self, values: torch.Tensor) -> None:
        """Write the blocks' values [count, 16] to their places."""
        if self.by_columns:
            values = values.view(self.outer, self.inner, _LANES).transpose(0, 1)
            rows = values.reshape(self.inner, self.outer * _LANES)
        else:
            rows = values.view(self.outer, self.inner * _LANES)
        self.target.copy_(rows[:, self.skipped : self.skipped + self.target.shape[1]])


def _runs(
    parameter: Parameter, shard: torch.Tensor, intervals: Sequence[ShardInterval], *, std: float, limit: int
) -> Iterator[_Run]:
    """Cut a shard into runs of up to ``limit`` blocks."""
    stream = int.from_bytes(hashlib.sha256(parameter.name.encode()).digest()[:16], "little")
    rows, columns = parameter.shape if len(parameter.shape) == 2 else (1, *parameter.shape)
    shard = shard.view(-1, shard.shape[-1])
    by_columns = parameter.shard_dim == len(parameter.shape) - 1
    unit, inner = (_LANES, rows) if by_columns else (1, math.ceil(columns / _LANES))
    if parameter.shard_dim is None:
        intervals = (ShardInterval(0, 0, rows),)
    for interval in intervals:
        start, end = interval.global_start, interval.global_start + interval.length
        for outer in _slices(start // unit, math.ceil(end / unit), max(1, limit // inner)):
            cut = slice(max(start, outer.start * unit), min(end, outer.stop * unit))
            skipped = cut.start - outer.start * unit
            held = slice(cut.start - start + interval.local_start, cut.stop - start + interval.local_start)
            for part in _slices(0, inner, limit):
                target = shard[part, held] if by_columns else shard[held, part.start * _LANES : part.stop * _LANES]
                yield _Run(
                    stream,
                    first=outer.start * inner + part.start,
                    outer=outer.stop - outer.start,
                    inner=part.stop - part.start,
                    by_columns=by_columns,
                    skipped=skipped,
                    std=std,
                    target=target,
                )


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def _draw_on_host(runs: Iterable[_Run], *, seed: int) -> None:
    # Memory is reused: new memory in each turn costs as much as the numbers in it.
    bits = torch.empty(_HOST_BLOCKS, _LANES, dtype=torch.int32)
    values = torch.empty(_HOST_BLOCKS, _LANES)
    for run in runs:
        words = torch.from_numpy(blocks_on_host(_key(seed), run.stream, run.first, run.count))
        chosen, drawn = bits[: run.count], values[: run.count]
        chosen.copy_(words.view(torch.uint16))
        torch.index_select(_quantiles_times(run.std), 0, chosen.view(-1), out=drawn.view(-1))
        run.fill(drawn)


def _batches(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """Group runs, in order, so that a device draws each group at once."""
    batch: list[_Run] = []
    blocks = 0
    for run in runs:
        if batch and blocks + run.count > _DEVICE_BLOCKS:
            yield batch
            batch, blocks = [], 0
        batch.append(run)
        blocks += run.count
    if batch:
        yield batch


def _draw_on_device(runs: Sequence[_Run], *, seed: int) -> None:
    device, counts = runs[0].target.device, [run.count for run in runs]
    numbers = torch.cat([torch.arange(run.first, run.first + run.count, device=device) for run in runs])
    streams = torch.tensor([signed_words(run.stream) for run in runs], device=device)
    third, fourth = streams.repeat_interleave(torch.tensor(counts, device=device), 0, output_size=sum(counts)).unbind(1)
    words = blocks_on_device(_key(seed), (third, fourth), numbers)
    table = _quantiles_times(1.0).to(device)
    values = torch.empty(sum(counts), _LANES, device=device)
    per_word = _LANES // WORDS
    for lane in range(_LANES):
        bits = (words[lane // per_word] >> _BITS * (lane % per_word)).bitwise_and_(2**_BITS - 1)
        values[:, lane] = table.index_select(0, bits)
    for run, drawn in zip(runs, values.split(counts), strict=True):
        run.fill(drawn.mul_(run.std))


def _key(seed: int) -> int:
    return seed % 2**128


@functools.lru_cache(maxsize=4)
def _quantiles_times(std: float) -> torch.Tensor:
    """Compute the values of the normal distribution with ``std`` by 16 bits, in order -> fp32 [65,536].

    The values of the standard one are rounded from doubles, none of which lies as near to a rounding boundary as
    libraries of mathematics differ. The product is one of two floats, as a device computes it.
    """
    count = 2**_BITS
    quantile = statistics.NormalDist().inv_cdf
    upper = [quantile((index + 0.5) / count) for index in range(count // 2, count)]
    upper[-1] = math.sqrt(count / 2 - math.fsum(value * value for value in upper[:-1]))
    positive = torch.tensor(upper, dtype=torch.float32)
    return torch.cat([-positive.flip(0), positive]) * std
