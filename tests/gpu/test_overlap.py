"""Transfers and sums of gradients run on streams of their own, beside the compute of their rank."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.options import StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from tests.gpu.kernel_overlap import KernelSpan, Overlap, overlap
from tests.gpu.models import MODELS
from tests.helpers.gpu_ranks import GPU, device_type_here, placed_on, run_on, this_device
from tests.helpers.plans import plan, replica, stage
from tests.helpers.training import ADAM, SMALL_BUCKETS, data_of

NUM_STEPS = 2


def spans_of(trace: Path) -> list[KernelSpan]:
    """Kernels and copies of a trace that torch's profiler has exported."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [
        KernelSpan(
            name=event["name"],
            stream=event["args"]["stream"],
            start_us=event["ts"],
            end_us=event["ts"] + event["dur"],
        )
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy")
    ]


def profiled(rank: int, device: str, wanted: Plan) -> list[KernelSpan]:
    """What the device of this rank did in a few steps, after one to warm up."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    context = create_groups(placed_on(wanted, device_type_here(device)), device=this_device(device))
    trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=SMALL_BUCKETS)
    session = TrainingSession(context, trainer, data=data_of(context))
    session.step()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as recorded:
        for _ in range(NUM_STEPS):
            session.step()
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return spans_of(path)


def pipeline_beside_a_rank() -> Plan:
    """Its first stages exchange with their neighbour and sum gradients with the other replica."""
    first = replica(stage(layers=(0, 2), ranks=(0,)), stage(layers=(2, 4), ranks=(1,)), num_samples=12)
    return plan(MODELS["llama-gqa"](), [first, replica(stage(layers=(0, 4), ranks=(2,)), num_samples=4)], seq_length=64)


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=GPU)])
@pytest.mark.timeout(180)
def test_communication_runs_beside_compute(device: str) -> None:
    """On the CPU nothing runs on a device; there, this shows that a step can be profiled."""
    for rank, spans in enumerate(run_on(device, profiled, 3, device, pipeline_beside_a_rank())):
        if device == "cpu":
            assert spans == []
            continue
        found = overlap(spans)
        assert found.communication_us > 0, f"rank {rank}: no kernel of NCCL"
        assert found.shared_streams == frozenset(), f"rank {rank}: NCCL shares a stream with compute"
        assert found.hidden_us > 0, f"rank {rank}: everything waited for communication"


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], Overlap(0, 0, frozenset())),
        (
            [
                KernelSpan("ncclDevKernel_SendRecv", 20, 0, 10),
                KernelSpan("gemm", 7, 4, 6),
                KernelSpan("gemm", 7, 5, 12),
            ],
            Overlap(10, 6, frozenset()),
        ),
        (
            [KernelSpan("gemm", 7, 0, 5), KernelSpan("ncclDevKernel_AllReduce", 7, 5, 9)],
            Overlap(4, 0, frozenset({7})),
        ),
        (
            [KernelSpan("nccl", 20, 0, 4), KernelSpan("nccl", 21, 2, 6), KernelSpan("Memcpy HtoD", 7, 1, 3)],
            Overlap(6, 2, frozenset()),
        ),
    ],
)
def test_overlap_is_counted(spans: list[KernelSpan], expected: Overlap) -> None:
    assert overlap(spans) == expected


def test_a_trace_is_read(tmp_path: Path) -> None:
    """As torch 2.13 writes it: kernels beside what the processor did."""
    path = tmp_path / "trace.json"
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 3.5, "dur": 2.0, "args": {"stream": 7, "device": 0}}
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, kernel]}), encoding="utf-8")
    assert spans_of(path) == [KernelSpan("gemm", 7, 3.5, 5.5)]
