"""Step time and peak memory of one rank, measured beside what the cost model predicts of its device."""

import itertools
import statistics
import time
from dataclasses import dataclass

import torch

from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.simulation.simulator import simulate
from hetero.data.cost_models import plan_costs
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan, Precision, Recompute
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.devices import DeviceType
from tests.helpers.gpu_ranks import device_type_here, placed_on, this_device
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.training import microbatches

BUCKET_NUMEL = 25_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A Llama-style model on one rank, small enough for any device when its defaults are."""

    precision: Precision
    num_layers: int = 12
    hidden_size: int = 1024
    seq_length: int = 1024
    micro_batch_size: int = 4
    num_microbatches: int = 4
    recompute: Recompute = "none"
    num_steps: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """Medians of a few steps after two to warm up.

    peak_bytes: that torch has reserved, 0 on a CPU. ``predicted_bytes`` holds the context, which torch does not count.
    predicted_s: ``None`` where the catalogue has nothing of the device to predict from.
    """

    step_s: float
    peak_bytes: int
    predicted_s: float | None
    predicted_bytes: int


def plan_of(workload: Workload, device: DeviceType) -> Plan:
    """One stage on one rank."""
    model = llama_model(
        num_layers=workload.num_layers,
        hidden_size=workload.hidden_size,
        num_attention_heads=workload.hidden_size // 64,
        num_query_groups=workload.hidden_size // 64,
        kv_channels=64,
        ffn_hidden_size=workload.hidden_size * 8 // 3 // 64 * 64,
        vocab_size=32_000,
        padded_vocab_size=32_000,
        max_position_embeddings=workload.seq_length,
    )
    alone = stage(
        layers=(0, workload.num_layers), ranks=(0,), mbs=workload.micro_batch_size, recompute=workload.recompute
    )
    num_samples = workload.micro_batch_size * workload.num_microbatches
    made = plan(
        model,
        [replica(alone, num_samples=num_samples)],
        seq_length=workload.seq_length,
        precision=workload.precision,
    )
    return placed_on(made, device)


def predicted_step_s(wanted: Plan, device: DeviceType) -> float | None:
    """By profile, or by data sheet where there is none: an estimate then."""
    if device.data_sheet is None:
        return None
    cluster = ClusterSpec(node_types=(NodeType(name="here", device=device.name, gpus_per_node=1),))
    return simulate(wanted, cluster, plan_costs(wanted, data_sheets=True)).step_s


def measured_step(rank: int, device_name: str, workload: Workload) -> MeasuredStep:
    """Train some steps on the device of this rank; collective over a world of one."""
    kind, device = device_type_here(device_name), this_device(device_name)
    wanted = plan_of(workload, kind)
    context = create_groups(wanted, device=device)
    trainer = Trainer(
        context,
        options=StageOptions(),
        adam=AdamOptions(lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0),
        seed=7,
        data_parallel=DataParallelOptions(bucket_numel=BUCKET_NUMEL),
    )
    session = TrainingSession(context, trainer, data=itertools.repeat(microbatches(wanted, rank, step=0)))
    on_gpu = device.type == "cuda"
    seconds = []
    for _ in range(2 + workload.num_steps):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        session.step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    (memory,) = device_memory(wanted, plan_memory(wanted, plan_costs(wanted, data_sheets=True))).values()
    return MeasuredStep(
        step_s=statistics.median(seconds[2:]),
        peak_bytes=torch.cuda.max_memory_reserved() if on_gpu else 0,
        predicted_s=predicted_step_s(wanted, kind),
        predicted_bytes=memory.total,
    )
