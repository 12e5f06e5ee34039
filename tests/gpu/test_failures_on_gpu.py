"""A rank that is killed or runs out of memory in the middle of a step ends the others soon, and by name."""

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hetero.distributed.failure_detector import FailureDetector, FailureDetectorOptions
from hetero.distributed.process_exit import EXIT_CODE
from hetero.distributed.process_groups import create_groups
from hetero.errors import DeviceMemoryError, MembershipError
from hetero.plan.ir import Plan
from hetero.runtime.options import StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from megatron.pretrain.training import describe_rank, memory_errors
from tests.gpu.models import MODELS
from tests.helpers.gpu_ranks import device_type_here, end_on, on_devices, placed_on, this_device
from tests.helpers.plans import plan, replica, stage
from tests.helpers.training import ADAM, SMALL_BUCKETS, data_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

OPTIONS = FailureDetectorOptions(beat_s=0.2, lost_after_s=10.0, roll_call_s=5.0, arrive_within_s=60.0)
VICTIM = 1
STEP_OF_GRIEF = 3
"""Not the first one: kernels are loaded and channels connected by then."""


def two_stages() -> Plan:
    stages = (stage(layers=(0, 2), ranks=(0,)), stage(layers=(2, 4), ranks=(VICTIM,)))
    return plan(MODELS["gpt2-tied"](), [replica(*stages, num_samples=8)])


def die(device: torch.device) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_memory(device: torch.device) -> None:
    """On a GPU, ask for more than there is; a CPU would go on until the kernel kills somebody."""
    if device.type == "cpu":
        raise torch.OutOfMemoryError("out of memory, as CUDA says it\nand a page of statistics")
    held = []
    while True:
        held.append(torch.empty(2**34, dtype=torch.uint8, device=device))


GRIEFS: dict[str, Callable[[torch.device], None]] = {"killed": die, "out-of-memory": fill_memory}


def train_until_grief(rank: int, store: dist.Store, device_name: str, grief: str) -> None:
    """As ``pretrain_gpt.py`` trains: under a failure detector, and with its exit codes."""
    device = this_device(device_name)
    wanted = placed_on(two_stages(), device_type_here(device_name))
    try:
        with FailureDetector(store, rank=rank, world_size=2, options=OPTIONS) as detector:
            detector.wait_for_all()
            detector.describe, detector.doing = lambda each: describe_rank(wanted, each), "training"
            with memory_errors(detector, rank):
                context = create_groups(wanted, device=device)
                trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=SMALL_BUCKETS)
                session = TrainingSession(context, trainer, data=data_of(context))
                for step in range(1, 100_000):
                    if rank == VICTIM and step == STEP_OF_GRIEF:
                        _, weight = next(iter(trainer.parameters.values()))
                        weight.register_hook(lambda _: GRIEFS[grief](device))
                    session.step()
    except (MembershipError, DeviceMemoryError) as error:
        os.write(2, f"hetero: rank {rank}: {error}\n".encode())
        os._exit(EXIT_CODE)


CASES = list(GRIEFS)


@pytest.mark.rotates("ways")
@pytest.mark.parametrize(("device", "grief"), on_devices(CASES, on_cpu=CASES))
def test_the_others_end_and_say_who_was_lost(device: str, grief: str) -> None:
    survivor, victim = end_on(device, train_until_grief, 2, device, grief, timeout_s=90)
    assert survivor.exit_code == EXIT_CODE, survivor.stderr
    assert victim.exit_code == (-signal.SIGKILL if grief == "killed" else EXIT_CODE), victim.stderr
    assert f"rank {VICTIM} (replica 0 stage 1, " in survivor.stderr
    if grief == "out-of-memory":
        assert "out of memory in training" in victim.stderr
        assert "out of memory" in survivor.stderr
    assert survivor.at_s is not None, "it hung"
    assert victim.at_s is not None
    allowed_s = OPTIONS.lost_after_s + OPTIONS.roll_call_s + 2 * OPTIONS.beat_s
    # Beside what the failure detector promises, processes take their time to end: CUDA's context is torn down.
    assert survivor.at_s - victim.at_s <= allowed_s + 15
