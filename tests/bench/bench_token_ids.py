"""What checking token ids costs in a step of the quick start's model, in one process.

python tests/bench/bench_token_ids.py [--steps 60]

Steps that read checked tokens and steps that read megatron-core's own alternate. The first figure compares the two;
the second, of which noise is no part, compares the time to read a step's samples with that of a step.
"""

import argparse
import itertools
import statistics
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.runtime import cpu_backend

# Before megatron.core is imported by anyone.
cpu_backend.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from hetero.distributed.process_groups import create_groups  # noqa: E402
from hetero.runtime.microbatch import Microbatch  # noqa: E402
from hetero.runtime.session import TrainingSession  # noqa: E402
from megatron.pretrain import data  # noqa: E402
from megatron.pretrain.cli.arguments import parse_args  # noqa: E402
from megatron.pretrain.token_ids import CheckedGPTDataset  # noqa: E402
from megatron.pretrain.tokenizer import ByteLevelTokenizer  # noqa: E402
from megatron.pretrain.training import agree_on_plan_and_tokenizer, build_trainer  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

FLAGS = """
    --micro-batch-size 1 --num-layers 8 --hidden-size 128 --ffn-hidden-size 320
    --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 128 --max-position-embeddings 128 --make-vocab-size-divisible-by 4
    --tokenizer-type ByteLevelTokenizer --global-batch-size 8 --num-workers 0 --lr 3e-3 --seed 7
    --distributed-backend gloo
"""
"""Of scripts/quickstart.sh, without its plan."""


def write_corpus(prefix: Path) -> None:
    """Write Python's own sources, a document for each file."""
    tokenizer = ByteLevelTokenizer()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids = [*tokenizer.tokenize(source.read_text(encoding="utf-8", errors="replace")), tokenizer.eod]
        builder.add_document(np.array(ids, np.uint16), [len(ids)])
    builder.finalize(f"{prefix}.idx")


ORDER = (0, 1, 1, 0)
"""Which source the steps read from, again and again: what every other step has, both have."""


def alternating(sources: Sequence[Iterator[list[Microbatch]]]) -> Iterator[list[Microbatch]]:
    for kind in itertools.cycle(ORDER):
        yield next(sources[kind])


def seconds(do: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    do()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each kind (default 60)")
    num_steps: int = parser.parse_args().steps
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "stdlib"
        write_corpus(prefix)
        config = parse_args([*FLAGS.split(), "--data-path", str(prefix), "--train-iters", str(2 * num_steps)])
        plan, tokenizer = agree_on_plan_and_tokenizer(config, torch.device("cpu"))
        context = create_groups(plan, device=torch.device("cpu"))
        assert context.work is not None

        def dataset(cls: type[GPTDataset]) -> data.SampleDataset:
            with mock.patch.object(data, "CheckedGPTDataset", cls):
                return data.build_dataset(config.data, tokenizer, split="train", num_samples=8 * num_steps)

        datasets = [dataset(GPTDataset), dataset(CheckedGPTDataset)]
        placement = context.work.placement
        sources = [
            data.microbatches(each, plan, placement, first_step=0, num_steps=num_steps, num_workers=0)
            for each in datasets
        ]
        session = TrainingSession(context, build_trainer(config, context), data=alternating(sources))
        # A step reads the samples of the next one.
        session.read_ahead()
        steps_s: tuple[list[float], list[float]] = ([], [])
        for kind in itertools.islice(itertools.cycle((*ORDER[1:], ORDER[0])), 2 * num_steps - 1):
            steps_s[kind].append(seconds(session.step))
        # Other work on the machine only adds: the fast quarter of the steps shows what they take.
        plain_s, checked_s = (statistics.quantiles(kind_s, n=4)[0] for kind_s in steps_s)
        # Reading alone, each sample by one and then by the other.
        reads_s = [
            [seconds(lambda each=each, i=i: each[i]) for each in datasets]  # type: ignore[misc]
            for i in range(8 * num_steps)
        ]
        more_s = 8 * statistics.median(checked - plain for plain, checked in reads_s)
    dist.destroy_process_group()
    print(
        f"a step: {1e3 * plain_s:.2f} ms, with checked ids {1e3 * checked_s:.2f} ms ({checked_s / plain_s - 1:+.2%}); "
        f"to read 8 samples: {1e6 * more_s:.1f} us more, {more_s / plain_s:.4%} of a step"
    )


if __name__ == "__main__":
    main()
