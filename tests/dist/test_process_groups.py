"""Groups of a plan: the same calls in the same order on every rank, as many as the plan has edges and holders."""

import datetime
import functools
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from hetero.checkpoint.writer import CheckpointWriter
from hetero.distributed.closed_listeners import listening_sockets
from hetero.distributed.process_groups import (
    ParallelContext,
    backend_of_config,
    create_group,
    create_groups,
    require_started,
    time_limit,
)
from hetero.plan.communicators import PlanCommunicators
from hetero.plan.ir import Plan
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, stage, two_unlike_replicas
from tests.helpers.ranks import run_ranks
from tests.helpers.strategies import legal_plans

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]

CPU = torch.device("cpu")


def uniform(num_replicas: int, num_stages: int) -> Plan:
    """Replicas of one rank and one layer per stage; embedding and head are untied."""
    replicas = [
        replica(*(stage(layers=(s, s + 1), ranks=(r * num_stages + s,)) for s in range(num_stages)))
        for r in range(num_replicas)
    ]
    return plan(llama_model(num_layers=num_stages), replicas)


Call = tuple[tuple[int, ...], bool, str]
"""Ranks of a new group, whether only its members have to call, and its backend."""


def recorded_groups(rank: int, plan: Plan) -> list[Call]:
    """Create the groups, with every call to torch noted down."""
    calls: list[Call] = []
    new_group = dist.new_group  # noqa: TID251

    def recording(ranks: list[int], *, backend: str, use_local_synchronization: bool = False, **others: Any) -> Any:
        calls.append((tuple(ranks), use_local_synchronization, backend))
        return new_group(ranks, backend=backend, use_local_synchronization=use_local_synchronization, **others)

    with mock.patch.object(dist, "new_group", recording):
        create_groups(plan, device=CPU)
    return calls


@functools.cache
def calls_of_all_ranks() -> list[list[Call]]:
    """Of two unlike replicas: asked once, and looked at by several tests."""
    made = two_unlike_replicas()
    return run_ranks(recorded_groups, made.world_size, made)


@pytest.mark.slow
def test_every_rank_creates_every_group_in_the_same_order() -> None:
    """Also those that it is not in, also if it idles: torch counts the groups of a process to tell them apart."""
    made = two_unlike_replicas()
    calls = calls_of_all_ranks()
    collective = [[ranks for ranks, members_only, _ in of_rank if not members_only] for of_rank in calls]
    assert all(of_rank == collective[0] for of_rank in collective)
    own = [[ranks for ranks, members_only, _ in of_rank if members_only] for of_rank in calls]
    assert own == [[(rank,)] for rank in range(made.world_size)]


def test_the_groups_are_the_communicators_of_the_plan() -> None:
    """The world apart, which is there before."""
    calls = calls_of_all_ranks()[0]
    assert [ranks for ranks, members_only, _ in calls if not members_only] == [
        each.ranks for each in PlanCommunicators(two_unlike_replicas()).ordered[1:]
    ]


def test_groups_have_the_one_backend_that_serves_the_device() -> None:
    """A group that names none gets all of the world's: on CUDA, gloo's connections beside each communicator of NCCL."""
    for calls in calls_of_all_ranks():
        assert {backend for _, _, backend in calls} == {"gloo"}
    assert backend_of_config("cpu:gloo,cuda:nccl", torch.device("cuda", 3)) == "nccl"
    assert backend_of_config("cpu:gloo,cuda:nccl", CPU) == "gloo"
    assert backend_of_config("gloo", CPU) == "gloo"


@pytest.mark.parametrize("num_replicas", [2, 3, 6])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_groups_grow_with_edges_and_holders(num_replicas: int, num_stages: int) -> None:
    """Paths through the plan are ``num_replicas ** num_stages``, 7776 in the largest case here."""
    boundaries = 2 * num_replicas * (num_stages - 1)
    holders = num_stages  # Equal cuts: the ranks of one stage over all replicas; those of the last for losses as well.
    world = num_stages > 1  # With one stage its holders are the world.
    counted = len(PlanCommunicators(uniform(num_replicas, num_stages)).ordered)
    assert counted == boundaries + holders + world


def limits_of_groups(rank: int, plan: Plan, folder: Path) -> set[datetime.timedelta | None]:
    """How long ranks wait for one another: in every group of a plan, and in that of its saves."""
    context = create_groups(plan, device=CPU)
    writer = CheckpointWriter(folder, world=context.world, start_step=0, keep_last=None, asynchronous=True)
    alone = [] if context.work is None else [context.work.alone]
    return {time_limit(group) for group in (*context.groups, *alone, writer._group)}


@pytest.mark.slow
@pytest.mark.parametrize("limit_s", [40, 2 * 3600])
def test_every_group_waits_as_long_as_the_world(limit_s: int, tmp_path: Path) -> None:
    """Torch gives groups half an hour, if nothing is said: longer than the one here, and shorter than the other."""
    made = two_unlike_replicas()
    limits = run_ranks(limits_of_groups, made.world_size, made, tmp_path / "saved", timeout_s=limit_s)
    assert limits == [{datetime.timedelta(seconds=limit_s)}] * made.world_size


