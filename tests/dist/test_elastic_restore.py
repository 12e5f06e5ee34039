"""After the loss of a node, ranks go on from the copies that are left, under the same plan and under any other."""

import asyncio
import contextlib
import dataclasses
import functools
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from hetero.elastic.copy_folder import find_copy, shard_path
from hetero.elastic.object_store import ObjectStore
from hetero.elastic.records import Epoch, HeldStep, RankAssignment, RestorePoint
from hetero.elastic.recovery import choose_step
from hetero.plan.ir import Plan
from hetero.spec.parameters import parameters
from tests.dist.resumed_runs import SHARDED
from tests.helpers.cases import slow
from tests.helpers.commands import command_line
from tests.helpers.comparison import shard
from tests.helpers.elastic import Run, elastic_session, nodes
from tests.helpers.host_training import left_to_hosts
from tests.helpers.layouts import layout
from tests.helpers.models import MOE_FLAGS, gpt2_model, moe_model
from tests.helpers.plans import plan, replica, stage, with_batch
from tests.helpers.ranks import run_ranks
from tests.helpers.sessions import Session, session
from tests.helpers.training import one_process_plan, trace_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

END = 6
MODEL = gpt2_model(num_layers=2)
DP2_PP2 = dataclasses.replace(
    plan(
        MODEL,
        [
            replica(stage(layers=(0, 1), ranks=(0,)), stage(layers=(1, 2), ranks=(1,)), num_samples=4),
            replica(stage(layers=(0, 1), ranks=(2,)), stage(layers=(1, 2), ranks=(3,)), num_samples=4),
        ],
    ),
    precision="fp64",
)
TWO_STAGES = dataclasses.replace(
    plan(MODEL, [replica(stage(layers=(0, 1), ranks=(0,)), stage(layers=(1, 2), ranks=(1,)), num_samples=8)]),
    precision="fp64",
)
TWO_RANKS = dataclasses.replace(
    plan(MODEL, [replica(stage(layers=(0, 0.5), ranks=(0,)), stage(layers=(0.5, 2), ranks=(1,)), num_samples=8)]),
    precision="fp64",
)


def argv(made: Plan, *, sharded: bool, **flags: str | None) -> list[str]:
    return command_line(
        global_batch_size=str(made.global_batch_size),
        train_iters=str(END),
        hetero_plan="given.json",
        init_method_std="0.1",
        hetero_elastic_copy_every="1",
        lr_decay_style="linear",
        **{**(SHARDED if sharded else {}), **flags},
    )


def epoch(
    run: Run,
    made: Plan,
    ranks_of: dict[str, tuple[int, ...]],
    *,
    sharded: bool,
    end_step: int,
    dies: bool = False,
    **flags: str | None,
) -> list[Session]:
    """One epoch, from what the nodes have."""
    made = dataclasses.replace(made, distributed_optimizer=sharded)
    assignments = run.assignments(run.next_epoch(made, ranks_of))
    return run_ranks(
        elastic_session, made.world_size, assignments, argv(made, sharded=sharded, **flags), end_step, dies
    )


@functools.cache
def uninterrupted(made: Plan) -> Session:
    """One process from the start to the end."""
    one = one_process_plan(made)
    (alone,) = run_ranks(session, 1, one, argv(one, sharded=False), END)
    return alone


def assert_as_one_process(made: Plan, ranks: list[Session]) -> None:
    """Losses, learning rate and weights, to 1e-9."""
    alone = uninterrupted(one_process_plan(made))
    by_name = {parameter.name: parameter for parameter in parameters(made.model)}
    for rank, mine in enumerate(ranks):
        assert mine.losses == pytest.approx(alone.losses[mine.start_step :], rel=1e-9)
        assert mine.next_lr == alone.next_lr
        for tensor, values in mine.weights.items():
            whole = alone.weights[tensor]
            expected = shard(whole, by_name[tensor], trace_of(made, rank))
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-9 * np.abs(whole).max(), err_msg=tensor)


