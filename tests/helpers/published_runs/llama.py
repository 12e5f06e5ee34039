"""Runs of Llama-3-8B under megatron-core in bf16 that FlagPerf published."""

from pathlib import Path

from hetero.cost.other_runtimes.megatron_lm import MEGATRON_CORE
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.units import GIB
from tests.helpers.models import llama_model
from tests.helpers.published_runs import clusters
from tests.helpers.published_runs.published_run import CsvRow, PublishedRun, csv_rows, integers, label_of

A100 = "Llama-3-8B, A100, megatron-core"

LLAMA_3_8B = llama_model(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=14336,
    vocab_size=128_256,
    padded_vocab_size=128_256,
    max_position_embeddings=8192,
    rotary_base=500_000,
    tied_embeddings=True,
)
"""As Llama-3-8B is, but for the head, which is the embedding."""


def read_a100(path: Path) -> list[PublishedRun]:
    """The runs on one node of A800."""
    return [_a100(row) for row in csv_rows(path)]


def _a100(row: CsvRow) -> PublishedRun:
    num_gpus, tp, pp, micro_batch_size, global_batch_size, seq = integers(
        row, "gpus", "tp", "pp", "micro_batch", "global_batch", "seq"
    )
    plan = uniform_plan(
        UniformLayout(
            model=LLAMA_3_8B,
            world_size=num_gpus,
            tp=tp,
            pp=pp,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            seq_length=seq,
            device="A100-80",
            sequence_parallel=row["sequence_parallel"] == "True",
            precision="bf16",
            distributed_optimizer=True,
        )
    )
    return PublishedRun(
        family=A100,
        label=label_of(row),
        plan=plan,
        cluster=clusters.a800(),
        runtime=MEGATRON_CORE,
        step_s=float(row["step_s"]),
        peak_bytes=float(row["peak_gib"]) * GIB,
    )
