"""Which steps nsys watches, and where megatron-core's layers mark their parts for it."""

from collections.abc import Iterator

import pytest
import torch
from megatron.core.utils import nvtx_range_pop, nvtx_range_push

from hetero.errors import DataError
from megatron.pretrain import profiler
from tests.helpers.flags import parse

STEPS = "--profile --profile-step-start 1 --profile-step-end 3"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls of CUDA's profiler and of NVTX, on a machine that seems to have them."""
    calls: list[str] = []
    monkeypatch.setattr(profiler, "runs_cuda", lambda device: True)
    for module, names in ((torch.cuda.profiler, ("start", "stop")), (torch.cuda.nvtx, ("range_push", "range_pop"))):
        for name in names:
            monkeypatch.setattr(module, name, lambda *args, name=name: calls.append(" ".join([name, *args])))
    yield calls
    nvtx_range_push("after")
    assert "range_push after" not in calls, "nothing is marked when the run is over"


def run(flags: str, *, rank: int = 0, fails_in: int = 0) -> None:
    """Four steps, each of which has a part that megatron-core marks."""
    with profiler.profiling(parse(flags), rank=rank, device=torch.device("cpu"), start_step=0) as steps:
        for step in range(1, 5):
            if step == fails_in:
                raise DataError("no data")
            nvtx_range_push(f"mlp {step}")
            nvtx_range_pop(f"mlp {step}")
            steps.after_step(step)


def test_layers_mark_their_parts_in_the_steps_that_are_profiled(seen: list[str]) -> None:
    run(f"{STEPS} --nvtx-ranges")
    marks = [f"range_push mlp {step}" for step in (2, 3)]
    assert seen == ["start", marks[0], "range_pop", marks[1], "range_pop", "stop"]


def test_without_the_flag_or_on_another_rank_nothing_is_marked(seen: list[str]) -> None:
    run(STEPS)
    assert seen == ["start", "stop"]
    run(f"{STEPS} --nvtx-ranges", rank=1)
    assert seen == ["start", "stop"]


def test_marks_end_where_a_step_fails(seen: list[str]) -> None:
    with pytest.raises(DataError, match="no data"):
        run(f"{STEPS} --nvtx-ranges", fails_in=3)
    assert seen[-1] == "stop"
