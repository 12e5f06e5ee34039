"""On a GPU: the layers that megatron-core chooses there give what the CPU gives."""

import datetime

import pytest
import torch
import torch.distributed as dist

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from tests.helpers.layouts import STYLES
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ADAM, data_of, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("delay", [None, 1])
@pytest.mark.parametrize("style", ["gpt2-tied", "llama-gqa"])
def test_losses_equal_the_cpu(style: str, delay: int | None) -> None:
    """In fp32, without TF32, to 1e-4 relative over three steps: other kernels round otherwise."""
    one = plan(STYLES[style](), [replica(stage(layers=(0, 6), ranks=(0,), mbs=2, delay=delay), num_samples=4)])
    (expected,) = run_ranks(train, 1, one, 3)
    assert _train_on_gpu(one, 3) == pytest.approx(expected.losses, rel=1e-4)


def _train_on_gpu(one: Plan, num_steps: int) -> list[float]:
    from hetero.runtime.options import DataParallelOptions, StageOptions  # noqa: PLC0415
    from hetero.runtime.session import TrainingSession  # noqa: PLC0415
    from hetero.runtime.trainer import Trainer  # noqa: PLC0415

    device = torch.device("cuda", 0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        context = create_groups(one, device=device)
        options = StageOptions(init_method_std=0.1, transformer_impl="local")
        trainer = Trainer(
            context, options=options, adam=ADAM, seed=7, data_parallel=DataParallelOptions(bucket_numel=3000)
        )
        session = TrainingSession(context, trainer, data=data_of(context))
        return [session.step().loss for _ in range(num_steps)]
    finally:
        dist.destroy_process_group()


def test_phases_follow_one_another_on_a_stream() -> None:
    """Each phase sees what the caller and the phases before it wrote, and the caller what they wrote."""
    from hetero.runtime.collective_sequencer import CollectiveSequencer  # noqa: PLC0415

    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.zeros(1 << 24, device=device)
        sequencer = CollectiveSequencer(device)

        def doubled() -> list[dist.Work]:
            values.mul_(2)
            work = dist.all_reduce(values, async_op=True)
            assert work is not None
            return [work]

        for _ in range(10):
            values.add_(1)
            sequencer.start([doubled, doubled]).wait()
        assert torch.equal(values, torch.full_like(values, sum(4**i for i in range(1, 11))))
    finally:
        dist.destroy_process_group()


def test_a_device_is_busy_until_its_work_is_done() -> None:
    """By that a rank knows that its host does not hold the others up."""
    from hetero.distributed.shutdown import is_busy  # noqa: PLC0415

    device = torch.device("cuda", 0)
    torch.cuda.synchronize(device)
    assert not is_busy(device)
    # Some seconds at the clock of any card.
    torch.cuda._sleep(10_000_000_000)
    assert is_busy(device)
    torch.cuda.synchronize(device)
    assert not is_busy(device)