@pytest.mark.slow
@given(legal_plans())
def test_holder_groups_stay_few_for_any_plan(made: Plan) -> None:
    """One per stretch of layers between cuts and per shard of the finest common cut, and the tied embedding's."""
    edges = {edge for _, _, stage in made.stages() for edge in (stage.first_layer, stage.end_layer)}
    stretches, groups = len(edges) - 1, PlanCommunicators(made).gradients
    # Degrees come from 1, 2, 3, 4 and 6: their least common multiple is 12 at most. One more group: all shards.
    assert len(groups) <= (2 * stretches + 1) * (12 + 1)
    assert all(list(ranks) == sorted(set(ranks)) and len(ranks) > 1 for ranks in groups)


def seen_by(rank: int, plan: Plan) -> dict[str, Any]:
    """Every group of a rank's context with its ranks in order, and the sum of ranks that an all-reduce on it gives."""
    context = create_groups(plan, device=CPU)
    summed = functools.partial(sum_over, rank)
    seen: dict[str, Any] = {"world": summed(context.world)}
    if context.work is not None:
        seen |= seen_by_worker(context, summed)
    return seen


def seen_by_worker(context: ParallelContext, summed: functools.partial[Any]) -> dict[str, Any]:
    work = context.work
    assert work is not None
    seen: dict[str, Any] = {"tp": summed(work.tp), "alone": summed(work.alone)}
    # Downstream first on both sides, so that neighbours meet.
    for name, boundary in (("before", work.before), ("after", work.after)):
        if boundary is not None:
            seen[name] = summed(boundary.forward), summed(boundary.backward)
            assert boundary.forward is not boundary.backward
    if work.is_last and context.losses is not None:
        seen["losses"] = summed(context.losses)
    seen["gradients"] = {ranks: summed(group) for ranks, group in context.gradients.items() if context.rank in ranks}
    seen["place"] = work.placement
    seen["ends"] = work.is_first, work.is_last
    seen["num_microbatches"] = work.num_microbatches
    return seen


def sum_over(rank: int, group: dist.ProcessGroup) -> tuple[list[int], int]:
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    return dist.get_process_group_ranks(group), int(total.item())


def test_each_rank_finds_its_own_groups() -> None:
    """All of them work, and a rank's position in its tensor-parallel group is the one that the plan gives it."""
    made = two_unlike_replicas()
    by_rank = run_ranks(seen_by, made.world_size, made)

    def on(*ranks: int) -> tuple[list[int], int]:
        return list(ranks), sum(ranks)

    assert [seen["world"] for seen in by_rank] == [on(*range(9))] * 9
    for rank, seen in enumerate(by_rank):
        place = made.placement(rank)
        assert seen.get("place") == place
        if place is None:
            assert set(seen) == {"world"}
            continue
        stages = made.replicas[place.replica].stages
        assert seen["tp"] == on(*stages[place.stage].tp_groups[place.dp_rank])
        assert seen["alone"] == on(rank)
        for name, s in (("before", place.stage - 1), ("after", place.stage)):
            if 0 <= s < len(stages) - 1:
                both = on(*sorted(stages[s].ranks + stages[s + 1].ranks))
                assert seen[name] == (both, both)
            else:
                assert name not in seen
        assert seen["ends"] == (place.stage == 0, place.stage == len(stages) - 1)
        assert ("losses" in seen) == (place.stage == len(stages) - 1)
        assert seen.get("losses", on(5, 8)) == on(5, 8)
        assert seen["gradients"] == {ranks: on(*ranks) for ranks in PlanCommunicators(made).gradients if rank in ranks}
    assert [seen["num_microbatches"] for seen in by_rank if "tp" in seen] == [2, 2, 2, 2, 2, 3, 3]


def test_a_rank_that_holds_all_alone_shares_no_gradients() -> None:
    made = plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,)))])
    assert not PlanCommunicators(made).gradients


def problem_of_broadcast(rank: int, members: list[int]) -> str:
    group = create_group(members)
    try:
        require_started([dist.broadcast(torch.zeros(1), src=0, group=group, async_op=True)])[0].wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_cannot_start_a_collective_of_other_ranks() -> None:
    """Torch warns and returns nothing, and what the rank then takes for a result is not one."""
    assert run_ranks(problem_of_broadcast, 2, [0, 1]) == ["", ""]
    member, other = run_ranks(problem_of_broadcast, 2, [0])
    assert member == ""
    assert "no member" in other


def strangers_that_reach_a_group(rank: int) -> list[bool]:
    """Whether each socket that listens since a group of gloo was made answers a stranger."""
    before = listening_sockets()
    group = create_group([0, 1, 2], backend="gloo")
    made = [descriptor for inode, descriptor in listening_sockets().items() if inode not in before]
    reached = []
    for descriptor in made:
        borrowed = socket.socket(fileno=descriptor)
        address = borrowed.getsockname()[:2]
        borrowed.detach()
        try:
            socket.create_connection(address, timeout=0.3).close()
            reached.append(True)
        except TimeoutError:
            reached.append(False)
    # The group works, and the next one is made over the same store.
    total = torch.ones(1)
    for each in (group, create_group([0, 1, 2], backend="gloo")):
        dist.all_reduce(total, group=each)
    assert total.item() == 9, rank
    return reached


def test_a_group_of_gloo_takes_no_stranger_once_its_ranks_are_connected() -> None:
    assert run_ranks(strangers_that_reach_a_group, 3) == [[False]] * 3
