"""Runs of OPT-350M that the authors of Sailor published: DeepSpeed and a fork of Megatron-LM, in fp32."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.cost.other_runtimes.megatron_lm import MEGATRON_LM
from hetero.data.sailor import DEVICES, MODELS
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.spec.model import ModelSpec
from hetero.units import MIB
from tests.helpers.models import gpt2_model
from tests.helpers.published_runs import clusters
from tests.helpers.published_runs.published_run import (
    CsvRow,
    MeasuredStage,
    PublishedRun,
    csv_rows,
    integers,
    label_of,
)

DEEPSPEED_GH200 = "OPT-350M, GH200, DeepSpeed"
MEGATRON_GH200 = "OPT-350M, GH200, Megatron-LM"
DEEPSPEED_TURING = "OPT-350M, Titan RTX + 2080 Ti, DeepSpeed"

SEQ_LENGTH = 2048


def published_model(name: str) -> ModelSpec:
    """The model that a table calls ``name``, with an output layer of its own."""
    _, shape, num_layers = MODELS[name]
    return gpt2_model(
        num_layers=num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn,
        vocab_size=shape.vocabulary,
        padded_vocab_size=shape.vocabulary,
        max_position_embeddings=SEQ_LENGTH,
        tied_embeddings=False,
    )


def _grouped(path: Path) -> list[list[CsvRow]]:
    """The rows of each plan, in the order of the table: repetitions of a run, or its stages."""
    found: defaultdict[tuple[str, ...], list[CsvRow]] = defaultdict(list)
    for row in csv_rows(path):
        found[tuple(row[name] for name in ("gpus", "global_batch", "micro_batch", "pp", "dp", "tp"))].append(row)
    return list(found.values())


def read_deepspeed_gh200(path: Path) -> list[PublishedRun]:
    """The runs of DeepSpeed on GH200, repetitions joined."""
    return [_deepspeed_gh200(rows) for rows in _grouped(path)]


def _deepspeed_gh200(rows: Sequence[CsvRow]) -> PublishedRun:
    gpu, num_gpus = rows[0]["gpus"].split(":")
    row = {**rows[0], "gpus": num_gpus}
    pp, dp = integers(row, "pp", "dp")
    memory = [float(each["peak_mem_bytes"]) for each in rows if each["memory_usable"] == "True"]
    return PublishedRun(
        family=DEEPSPEED_GH200,
        label=label_of(row),
        plan=_pipeline_plan(row, devices=[[DEVICES[gpu]] * dp] * pp),
        cluster=clusters.gh200(num_nodes=int(row["nodes"])),
        runtime=DEEPSPEED,
        step_s=mean(float(each["iteration_s"]) for each in rows),
        peak_bytes=mean(memory) if memory else None,
    )


def read_deepspeed_turing(path: Path) -> list[PublishedRun]:
    """The runs of DeepSpeed on Titan RTX and RTX 2080 Ti together."""
    return [_deepspeed_turing(row) for row in csv_rows(path)]


def _deepspeed_turing(row: CsvRow) -> PublishedRun:
    devices = [stage.split("+") for stage in row["stage_devices"].split("|")]
    gpus_per_node, tp = integers(row, "gpus_per_node", "tp")
    used = [device for stage in devices for device in stage]
    return PublishedRun(
        family=DEEPSPEED_TURING,
        label=label_of(row),
        plan=_pipeline_plan(row, devices=devices),
        cluster=clusters.turing(
            num_titan_nodes=used.count("Titan-RTX") * tp // gpus_per_node,
            num_2080ti_nodes=used.count("RTX-2080Ti") * tp // gpus_per_node,
            gpus_per_node=gpus_per_node,
        ),
        runtime=DEEPSPEED,
        step_s=float(row["iteration_s"]),
        peak_bytes=float(row["peak_mem_bytes"]),
    )


def _pipeline_plan(row: CsvRow, *, devices: Sequence[Sequence[str]]) -> Plan:
    """Equal pipelines on ranks in DeepSpeed's order: tensor fastest, then data, then pipeline.

    The table counts the embedding and the head as one layer each.

    Args:
        devices: by stage and replica.
    """
    dp, tp, micro_batch_size, global_batch_size = integers(row, "dp", "tp", "micro_batch", "global_batch")
    layers_per_stage = [int(count) for count in row["layers_per_stage"].split("-")]
    num_stages = len(layers_per_stage)
    ends = [sum(layers_per_stage[: s + 1]) - 1 for s in range(num_stages)]
    ends[-1] -= 1
    starts = [0, *ends[:-1]]

    def stages(d: int) -> Iterator[Stage]:
        for s in range(num_stages):
            first_rank = (s * dp + d) * tp
            yield Stage(
                first_layer=starts[s],
                end_layer=ends[s],
                ranks=tuple(range(first_rank, first_rank + tp)),
                device=devices[s][d],
                tp=tp,
                micro_batch_size=micro_batch_size,
                in_flight=min(num_stages - s, global_batch_size // dp // micro_batch_size),
            )

    plan = Plan(
        model=published_model(row["model"]),
        seq_length=SEQ_LENGTH,
        global_batch_size=global_batch_size,
        replicas=tuple(Replica(num_samples=global_batch_size // dp, stages=tuple(stages(d))) for d in range(dp)),
    )
    return plan


def read_megatron_gh200(path: Path) -> list[PublishedRun]:
    """The runs of a fork of Megatron-LM on GH200, each with its stages."""
    return [_megatron_gh200(rows) for rows in _grouped(path)]


def _megatron_gh200(rows: Sequence[CsvRow]) -> PublishedRun:
    row = rows[0]
    num_gpus, tp, pp, micro_batch_size, global_batch_size = integers(
        row, "gpus", "tp", "pp", "micro_batch", "global_batch"
    )
    plan = uniform_plan(
        UniformLayout(
            model=dataclasses.replace(published_model("OPT-350"), tied_embeddings=True),
            world_size=num_gpus,
            tp=tp,
            pp=pp,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            seq_length=SEQ_LENGTH,
            device="GH200",
        )
    )
    return PublishedRun(
        family=MEGATRON_GH200,
        label=label_of(row),
        plan=plan,
        cluster=clusters.gh200(num_nodes=int(row["nodes"])),
        runtime=MEGATRON_LM,
        step_s=mean(float(each["step_s"]) for each in rows),
        peak_bytes=max(float(each["nvidia_smi_mib"]) for each in rows) * MIB,
        stages=tuple(
            MeasuredStage(
                forward_s=float(each["forward_s"]),
                backward_s=float(each["backward_s"]),
                all_reduce_s=_mean_all_reduce_s(each) if int(row["dp"]) > 1 else None,
                update_s=float(each["optimizer_s"]),
                peak_bytes=float(each["nvidia_smi_mib"]) * MIB,
            )
            for each in rows
        ),
    )


def _mean_all_reduce_s(row: CsvRow) -> float:
    """The middle between the ranks that wait least and most for it."""
    return (float(row["all_reduce_least_s"]) + float(row["all_reduce_most_s"])) / 2