def assert_same_bits(ours: list[Session], theirs: list[Session]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.losses == other.losses[mine.start_step :]
        for found, wanted in ((mine.state, other.state), (mine.weights, other.weights)):
            assert found.keys() == wanted.keys()
            for name, values in found.items():
                np.testing.assert_array_equal(values, wanted[name], name)


FOUR = {"a": (0, 1), "b": (2, 3)}


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_what_only_a_node_has_that_leaves_is_fetched_from_it(tmp_path: Path) -> None:
    """It has no ranks any more, but all copies: it was alone."""
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        epoch(run, TWO_STAGES, {"a": (0, 1)}, sharded=False, end_step=3)
        again = epoch(run, TWO_RANKS, {"b": (0, 1)}, sharded=False, end_step=END)
    assert [each.start_step for each in again] == [3, 3]
    assert_as_one_process(TWO_RANKS, again)


@pytest.mark.slow
@pytest.mark.rotates("precisions")
@pytest.mark.parametrize(
    "sharded", [pytest.param(False, marks=pytest.mark.slow, id="whole"), pytest.param(True, id="sharded")]
)
def test_a_lost_node_comes_back_and_the_bits_are_the_same(sharded: bool, tmp_path: Path) -> None:
    """Killed after three steps with every step copied: what was committed is there, and training goes on from it."""
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        epoch(run, DP2_PP2, FOUR, sharded=sharded, end_step=3, dies=True)
        assert max(report.committed for report in made.reports()) == 2
        made.lose("a")
        made.add("c")
        again = epoch(run, DP2_PP2, {"c": (0, 1), "b": (2, 3)}, sharded=sharded, end_step=END)
        assert again[0].start_step in (2, 3), "the third may be whole, though nobody knew"
        made.lose("b")
        made.add("d")
        third = epoch(run, DP2_PP2, {"c": (0, 1), "d": (2, 3)}, sharded=sharded, end_step=END)
        assert [each.start_step for each in third] == [END] * 4, "the end was committed"
        assert [report.phase for report in made.reports()].count("finished") == 8
    made_plan = dataclasses.replace(DP2_PP2, distributed_optimizer=sharded)
    alone = run_ranks(session, 4, made_plan, argv(made_plan, sharded=sharded), END)
    assert_same_bits(again, alone)
    assert_same_bits(third, alone)
    assert_as_one_process(DP2_PP2, again)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_what_is_left_goes_on_under_another_plan(sharded: bool, tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        epoch(run, DP2_PP2, FOUR, sharded=sharded, end_step=3, dies=True)
        made.lose("a")
        rest = epoch(run, TWO_RANKS, {"b": (0, 1)}, sharded=not sharded, end_step=END)
        assert rest[0].start_step in (2, 3)
    assert_as_one_process(TWO_RANKS, rest)


@pytest.mark.slow
def test_a_change_of_the_auxiliary_loss_is_said(tmp_path: Path) -> None:
    """A plan with other microbatches has another loss over each of them, and the same over each sequence."""
    ones = dataclasses.replace(TWO_STAGES, model=moe_model(num_layers=2))
    (two_stages,) = ones.replicas
    twos = ones.with_replicas({0: two_stages.with_each_stage(micro_batch_size=[2, 2])})
    for loss, said in (
        (
            "aux_loss",
            "the run had microbatches of 1 sample and goes on with microbatches of 2 samples, so with another",
        ),
        ("seq_aux_loss", None),
    ):
        flags = {**MOE_FLAGS, "moe_router_load_balancing_type": loss}
        (tmp_path / loss).mkdir()
        with nodes(tmp_path / loss, "a") as made:
            run = Run(made)
            epoch(run, ones, {"a": (0, 1)}, sharded=False, end_step=1, **flags)
            assignments = run.assignments(run.next_epoch(twos, {"a": (0, 1)}))
            printed, _ = run_ranks(printed_by_elastic_session, 2, assignments, argv(twos, sharded=False, **flags), 2)
        assert "goes on after step 1, from copies" in printed
        assert (said in printed) if said is not None else ("auxiliary loss" not in printed)


def printed_by_elastic_session(rank: int, assignments: Sequence[RankAssignment], argv: list[str], end_step: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        elastic_session(rank, assignments, argv, end_step)
    return printed.getvalue()


@pytest.mark.slow
def test_what_hosts_update_is_copied_and_restored_on_devices(tmp_path: Path) -> None:
    """Copies are made of a whole step, also where hosts update beside the next one."""
    on_hosts = left_to_hosts(DP2_PP2, speculate=False)
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        epoch(run, on_hosts, FOUR, sharded=True, end_step=3, dies=True)
        made.lose("a")
        rest = epoch(run, TWO_RANKS, {"b": (0, 1)}, sharded=True, end_step=END)
        assert rest[0].start_step in (2, 3)
    assert_as_one_process(TWO_RANKS, rest)


def test_previews_are_refused_where_copies_are_made(tmp_path: Path) -> None:
    with (
        nodes(tmp_path, "a", "b") as made,
        pytest.raises(AssertionError, match="ConfigError: copies for recovery: the"),
    ):
        epoch(Run(made), left_to_hosts(DP2_PP2, speculate=True), FOUR, sharded=True, end_step=2)


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_unlike_replicas_lose_a_node_and_go_on_under_a_plan_of_others(tmp_path: Path) -> None:
    """Unlike depths and shares of the optimizer; then another layout, with an idle rank, on the nodes that are left."""
    before, after = (layout(name, "gpt2-tied") for name in ("everything", "idle-ranks"))
    batch = max(before.global_batch_size, after.global_batch_size)
    before, after = with_batch(before, batch), with_batch(after, batch)
    with nodes(tmp_path, "a", "b", "c") as made:
        run = Run(made)
        third = before.world_size // 3
        ranks = tuple(range(before.world_size))
        placed = {"a": ranks[:third], "b": ranks[third : 2 * third], "c": ranks[2 * third :]}
        epoch(run, before, placed, sharded=True, end_step=3, dies=True)
        made.lose("b")
        ranks = tuple(range(after.world_size))
        rest = epoch(run, after, {"a": ranks[::2], "c": ranks[1::2]}, sharded=True, end_step=END)
        assert rest[0].start_step in (2, 3)
    alone = uninterrupted(one_process_plan(after))
    by_name = {parameter.name: parameter for parameter in parameters(after.model)}
    for rank, mine in enumerate(rest):
        assert mine.losses == pytest.approx(alone.losses[mine.start_step :], rel=1e-9)
        if after.placement(rank) is not None:
            for tensor, values in mine.weights.items():
                whole = alone.weights[tensor]
                expected = shard(whole, by_name[tensor], trace_of(after, rank))
                np.testing.assert_allclose(values, expected, rtol=0, atol=1e-9 * np.abs(whole).max(), err_msg=tensor)


@pytest.mark.slow
def test_half_precision_goes_on_bit_by_bit_with_dropout_and_loss_scale(tmp_path: Path) -> None:
    """A node is lost, another takes its place: rank state comes from the keeper, the loss scale from any copy."""
    half = dataclasses.replace(DP2_PP2, precision="fp16", distributed_optimizer=True)
    flags = {
        "fp16": "",
        "initial_loss_scale": "256",
        "loss_scale_window": "2",
        "attention_dropout": "0.1",
        "hidden_dropout": "0.1",
    }
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        epoch(run, half, FOUR, sharded=True, end_step=3, dies=True, **flags)
        made.lose("b")
        made.add("c")
        again = epoch(run, half, {"a": (0, 1), "c": (2, 3)}, sharded=True, end_step=END, **flags)
        assert again[0].start_step in (2, 3)
    alone = run_ranks(session, 4, half, argv(half, sharded=True, **flags), END)
    assert_same_bits(again, alone)
    assert again[0].loss_scale == alone[0].loss_scale == 2048


class TestBadCopies:
    @pytest.fixture
    def lost(self, tmp_path: Path) -> Iterator[tuple[Run, Epoch]]:
        """Two steps were copied, both nodes are there, and an epoch is to go on."""
        with nodes(tmp_path, "a", "b") as made:
            run = Run(made)
            epoch(run, TWO_STAGES, {"a": (0,), "b": (1,)}, sharded=False, end_step=2)
            made.reports()
            yield run, run.next_epoch(TWO_STAGES, {"a": (0,), "b": (1,)})

    def files(self, run: Run, node: str, epoch: Epoch, unit: str) -> Path:
        found = find_copy(run.nodes.folder(node), epoch=epoch.start.epoch, step=epoch.start.step, unit=unit)
        assert found is not None
        return shard_path(found[0], unit)

    def go_on(self, run: Run, next_epoch: Epoch) -> list[Session]:
        flags = argv(TWO_STAGES, sharded=False)
        return run_ranks(elastic_session, 2, run.assignments(next_epoch), flags, END)

    @pytest.mark.parametrize("unit", ["rank_00000", *slow("rank_00001")])
    @pytest.mark.parametrize("harm", ["flip", *slow("cut", "remove")])
    def test_the_next_source_is_taken(self, lost: tuple[Run, Epoch], unit: str, harm: str) -> None:
        """A bad copy beside the reader, and the same on the way from the other node."""
        run, next_epoch = lost
        path = self.files(run, "a", next_epoch, unit)
        content = bytearray(path.read_bytes())
        if harm == "flip":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        elif harm == "cut":
            os.truncate(path, len(content) // 2)
        else:
            path.unlink()
        rest = self.go_on(run, next_epoch)
        assert [each.start_step for each in rest] == [2, 2]
        assert_as_one_process(TWO_STAGES, rest)
        told = {report.detail for report in run.nodes.reports() if report.phase == "bad_copy"}
        assert told <= {f"a/1/2/{unit}"}
        assert told or unit == "rank_00001", "rank 0 reads its own node's copy first"

    def test_without_any_source_a_rank_says_which_are_bad(self, lost: tuple[Run, Epoch]) -> None:
        run, next_epoch = lost
        for node in ("a", "b"):
            path = self.files(run, node, next_epoch, "rank_00000")
            content = bytearray(path.read_bytes())
            content[-9000] ^= 1
            path.write_bytes(content)
        with pytest.raises(AssertionError, match=r"the checksum of .* is wrong.*the checksum of .* is wrong"):
            self.go_on(run, next_epoch)
        told = {report.detail for report in run.nodes.reports() if report.phase == "bad_copy"}
        assert told == {"a/1/2/rank_00000", "b/1/2/rank_00000"}


@pytest.mark.slow
def test_what_no_node_has_comes_from_the_object_store(tmp_path: Path) -> None:
    """Both nodes are lost at once."""
    places = {"a": (0,), "b": (1,)}
    url = f"file://{tmp_path / 'store'}"
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        first = dataclasses.replace(TWO_STAGES, distributed_optimizer=False)
        made_epoch = run.next_epoch(first, places)
        flags = argv(first, sharded=False)
        run_ranks(elastic_session, 2, run.assignments(made_epoch), flags, 2)
        stored = asyncio.run(upload(run, url))
        for name in places:
            made.lose(name)
            made.add(name)
        found = choose_step(made.inventories(), lineage=run.lineage, stored=stored)
        assert found is not None
        assert found.start == RestorePoint(epoch=1, step=2)
        assert not any(found.sources.values())
        assignments = run.assignments(run.epoch_from(found, first, places))
        assignments = [dataclasses.replace(each, object_store=url) for each in assignments]
        rest = run_ranks(elastic_session, 2, assignments, flags, END)
    assert [each.start_step for each in rest] == [2, 2]
    assert_as_one_process(TWO_STAGES, rest)


async def upload(run: Run, url: str) -> tuple[HeldStep, ...]:
    """Step 2 of epoch 1, as the nodes have it."""
    store, units = ObjectStore(url), set()
    for inventory in run.nodes.inventories():
        for unit in inventory.units_of_epoch[1]:
            found = find_copy(run.nodes.folder(inventory.node), epoch=1, step=2, unit=unit)
            if found is not None:
                units.add(unit)
                await store.upload(found[1], shard_path(found[0], unit))
    assert await store.publish(epoch=1, step=2, units=units)
    return (await store.history()).steps
