"""On a GPU: groups have NCCL alone, connect at their start-up, and are aborted with receives pending."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from hetero.distributed.process_groups import backend_of_config, create_group, create_groups
from hetero.distributed.shutdown import leave_world, nccl_error
from tests.helpers.gpu_ranks import GPU, end_on, this_device
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage

pytestmark = pytest.mark.timeout(180)

CPU = torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
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


def fail_with_a_receive_pending(rank: int, store: dist.Store, device_name: str) -> None:
    """Leave with a receive of rank 0 pending, which on a GPU spins until its communicator is aborted."""
    device = this_device(device_name)
    world = dist.group.WORLD
    assert world is not None
    group = create_group([0, 1], backend=backend_of_config(dist.get_backend_config(world), device))
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if rank == 0:
        (pending,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1, device=device), 1, group)])
        pending.wait()
        # Rank 1 comes to its first contact and fails before it sends what comes next.
        (pending,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1, device=device), 1, group)])
        assert not pending.is_completed()
        store.set("a receive is pending", "")
    else:
        (sent,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.zeros(1, device=device), 0, group)])
        sent.wait()
        store.wait(["a receive is pending"])
    started_s = time.monotonic()
    leave_world(failed=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    os._exit(0 if time.monotonic() - started_s < 15 else 1)


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=GPU)])
def test_a_rank_leaves_with_a_receive_pending(device: str) -> None:
    ends = end_on(device, fail_with_a_receive_pending, 2, device, timeout_s=110)
    assert [(ended.exit_code, ended.stderr) for ended in ends if ended.exit_code != 0] == []
