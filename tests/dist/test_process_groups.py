"""Groups of a plan: the same calls in the same order on every rank, as many as the plan has edges and holders."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from hetero.distributed import process_groups
from hetero.distributed.process_groups import ParallelContext, create_groups, flat_sync_ranks
from hetero.plan.ir import Plan
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.strategies import legal_plans

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]

CPU = torch.device("cpu")


def unlike_replicas() -> Plan:
    """tp 2 before dp 2 before one rank, beside two stages that are cut elsewhere; ranks 0 and 7 idle."""
    first = replica(
        stage(layers=(0, 3), ranks=(3, 4), tp=2, mbs=2),
        stage(layers=(3, 5), ranks=(1, 2), dp=2),
        stage(layers=(5, 6), ranks=(5,), mbs=2),
        num_samples=4,
    )
    second = replica(stage(layers=(0, 2), ranks=(6,)), stage(layers=(2, 6), ranks=(8,)), num_samples=3)
    return plan(gpt2_model(), [first, second], idle_ranks=(7, 0))


def uniform(num_replicas: int, num_stages: int) -> Plan:
    """Replicas of one rank and one layer per stage; embedding and head are untied."""
    replicas = [
        replica(*(stage(layers=(s, s + 1), ranks=(r * num_stages + s,)) for s in range(num_stages)))
        for r in range(num_replicas)
    ]
    return plan(llama_model(num_layers=num_stages), replicas)


Call = tuple[tuple[int, ...], bool]
"""Ranks of a new group, and whether only its members have to call."""


def recorded_groups(rank: int, plan: Plan) -> list[Call]:
    """Create the groups, with every call to torch noted down."""
    calls: list[Call] = []
    new_group = dist.new_group

    def recording(ranks: list[int], *args: Any, use_local_synchronization: bool = False, **kwargs: Any) -> Any:
        calls.append((tuple(ranks), use_local_synchronization))
        return new_group(ranks, *args, use_local_synchronization=use_local_synchronization, **kwargs)

    dist.new_group = recording
    create_groups(plan, device=CPU)
    return calls


def test_every_rank_creates_every_group_in_the_same_order() -> None:
    """Also those that it is not in, also if it idles: torch counts the groups of a process to tell them apart."""
    made = unlike_replicas()
    calls = run_ranks(recorded_groups, made.world_size, made)
    collective = [[ranks for ranks, members_only in of_rank if not members_only] for of_rank in calls]
    assert all(of_rank == collective[0] for of_rank in collective)
    own = [[ranks for ranks, members_only in of_rank if members_only] for of_rank in calls]
    assert own == [[] if rank in made.idle_ranks else [(rank,)] for rank in range(made.world_size)]


def test_the_groups_of_a_plan() -> None:
    """What the number of groups is made of, for one plan by hand."""
    made = unlike_replicas()
    calls = run_ranks(recorded_groups, made.world_size, made)[0]
    tensor_parallel = [(3, 4), (1,), (2,), (5,), (6,), (8,)]
    # Forward and backward of each boundary, replica after replica.
    boundaries = [(1, 2, 3, 4)] * 2 + [(1, 2, 5)] * 2 + [(6, 8)] * 2
    losses = [(5, 8)]
    assert [ranks for ranks, _ in calls[: len(tensor_parallel + boundaries + losses)]] == (
        tensor_parallel + boundaries + losses
    )
    holders = {
        # Layers 0 and 1, 2, 3 and 4, and 5: replicated parameters on all ranks of both stages, ...
        (3, 4, 6),
        (3, 4, 8),
        (1, 2, 8),
        (5, 8),
        # ... cut ones half by half; the tied embedding is also with the last stages.
        (3, 6),
        (4, 6),
        (3, 8),
        (4, 8),
        (3, 5, 6, 8),
        (4, 5, 6, 8),
    }
    shared = [ranks for ranks, _ in calls[len(tensor_parallel + boundaries + losses) :]]
    assert set(shared) == holders
    assert len(shared) == len(holders)


def count_groups(made: Plan, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many groups rank 0 creates. No processes: torch's part is left out."""
    groups: list[list[int]] = []

    def new_group(ranks: list[int], **_: object) -> object:
        groups.append(ranks)
        return object()

    stand_ins = {"get_rank": lambda group=None: 0, "new_group": new_group, "group": SimpleNamespace(WORLD=object())}
    monkeypatch.setattr(process_groups, "dist", SimpleNamespace(**{**vars(dist), **stand_ins}))
    create_groups(made, device=CPU)
    return len(groups)


@pytest.mark.parametrize("num_replicas", [2, 3, 6])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_groups_grow_with_edges_and_holders(
    num_replicas: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths through the plan are ``num_replicas ** num_stages``, 7776 in the largest case here."""
    tensor_parallel = num_replicas * num_stages
    boundaries = 2 * num_replicas * (num_stages - 1)
    losses = 1
    holders = num_stages  # equal cuts: the ranks of one stage over all replicas
    alone = 1  # each rank's own, which no other has to call
    counted = count_groups(uniform(num_replicas, num_stages), monkeypatch)
    assert counted == tensor_parallel + boundaries + losses + holders + alone


@given(legal_plans())
def test_holder_groups_stay_few_for_any_plan(made: Plan) -> None:
    """One per stretch of layers between cuts and per shard of the finest common cut, and the tied embedding's."""
    edges = {edge for _, _, stage in made.stages() for edge in (stage.first_layer, stage.end_layer)}
    stretches = len(edges) - 1
    # Degrees come from 1, 2, 3, 4 and 6: their least common multiple is 12 at most. One more group: all shards.
    assert len(flat_sync_ranks(made)) <= (stretches + 1) * (12 + 1)
    assert len(set(flat_sync_ranks(made))) == len(flat_sync_ranks(made))
    assert all(list(ranks) == sorted(set(ranks)) and len(ranks) > 1 for ranks in flat_sync_ranks(made))


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
    if work.is_last:
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
    made = unlike_replicas()
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
        assert seen["gradients"] == {ranks: on(*ranks) for ranks in flat_sync_ranks(made) if rank in ranks}
    assert [seen["num_microbatches"] for seen in by_rank if "tp" in seen] == [2, 2, 2, 2, 2, 3, 3]


def test_a_rank_that_holds_all_alone_shares_no_gradients() -> None:
    made = plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,)))])
    assert flat_sync_ranks(made) == ()
