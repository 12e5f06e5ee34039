"""A rank does what its program says: computes in order, each sum inside the compute that it follows, gathers last."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.distributed.timing import Collective, Start, Timing, Waitable
from hetero.plan.gradient_groups import Bucket, gradient_buckets
from hetero.plan.ir import Plan
from hetero.plan.lowering import CollectiveOptions, lower_rank
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from hetero.schedule.actions import Action
from hetero.schedule.program import Program, QueuedAction
from tests.dist.interleaved_plans import PLANS
from tests.helpers.plans import sharded
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ADAM, microbatches

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(120)]

BUCKET_NUMEL = 3000
Seen = tuple[list[Action], list[tuple[tuple[int, ...], float, Action, bool]], list[tuple[tuple[int, ...], float]]]
"""Computes; sums by ranks and position with the last compute that began and whether it was running; gathers."""


class Recording(Timing):
    """Notes what happens in which order."""

    def __init__(self) -> None:
        self.computes: list[Action] = []
        self.sums: list[tuple[tuple[int, ...], float, Action, bool]] = []
        self.gathers: list[tuple[tuple[int, ...], float]] = []
        self._runs = False

    @contextlib.contextmanager
    def compute(self, action: Action) -> Iterator[None]:
        self.computes.append(action)
        self._runs = True
        yield
        self._runs = False

    def collective(
        self,
        queued: QueuedAction,
        operation: Collective,
        bucket: Bucket,
        start: Start,
        *,
        ready_s: float | None = None,
    ) -> Sequence[Waitable]:
        if operation == "all_gather":
            self.gathers.append((bucket.ranks, bucket.position))
        else:
            self.sums.append((bucket.ranks, bucket.position, self.computes[-1], self._runs))
        return start()


def a_step(rank: int, made: Plan, overlap: bool) -> Seen:
    timing = Recording()
    context = create_groups(made, device=torch.device("cpu"), timing=timing)
    options = DataParallelOptions(bucket_numel=BUCKET_NUMEL, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=options)
    trainer.step(microbatches(made, rank, step=0) if reads_data(context) else None)
    trainer.finish_gather()
    return timing.computes, timing.sums, timing.gathers


def program_of(made: Plan, rank: int, shared: Sequence[Bucket], *, overlap: bool) -> Program:
    held = {n: bucket for n, bucket in enumerate(shared) if rank in bucket.ranks}
    options = CollectiveOptions(overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    return lower_rank(made, rank, held, options=options)


@pytest.mark.rotates("programs")
@pytest.mark.parametrize("overlap", [True, False], ids=["beside", "after"])
@pytest.mark.parametrize(
    "made",
    [PLANS["beside-another"], sharded(PLANS["beside-another"]), sharded(PLANS["unequal-tp"]), PLANS["tied-halves"]],
    ids=["beside-another", "beside-another-sharded", "unequal-tp-sharded", "tied-halves-sharded"],
)
def test_a_rank_does_what_its_program_says(made: Plan, overlap: bool) -> None:
    shared = [bucket for bucket in gradient_buckets(made, bucket_numel=BUCKET_NUMEL) if len(bucket.ranks) > 1]
    for rank, (computes, sums, gathers) in enumerate(run_ranks(a_step, made.world_size, made, overlap)):
        program = program_of(made, rank, shared, overlap=overlap)
        assert computes == [queued.action for queued in program.queues["compute"]]
        assert gathers == named(program, "gather", shared)
        assert [bucket for *bucket, _, _ in sums] == [list(each) for each in named(program, "reduce", shared)]
        earliest = 0
        for queued, (_, _, last_begun, runs) in zip(program.queues.get("reduce", ()), sums, strict=True):
            (point,) = queued.after
            # What stands before it in the queue may hold it up.
            earliest = max(earliest, computes.index(point.action))
            assert last_begun == computes[earliest]
            assert runs or not overlap or point.position is None


def named(program: Program, queue: str, shared: Sequence[Bucket]) -> list[tuple[tuple[int, ...], float]]:
    """Ranks and positions of the buckets of ``queue``, in its order."""
    numbers = [queued.action.number for queued in program.queues.get(queue, ())]
    return [(shared[n].ranks, shared[n].position) for n in numbers]
