"""Ranks that run different versions all hear of it, at once, before any group is made."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from hetero.distributed import runtime_versions as module
from hetero.distributed.rank_consensus import ConsensusError, on_all_ranks
from hetero.distributed.runtime_versions import check_kernels, check_versions, runtime_versions
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]

CPU = torch.device("cpu")


def outcome(rank: int, odd_rank: int | None) -> str:
    """What a rank hears if ``odd_rank`` has another NCCL; then all meet, so that nobody is left behind."""
    own = runtime_versions(CPU)
    with pytest.MonkeyPatch.context() as patch:
        nccl = "2.27.5" if rank == odd_rank else "2.28.9"
        patch.setattr(module, "runtime_versions", lambda _: dataclasses.replace(own, nccl=nccl))
        try:
            check_versions(CPU)
            said = ""
        except ConsensusError as error:
            said = str(error)
    dist.barrier()
    return said


def test_equal_versions_pass() -> None:
    assert run_ranks(outcome, 3, None) == [""] * 3


def test_all_ranks_hear_of_one_that_differs() -> None:
    heard = run_ranks(outcome, 3, 2)
    assert len(set(heard)) == 1
    assert heard[0].startswith("the ranks run different versions of NCCL: 2.28.9 (torch ")
    assert "2.27.5" in heard[0]
    assert "on ranks 2; it does not connect two versions" in heard[0]


def kernels(rank: int) -> str:
    """What a rank hears of a V100 on rank 1 with a build of torch for CUDA 13."""
    capability = (7, 0) if rank == 1 else (9, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "compute_120"])
        patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        patch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100-SXM2-16GB")
        try:
            on_all_ranks(lambda: check_kernels(torch.device("cuda", 0)))
            said = ""
        except ConsensusError as error:
            said = str(error)
    dist.barrier()
    return said


def test_all_ranks_hear_of_a_device_without_kernels() -> None:
    heard = run_ranks(kernels, 3)
    assert len(set(heard)) == 1
    assert heard[0].startswith("on rank 1: Tesla V100-SXM2-16GB has compute capability 7.0, and torch ")
