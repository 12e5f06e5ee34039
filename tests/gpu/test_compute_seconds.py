"""A rank's own computing is measured beside training: by events of the stream, without waiting for the device."""

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.compute_seconds import compute_seconds
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from hetero.schedule.actions import Action, ActionKind
from tests.helpers.gpu_ranks import GPU, run_on
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.training import ADAM, data_of


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Whatever would wait for the device raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    yield
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def steps(rank: int, name: str, made: Plan) -> list[tuple[float, float]]:
    """Of three steps: what was computed, and the whole step."""
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    timing = compute_seconds(device)
    context = create_groups(made, device=device, timing=timing)
    options = StageOptions(init_method_std=0.1)
    trainer = Trainer(context, options=options, adam=ADAM, seed=7, data_parallel=DataParallelOptions(bucket_numel=3000))
    session = TrainingSession(context, trainer, data=data_of(context))
    found = []
    for _ in range(3):
        begin_s = time.perf_counter()
        with no_waiting(device):
            session.compute_gradients()
        session.update()
        with no_waiting(device):
            seconds = timing.end_step()
        found.append((seconds, time.perf_counter() - begin_s))
    return found


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=GPU)])
@pytest.mark.timeout(180)
def test_computing_is_a_part_of_each_step(device: str) -> None:
    one = plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,), mbs=2), num_samples=8)])
    (measured,) = run_on(device, steps, 1, device, one)
    for computed_s, step_s in measured:
        assert 0.0 < computed_s < step_s


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_a_stream_waits_for_is_taken_off() -> None:
    """Ten parts of eleven are as if a gather held up the stream."""
    timing = compute_seconds(torch.device("cuda"))
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    with timing.compute(Action(ActionKind.F, 0, 0)):
        torch.cuda._sleep(20_000_000)
        with timing.waiting():
            torch.cuda._sleep(200_000_000)
    torch.cuda.synchronize()
    assert 0.0 < timing.end_step() < 0.5 * (time.perf_counter() - begin_s)
