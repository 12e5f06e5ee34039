"""On a GPU: groups have NCCL alone, connect at their start-up, and are aborted with receives pending."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.distributed.process_groups import create_groups
from hetero.distributed.shutdown import leave_world, nccl_error
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import end_of_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

CPU = torch.device("cpu")


def test_groups_have_nccl_alone() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        context = create_groups(plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,)))]), device=device)
        assert context.work is not None
        assert context.work.alone._get_backend(device).name() == "nccl"
        with pytest.raises(RuntimeError):
            context.work.alone._get_backend(CPU)
        assert nccl_error(context.groups) == ""
    finally:
        leave_world(failed=True)
    assert not dist.is_initialized()


def fail_with_a_receive_pending(rank: int, store: Any) -> None:
    """Two ranks on one device. The receive spins there until its communicator is aborted."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    group = dist.new_group([0, 1], backend="nccl")  # noqa: TID251
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if rank == 0:
        (pending,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1, device=device), 1, group)])
        pending.wait()
        # Rank 1 comes to its first contact and fails before it sends what comes next.
        (pending,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1, device=device), 1, group)])
        assert not pending.is_completed()
    else:
        (sent,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.zeros(1, device=device), 0, group)])
        sent.wait()
    started_s = time.monotonic()
    leave_world(failed=True)
    torch.cuda.synchronize(device)
    os._exit(0 if time.monotonic() - started_s < 15 else 1)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.nccl.version() < (2, 30), reason="NCCL 2.30 lets ranks share a device"
)
def test_a_rank_leaves_with_a_receive_pending() -> None:
    assert [ended.exit_code for ended in end_of_ranks(fail_with_a_receive_pending, 2, timeout_s=110)] == [0, 0]
