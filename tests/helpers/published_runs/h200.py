"""Runs of Llama-like models of this project itself on one H200, and the profile that was measured there."""

import dataclasses
from pathlib import Path

from hetero.cost.runtime_model import HETERO, HETERO_LAYERS
from hetero.plan.ir import Precision
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.spec.profile import Arithmetic, GradientSums
from tests.helpers.models import llama_model
from tests.helpers.published_runs import clusters
from tests.helpers.published_runs.published_run import CsvRow, PublishedRun, csv_rows, integers

H200 = "Llama-like, H200, this project"

PROFILE = "llama3-8b-8-layers.h200.bf16.local.json"
"""In the folder of the tables: three layers of the first row, as `hetero profile run` measured them in 28 s."""

GRADIENT_SUMS: dict[str, GradientSums] = {"local": "separate", "TransformerEngine 2.11.0": "fused_in_blocks"}
"""Who added weight gradients at commit e830fb9: local layers had apex's kernel for it or none, and no apex."""

PRECISIONS: dict[str, tuple[Precision, Arithmetic]] = {"bf16": ("bf16", "bf16"), "fp32": ("fp32", "fp32")}
"""Of weights and of products: torch computes those of fp32 in full unless TF32 is asked for."""


def read_h200(path: Path) -> list[PublishedRun]:
    """The runs on one H200."""
    return [_h200(row) for row in csv_rows(path)]


def _h200(row: CsvRow) -> PublishedRun:
    layers, hidden, ffn, heads, groups, seq, vocab, micro_batch_size, global_batch_size = integers(
        row, "layers", "hidden", "ffn", "heads", "groups", "seq", "vocab", "micro_batch", "global_batch"
    )
    whose = row["layer_implementation"]
    precision, arithmetic = PRECISIONS[row["precision"]]
    plan = uniform_plan(
        UniformLayout(
            model=llama_model(
                num_layers=layers,
                hidden_size=hidden,
                num_attention_heads=heads,
                num_query_groups=groups,
                kv_channels=hidden // heads,
                ffn_hidden_size=ffn,
                vocab_size=vocab,
                padded_vocab_size=vocab,
                max_position_embeddings=seq,
                tied_embeddings=False,
            ),
            world_size=1,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            seq_length=seq,
            device="H200",
            precision=precision,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    )
    implementation = dataclasses.replace(HETERO_LAYERS, gradient_sums=GRADIENT_SUMS[whose])
    return PublishedRun(
        family=H200,
        label=f"{row['case']}, {row['precision']}, {whose}",
        plan=plan,
        cluster=clusters.h200(),
        runtime=dataclasses.replace(HETERO, implementation=implementation),
        step_s=float(row["step_s"]),
        arithmetic=arithmetic,
    )
