"""After an error groups are aborted, nothing is waited for, and what NCCL's watchdogs have seen is told."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from hetero.distributed.shutdown import SEEN_BY_WATCHDOG, leave_world, nccl_error

NAME = "ends-like-nccl"
CALLS: list[str] = []
"""What was done to the groups of :class:`EndsLikeNccl`."""


class EndsLikeNccl(dist.ProcessGroup):
    """Like ProcessGroupNCCL, waits in its shutdown for what was given to it, and not in its abort."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.pending = 0

    def getBackendName(self) -> str:
        return NAME

    def recv(self, tensors: Any, source: int, tag: int) -> SimpleNamespace:
        self.pending += 1
        return SimpleNamespace(is_completed=lambda: False)

    def shutdown(self) -> None:
        CALLS.append("shutdown")
        assert not self.pending, "this would wait for ever"

    def abort(self) -> None:
        CALLS.append("abort")


@pytest.fixture
def world() -> Iterator[None]:
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, lambda store, rank, size, timeout: EndsLikeNccl(rank, size), devices=["cpu"]
        )
    CALLS.clear()
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0], backend=NAME)  # noqa: TID251
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_groups_are_destroyed_after_a_run_that_went_well(world: None) -> None:
    leave_world(failed=False)
    assert CALLS == ["shutdown", "shutdown"]
    assert not dist.is_initialized()


def test_after_an_error_groups_are_aborted_with_receives_pending(world: None) -> None:
    group = dist.group.WORLD
    assert isinstance(group, EndsLikeNccl)
    group.recv([torch.zeros(1)], 0, 0)
    leave_world(failed=True)
    assert CALLS == ["abort", "abort"]
    assert not dist.is_initialized()
    # And no collective can begin any more.
    with pytest.raises(ValueError, match="not been initialized"):
        dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("found", list(SEEN_BY_WATCHDOG))
def test_what_the_watchdog_has_seen_is_told(found: str) -> None:
    groups = [group_with(ErrorType.SUCCESS), group_with(getattr(ErrorType, found))]
    assert nccl_error(groups) == SEEN_BY_WATCHDOG[found]  # type: ignore[arg-type]  # doubles


def test_every_error_of_torch_has_words() -> None:
    assert {*ErrorType.__members__} == {*SEEN_BY_WATCHDOG, "SUCCESS"}


def test_while_nothing_is_wrong_nothing_is_told() -> None:
    assert nccl_error([group_with(ErrorType.SUCCESS)]) == ""  # type: ignore[list-item]  # a double
    assert nccl_error([]) == ""


def group_with(error: ErrorType) -> SimpleNamespace:
    backend = SimpleNamespace(get_error=lambda: error, name=lambda: "nccl")
    return SimpleNamespace(_get_backend=lambda device: backend)
