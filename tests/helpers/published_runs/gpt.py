"""Runs of GPT models under Megatron-LM in fp16: NVIDIA's on A100, OneFlow's on V100."""

from pathlib import Path

from hetero.cost.other_runtimes.megatron_lm import MEGATRON_LM, MEGATRON_LM_TORCH_DDP
from hetero.cost.runtime_model import RuntimeModel
from hetero.plan.ir import Recompute
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model
from tests.helpers.published_runs import clusters
from tests.helpers.published_runs.published_run import CsvRow, PublishedRun, csv_rows, integers, label_of

A100 = "GPT 1.7B to 1T, A100, Megatron-LM"
V100 = "GPT 0.1B to 1.7B, V100, Megatron-LM"

OF_DATA_PARALLELISM: dict[str, RuntimeModel] = {"local": MEGATRON_LM, "torch": MEGATRON_LM_TORCH_DDP}
"""By ``--DDP-impl``."""

RECOMPUTE: dict[str, Recompute] = {"full": "full", "selective": "selective"}


def gpt_model(row: CsvRow) -> ModelSpec:
    """The model of a row, with Megatron-LM's defaults for what the table does not say."""
    hidden, heads, layers, seq, vocab = integers(row, "hidden", "heads", "layers", "seq", "vocab")
    return gpt2_model(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=vocab,
        padded_vocab_size=vocab,
        max_position_embeddings=seq,
    )


def _layout(row: CsvRow, *, device: str, recompute: Recompute) -> UniformLayout:
    num_gpus, tp, pp, micro_batch_size, global_batch_size, seq = integers(
        row, "gpus", "tp", "pp", "micro_batch", "global_batch", "seq"
    )
    return UniformLayout(
        model=gpt_model(row),
        world_size=num_gpus,
        tp=tp,
        pp=pp,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        seq_length=seq,
        device=device,
        sequence_parallel=row.get("sequence_parallel") == "True",
        stages_per_rank=int(row.get("stages_per_rank", "1")),
        precision="fp16",
        recompute=recompute,
    )


def read_a100(path: Path) -> list[PublishedRun]:
    """The runs of arXiv 2104.04473 and arXiv 2205.05198."""
    return [_a100(row) for row in csv_rows(path)]


def _a100(row: CsvRow) -> PublishedRun:
    plan = uniform_plan(_layout(row, device="A100-80", recompute=RECOMPUTE[row["recompute"]]))
    chunks = [f"{row['stages_per_rank']} stages per rank"] if row["stages_per_rank"] != "1" else []
    sequence = " and sequence parallelism" if row["sequence_parallel"] == "True" else ""
    return PublishedRun(
        family=A100,
        label=f"{row['model']}, {label_of(row, *chunks, row['recompute'] + ' recompute' + sequence)}",
        plan=plan,
        cluster=clusters.selene(num_nodes=int(row["gpus"]) // 8),
        runtime=OF_DATA_PARALLELISM[row["data_parallelism"]],
        step_s=float(row["step_s"]),
    )


def read_v100(path: Path) -> list[PublishedRun]:
    """The runs of OneFlow's DLPerf."""
    return [_v100(row) for row in csv_rows(path)]


def _v100(row: CsvRow) -> PublishedRun:
    plan = uniform_plan(_layout(row, device="V100-16", recompute="full"))
    return PublishedRun(
        family=V100,
        label=f"{row['layers']} layers of {row['hidden']}, {label_of(row)}",
        plan=plan,
        cluster=clusters.v100(num_gpus=int(row["gpus"])),
        runtime=MEGATRON_LM,
        step_s=float(row["step_s"]),
    )
