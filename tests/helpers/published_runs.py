"""Training runs that others measured, as plans on clusters: what the cost model is held against."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from hetero.data import shipped_links
from hetero.data.sailor import DEVICES, MODELS
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.validate import validate
from hetero.spec.cluster import ClusterSpec, Links
from hetero.spec.model import ModelSpec

FOLDER = Path(__file__).parents[1] / "data" / "published_runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """One plan and what it was measured to take: the means of its repetitions."""

    plan: Plan
    cluster: ClusterSpec
    label: str
    step_s: float
    peak_bytes: float


def read_runs(path: Path = FOLDER / "opt350m_gh200.csv") -> list[PublishedRun]:
    """The runs of a table, repetitions of one plan joined, in the order of the table."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    repetitions: defaultdict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        key = tuple(row[name] for name in ("model", "gpus", "global_batch", "micro_batch", "pp", "dp", "tp"))
        repetitions[key].append(row)
    return [_run(found) for found in repetitions.values()]


def published_model(name: str) -> ModelSpec:
    """The model that a table calls ``name``, with an output layer of its own."""
    _, shape, num_layers = MODELS[name]
    return ModelSpec(
        num_layers=num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn,
        vocab_size=shape.vocabulary,
        padded_vocab_size=shape.vocabulary,
        max_position_embeddings=2048,
        position_embedding="learned_absolute",
        normalization="LayerNorm",
        activation="gelu",
        linear_bias=True,
        qkv_bias=True,
        tied_embeddings=False,
    )


def _run(rows: Sequence[dict[str, str]]) -> PublishedRun:
    row = rows[0]
    gpu, _ = row["gpus"].split(":")
    pp, dp, tp, mbs = (int(row[name]) for name in ("pp", "dp", "tp", "micro_batch"))
    memory = [float(r["peak_mem_bytes"]) for r in rows if r["memory_usable"] == "True"]
    plan = pipeline_plan(
        published_model(row["model"]),
        layers_per_stage=[int(count) for count in row["layers_per_stage"].split("-")],
        device=DEVICES[gpu],
        dp=dp,
        tp=tp,
        micro_batch_size=mbs,
        global_batch_size=int(row["global_batch"]),
    )
    links = shipped_links()
    nodes = links.node_type(DEVICES[gpu], gpus_per_node=int(row["gpus_per_node"]), count=int(row["nodes"]))
    cluster = ClusterSpec(node_types=(nodes,), links=Links(between_nodes=links.of(DEVICES[gpu]).between_nodes))
    label = f"{row['gpus'].split(':')[1]} GPUs, batch {row['global_batch']}, mbs {mbs}, pp {pp} dp {dp} tp {tp}"
    step_s = mean(float(r["iteration_s"]) for r in rows)
    return PublishedRun(plan=plan, cluster=cluster, label=label, step_s=step_s, peak_bytes=mean(memory))


def pipeline_plan(
    model: ModelSpec,
    *,
    layers_per_stage: Sequence[int],
    device: str,
    dp: int,
    tp: int,
    micro_batch_size: int,
    global_batch_size: int,
) -> Plan:
    """``dp`` equal pipelines on ranks in DeepSpeed's order: tensor fastest, then data, then pipeline.

    layers_per_stage: counts the embedding and the head as one layer each.
    """
    num_stages = len(layers_per_stage)
    ends = [sum(layers_per_stage[: s + 1]) - 1 for s in range(num_stages)]
    ends[-1] -= 1
    starts = [0, *ends[:-1]]

    def stage(d: int, s: int) -> Stage:
        first_rank = (s * dp + d) * tp
        return Stage(
            first_layer=starts[s],
            end_layer=ends[s],
            ranks=tuple(range(first_rank, first_rank + tp)),
            device=device,
            tp=tp,
            micro_batch_size=micro_batch_size,
            in_flight=min(num_stages - s, global_batch_size // dp // micro_batch_size),
        )

    plan = Plan(
        model=model,
        seq_length=2048,
        global_batch_size=global_batch_size,
        replicas=tuple(
            Replica(num_samples=global_batch_size // dp, stages=tuple(stage(d, s) for s in range(num_stages)))
            for d in range(dp)
        ),
    )
    validate(plan)
    return plan
