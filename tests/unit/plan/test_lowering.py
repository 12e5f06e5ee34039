"""Plans as programs. The files under tests/golden/programs are the specification; read them before the code."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.plan.gradient_groups import Bucket, by_number, gradient_buckets
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.lowering import CollectiveOptions, evaluation_rows, lower, step_rows
from hetero.plan.offload import (
    Offload,
    blocks_with_weights_on_host,
    stages_of_ranks,
    updates_on_host,
    weights_on_host,
)
from hetero.plan.validate import validate
from hetero.schedule.actions import BACKWARD, COMPUTE, NO_STAGE, RECEIVE, SEND, UPDATE, Action, ActionKind
from hetero.schedule.program import Point, Program, parse_programs
from hetero.spec.parameters import Parameter, stage_parameters
from tests.helpers.layouts import layouts, with_delays
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.strategies import legal_plans, offloaded_plans, step_replicas

GOLDEN = Path(__file__).parents[2] / "golden" / "programs"


def _plain() -> Plan:
    stages = (stage(layers=(0, 1), ranks=(0, 1), dp=2, depth=2), stage(layers=(1, 2), ranks=(2,), mbs=2, depth=1))
    return plan(llama_model(num_layers=2), [replica(*stages, num_samples=6)])


def _interleaved() -> Plan:
    stages = (stage(layers=(s, s + 1), ranks=(s % 2,), depth=depth) for s, depth in enumerate((3, 2, 2, 1)))
    alone = replica(stage(layers=(0, 4), ranks=(2,), depth=1), num_samples=1)
    return plan(llama_model(num_layers=4), [replica(*stages, num_samples=4), alone])


def _unequal_microbatches() -> Plan:
    stages = (stage(layers=(0, 1), ranks=(0,), mbs=4, depth=1), stage(layers=(1, 2), ranks=(1, 2), dp=2, depth=1))
    return plan(llama_model(num_layers=2), [replica(*stages, num_samples=8)])


def _split_backward() -> Plan:
    first = stage(layers=(0, 1), ranks=(0, 1), dp=2, depth=2, delay=0)
    second = stage(layers=(1, 2), ranks=(2, 3), dp=2, depth=1, delay=1)
    return plan(llama_model(num_layers=2), [replica(first, second, num_samples=6)])


def _tied_embedding() -> Plan:
    stages = (stage(layers=(0, 1.5), ranks=(0,), depth=2), stage(layers=(1.5, 2), ranks=(1,), depth=1))
    return plan(gpt2_model(num_layers=2), [replica(*stages, num_samples=2)])


def _distributed_optimizer() -> Plan:
    stages = (stage(layers=(0, 1), ranks=(0, 1), tp=2, depth=2), stage(layers=(1, 2), ranks=(2,), depth=1))
    alone = replica(stage(layers=(0, 2), ranks=(3,), depth=1), num_samples=1)
    return sharded(plan(llama_model(num_layers=2), [replica(*stages, num_samples=2), alone]))


def _offload() -> Plan:
    first = stage(layers=(0, 1), ranks=(0,), mbs=2, depth=1)
    second = stage(layers=(1, 2), ranks=(1, 2), dp=2, depth=1)
    made = replica(first, second, num_samples=4).with_each_stage(
        offload=[Offload(optimizer_from=0.5), Offload(optimizer_from=2, speculate=True)]
    )
    return sharded(plan(llama_model(num_layers=2), [made]))


def _activations_on_host() -> Plan:
    """Of two stages of three, which two ranks hold in turns."""
    stages = (
        stage(layers=(0, 1), ranks=(0,), depth=2),
        stage(layers=(1, 2), ranks=(1,), depth=2),
        stage(layers=(2, 3), ranks=(0,), depth=1),
    )
    made = replica(*stages, num_samples=3).with_each_stage(
        offload=[Offload(activations_until=0), Offload(), Offload(activations_until=2)]
    )
    return plan(llama_model(num_layers=3), [made])


def _gradients_on_host() -> Plan:
    """Of a rank alone, and of two that share all they hold."""
    stages = (stage(layers=(0, 1), ranks=(0,), mbs=2, depth=2), stage(layers=(1, 2), ranks=(1, 2), dp=2, depth=1))
    made = replica(*stages, num_samples=4).with_each_stage(
        offload=[
            Offload(optimizer_from=0, gradients_from=0.5),
            Offload(optimizer_from=1, gradients_from=2, speculate=True),
        ]
    )
    return sharded(plan(llama_model(num_layers=2), [made]))


def _weights_on_host() -> Plan:
    """Of a rank alone, from the embedding on, and of two that share all they hold."""
    stages = (stage(layers=(0, 1), ranks=(0,), mbs=2, depth=2), stage(layers=(1, 2), ranks=(1, 2), dp=2, depth=1))
    made = replica(*stages, num_samples=4).with_each_stage(
        offload=[
            Offload(optimizer_from=-1, gradients_from=-1, weights_from=-1),
            Offload(optimizer_from=1.5, gradients_from=1.5, weights_from=2, speculate=True),
        ]
    )
    return sharded(plan(llama_model(num_layers=2), [made]))


PLANS: Mapping[str, Callable[[], Plan]] = {
    "plain": _plain,
    "interleaved": _interleaved,
    "unequal_microbatches": _unequal_microbatches,
    "split_backward": _split_backward,
    "tied_embedding": _tied_embedding,
    "distributed_optimizer": _distributed_optimizer,
    "offload": _offload,
    "activations_on_host": _activations_on_host,
    "gradients_on_host": _gradients_on_host,
    "weights_on_host": _weights_on_host,
}


def shared_buckets(of: Plan) -> list[Bucket]:
    """Of about half a layer's gradients each, so that sums start in the middle of a layer."""
    return [bucket for bucket in gradient_buckets(of, bucket_numel=4000) if len(bucket.ranks) > 1]


def all_buckets(of: Plan) -> list[Bucket]:
    """The same, and behind them those of one rank."""
    return by_number(gradient_buckets(of, bucket_numel=4000))


def golden_text(of: Plan) -> str:
    """The buckets as comments, and then the programs."""
    buckets = all_buckets(of)
    lines = [
        f"# bucket {n}: ranks {' '.join(map(str, bucket.ranks))}, from {bucket.position:g}"
        for n, bucket in enumerate(buckets)
        if len(bucket.ranks) > 1 or bucket.on_host
    ]
    return "\n".join([*lines, "", "\n\n".join(map(str, lower(of, buckets))), ""])


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    made, text = PLANS[name](), (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    validate(made)
    assert text.endswith(golden_text(made))
    assert parse_programs(text) == lower(made, all_buckets(made))


def test_every_golden_program_is_tested() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(PLANS)


@pytest.mark.parametrize(("name", "style", "described"), list(layouts()))
def test_every_layout_is_legal_and_lowers(name: str, style: str, described: Plan) -> None:
    validate(described)
    groups = [group for each in described.replicas for group in each.device_groups]
    assert [program.stages for program in lower(described, shared_buckets(described))] == groups


def test_many_layouts_interleave() -> None:
    assert len({name for name, _, plan in layouts() if any(each.is_interleaved for each in plan.replicas)}) >= 8


programs = st.one_of(legal_plans(), legal_plans().map(sharded)).map(lambda p: (p, lower(p, shared_buckets(p))))
host_programs = offloaded_plans().map(lambda p: (p, lower(p, all_buckets(p))))


@pytest.mark.slow
@given(st.one_of(programs, host_programs))
@settings(max_examples=60, deadline=None)
def test_programs_parse_as_they_print(drawn: tuple[Plan, list[Program]]) -> None:
    _, made = drawn
    assert parse_programs("\n\n".join(map(str, made))) == made


@given(step_replicas(), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_the_host_issues_computes_and_transfers_in_the_order_of_the_rows(drawn: Replica, receives_ahead: int) -> None:
    counts = drawn.microbatch_counts
    for stages, row in zip(drawn.device_groups, step_rows(drawn, receives_ahead=receives_ahead), strict=True):
        program = Program.of_row(row, replica=0, stages=stages, num_microbatches=counts)
        assert program.host_order == (*row, UPDATE)


@given(step_replicas())
@settings(max_examples=40, deadline=None)
def test_every_action_of_a_step_is_in_the_row_of_the_group_that_holds_its_stage(drawn: Replica) -> None:
    for stages, row in zip(drawn.device_groups, step_rows(drawn), strict=True):
        assert len(row) == len(set(row))
        assert {action.stage for action in row} == set(stages)
        for s in stages:
            computes = [action for action in row if action.stage == s and action.kind in COMPUTE]
            per_microbatch = 3 if drawn.stages[s].wgrad_delay is not None else 2
            assert len(computes) == per_microbatch * drawn.num_microbatches(s)


@given(step_replicas())
@settings(max_examples=40, deadline=None)
def test_an_evaluation_is_the_forwards_alone(drawn: Replica) -> None:
    for stages, row in zip(drawn.device_groups, evaluation_rows(drawn), strict=True):
        assert {action.kind for action in row} <= {ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F}
        forwards = [action for action in row if action.kind == ActionKind.F]
        assert sorted(forwards) == [
            Action(s, ActionKind.F, m) for s in stages for m in range(drawn.num_microbatches(s))
        ]


# Sums and gathers.


@given(programs)
@settings(max_examples=40, deadline=None)
def test_collectives_are_launched_in_one_order_by_all_who_hold_a_bucket(drawn: tuple[Plan, list[Program]]) -> None:
    described, made = drawn
    buckets = shared_buckets(described)
    for program in made:
        ranks = described.replicas[program.replica].stages[program.stages[0]].ranks
        held = [n for n, bucket in enumerate(buckets) if set(bucket.ranks) & set(ranks)]
        reduces, gathers = program.queues.get("reduce", ()), program.queues.get("gather", ())
        assert [queued.action for queued in reduces] == [Action(NO_STAGE, ActionKind.REDUCE, n) for n in held]
        expected = reversed(held) if described.distributed_optimizer else []
        assert [queued.action for queued in gathers] == [Action(NO_STAGE, ActionKind.GATHER, n) for n in expected]
        update = program.queues["compute"][-1]
        assert update.action == UPDATE
        assert update.after == ((Point(reduces[-1].action),) if reduces else ())
        assert all(queued.after == (Point(UPDATE),) for queued in gathers)


def _held(described: Plan, program: Program, bucket: Bucket) -> Iterator[tuple[int, float]]:
    """Each stage of the group that holds a part of the bucket, and the position of the part there."""
    names = {segment.parameter.name for segment in bucket.segments}
    for s in program.stages:
        stage = described.replicas[program.replica].stages[s]
        for parameter in stage_parameters(described.model, first_layer=stage.start, end_layer=stage.end):
            if parameter.name in names:
                yield s, _position_on(stage, parameter)


def _position_on(stage: Stage, parameter: Parameter) -> float:
    """A tied embedding's copy is the head's."""
    return stage.end if parameter.position < 0 and stage.start > 0 else parameter.position


def _sums(described: Plan) -> Iterator[tuple[tuple[int, float], list[tuple[int, float]]]]:
    """Of each sum in each program when it starts, and when each gradient of the bucket is whole: the place of the
    compute in its queue, and how far below the head.
    """
    buckets = shared_buckets(described)
    for program in lower(described, buckets):
        order = [queued.action for queued in program.queues["compute"]]
        for queued in program.queues.get("reduce", ()):
            (point,) = queued.after
            whole = []
            for s, position in _held(described, program, buckets[queued.action.number]):
                stage = described.replicas[program.replica].stages[s]
                kinds = {ActionKind.W} if stage.wgrad_delay is not None and position < stage.end else BACKWARD
                whole.append((max(i for i, a in enumerate(order) if a.stage == s and a.kind in kinds), -position))
            yield (order.index(point.action), math.inf if point.position is None else -point.position), whole


@given(legal_plans(), st.lists(st.one_of(st.none(), st.integers(0, 2)), min_size=4, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_bucket_is_summed_when_all_its_gradients_are_whole(drawn: Plan, delays: list[int | None]) -> None:
    for start, whole in _sums(with_delays(drawn, delays)):
        assert start >= max(whole)


def test_a_sum_waits_for_what_a_higher_stage_of_the_same_ranks_has_put_off() -> None:
    """Ranks 0 and 1 have stages 0 and 2, and one bucket of both. The backwards of stage 0 are whole; behind the last of
    them come the weights' gradients of stage 2."""
    turns = [
        stage(layers=(s, s + 1), ranks=(0, 1) if s % 2 == 0 else (2, 3), dp=2, delay=9 if s == 2 else None)
        for s in range(4)
    ]
    made = plan(llama_model(num_layers=4), [replica(*turns, num_samples=8)])
    validate(made)
    (bucket,) = (each for each in gradient_buckets(made, bucket_numel=10**9) if each.ranks == (0, 1))
    program, _ = lower(made, [bucket])
    (reduce,) = program.queues["reduce"]
    assert reduce.after == (Point.parse("2W3"),)


@given(legal_plans())
@settings(max_examples=40, deadline=None)
def test_and_with_whole_backwards_at_once(described: Plan) -> None:
    for start, whole in _sums(described):
        assert start == max(whole)


@pytest.mark.slow
@given(legal_plans().map(sharded))
@settings(max_examples=60, deadline=None)
def test_a_bucket_is_there_before_its_first_weights_are_missed(described: Plan) -> None:
    buckets = shared_buckets(described)
    for program in lower(described, buckets):
        order = [queued.action for queued in program.queues["compute"]]
        for queued in program.queues.get("gather", ()):
            (point,) = queued.before
            missed = [
                (order.index(Action(s, ActionKind.F, 0)), position)
                for s, position in _held(described, program, buckets[queued.action.number])
            ]
            assert point.position is not None
            assert (order.index(point.action), point.position) <= min(missed)


# What is left to hosts.


@pytest.mark.slow
@given(host_programs)
@settings(max_examples=60, deadline=None)
def test_what_a_host_updates_goes_there_and_comes_back(drawn: tuple[Plan, list[Program]]) -> None:
    described, made = drawn
    buckets = all_buckets(described)
    for program in made:
        first = described.replicas[program.replica].stages[program.stages[0]]
        speculates = any(described.replicas[program.replica].stages[s].offload.speculate for s in program.stages)
        left = {n for n, bucket in enumerate(buckets) if bucket.on_host & set(first.ranks)}
        adds = {n for n in left if buckets[n].gradients_on_host & set(first.ranks)}
        there = {n for n in adds if len(buckets[n].ranks) == 1}
        keeps = {n for n in left if buckets[n].weights_on_host & set(first.ranks)}
        queues = [program.queues.get(name, ()) for name in ("gradients_in", "copy_out", "host", "copy_in")]
        numbers = [sorted(queued.action.number for queued in queue) for queue in queues]
        assert numbers == [sorted(each) for each in (adds - there, left - there, left, left - keeps)]
        added, out, host, back = queues
        positions = [buckets[queued.action.number].position for queued in host]
        assert positions == sorted(positions, reverse=speculates), "as gradients come, or as weights are needed"
        assert {queued.action.kind for queued in host} <= {ActionKind.PREVIEW if speculates else ActionKind.HOST_UPDATE}
        for queued in host:
            copied = Point(Action(NO_STAGE, ActionKind.OUT_G, queued.action.number))
            if queued.action.number in there:
                copied = queued.after[0]
                assert copied.action.kind == ActionKind.ADD_G
            assert queued.after == ((copied,) if speculates else (copied, Point(UPDATE)))
        by_number = {queued.action.number: queued for queued in host}
        for queued in back:
            assert queued.after == (Point(by_number[queued.action.number].action),)
        for queued in program.queues.get("gather", ()):
            kind = ActionKind.GATHER_IN if queued.action.number in keeps else ActionKind.IN_P
            own = (Point(Action(NO_STAGE, kind, queued.action.number)),)
            assert queued.after == (Point(UPDATE), *(own if queued.action.number in left else ()))
            assert bool(queued.before) == (queued.action.number not in keeps)
        around = [program.queues.get(name, ()) for name in ("gather_in", "gather_out")]
        assert [{queued.action.number for queued in queue} for queue in around] == [keeps - there] * 2
        sums = {queued.action.number: queued for queued in program.queues.get("reduce", ())}
        for queued in added:
            assert sums[queued.action.number].after == (Point(queued.action),)
        for queued in out:
            summed = sums.get(queued.action.number)
            assert summed is None or queued.after == (Point(summed.action),)


@pytest.mark.slow
@given(offloaded_plans())
@settings(max_examples=60, deadline=None)
def test_what_nobody_else_holds_leaves_when_it_is_whole_and_is_back_before_it_is_missed(described: Plan) -> None:
    buckets = all_buckets(described)
    for program in lower(described, buckets):
        order = [queued.action for queued in program.queues["compute"]]
        for queued in program.queues.get("copy_out", ()):
            bucket = buckets[queued.action.number]
            if len(bucket.ranks) > 1:
                continue
            (point,) = queued.after
            assert point.position is not None
            held = list(_held(described, program, bucket))
            last = max(
                (max(i for i, a in enumerate(order) if a.stage == s and a.kind in BACKWARD), -p) for s, p in held
            )
            assert (order.index(point.action), -point.position) == last
            name = "host" if bucket.weights_on_host else "copy_in"
            (back,) = (each for each in program.queues[name] if each.action.number == queued.action.number)
            (needed,) = back.before
            missed = [(order.index(Action(s, ActionKind.F, 0)), position) for s, position in held]
            assert needed.position is not None
            assert (order.index(needed.action), needed.position) <= min(missed)


@pytest.mark.slow
@given(offloaded_plans())
@settings(max_examples=60, deadline=None)
def test_no_bucket_is_partly_on_a_host(described: Plan) -> None:
    """All of its parameters are where its position is, for each of its ranks."""
    held_by = stages_of_ranks([(stage.ranks, stage) for _, _, stage in described.stages()])
    for bucket in all_buckets(described):
        for segment in bucket.segments:
            position = segment.parameter.position
            assert {rank for rank in bucket.ranks if updates_on_host(position, held_by[rank])} == bucket.on_host
            assert {rank for rank in bucket.ranks if weights_on_host(position, held_by[rank])} == bucket.weights_on_host


@given(host_programs)
@settings(max_examples=25, deadline=None)
def test_weights_come_for_each_compute_in_their_order(drawn: tuple[Plan, list[Program]]) -> None:
    """And those that nobody else holds when the host has updated them."""
    described, programs = drawn
    buckets = all_buckets(described)
    for program in programs:
        stages, num_layers = described.replicas[program.replica].stages, described.model.num_layers
        blocks = {s: blocks_with_weights_on_host(stages[s], num_layers=num_layers) for s in program.stages}
        coming = program.queues.get("weights_in", ())
        needed = [
            a
            for a in (queued.action for queued in program.queues["compute"])
            if a != UPDATE and blocks[a.stage] and (a.kind not in BACKWARD or blocks[a.stage] != [-1.0])
        ]
        assert [queued.before[0].action for queued in coming] == needed
        for queued in coming:
            (before,) = queued.before
            held = blocks[before.action.stage]
            assert before.position == (held[-1] if before.action.kind in BACKWARD else held[0])
        firsts = {queued.before[0].action.stage: queued.action for queued in reversed(coming)}
        for queued in program.queues.get("host", ()):
            bucket = buckets[queued.action.number]
            alone = len(bucket.ranks) == 1 and bool(bucket.weights_on_host)
            assert bool(queued.before) == alone
            for point in queued.before:
                assert point.action == firsts[point.action.stage]


@given(host_programs)
@settings(max_examples=25, deadline=None)
def test_activations_leave_behind_their_forwards_and_come_back_in_the_order_of_the_backwards(
    drawn: tuple[Plan, list[Program]],
) -> None:
    described, programs = drawn
    for program in programs:
        stages = described.replicas[program.replica].stages
        computes = [queued.action for queued in program.queues["compute"]]
        left = [a for a in computes if a != UPDATE and stages[a.stage].offload.activations_until is not None]
        out, back = program.queues.get("activations_out", ()), program.queues.get("activations_in", ())
        forwards = [a for a in left if a.kind in (ActionKind.F, ActionKind.R)]
        # Where a forward runs again, the first one saves nothing.
        saving = [a for a in forwards if a.kind == ActionKind.R or a._replace(kind=ActionKind.R) not in forwards]
        assert [queued.after[0].action for queued in out] == saving
        assert [queued.before[0].action for queued in back] == [a for a in left if a.kind in BACKWARD]
        for queued in back:
            (leaves,), (needed,) = queued.after, queued.before
            assert leaves.action == queued.action._replace(kind=ActionKind.OUT_A)
            assert needed.position == stages[queued.action.stage].offload.activations_until


def test_without_overlap_sums_come_after_the_last_backward_and_weights_before_the_first_forward() -> None:
    made = with_delays(sharded(_interleaved()), [None, 0, 2, None])
    options = CollectiveOptions(overlap_grad_reduce=False, overlap_param_gather=False)
    first, second, alone = lower(made, shared_buckets(made), options=options)
    for program, last in ((first, "2W3"), (second, "1W3"), (alone, "0B0")):
        assert {point for queued in program.queues["reduce"] for point in queued.after} == {Point.parse(last)}
        start = program.queues["compute"][0].action
        assert {point for queued in program.queues["gather"] for point in queued.before} == {Point(start)}


def test_a_transfer_is_in_the_queue_of_its_stage_and_direction() -> None:
    (program, other, _) = lower(_interleaved(), [])
    assert set(program.queues) == {"compute", "0SEND_F", "0RECV_B", "2RECV_F", "2SEND_F", "2SEND_B", "2RECV_B"}
    for name, queue in (*program.queues.items(), *other.queues.items()):
        for before, after in pairwise(queue):
            if name != "compute":
                assert before.action.number < after.action.number
        assert name == "compute" or {queued.action.kind for queued in queue} <= SEND | RECEIVE


def test_a_row_depends_on_the_counts_of_its_neighbours_and_on_no_others() -> None:
    def rows(*sizes: int) -> list[list[Action]]:
        stages = tuple(
            Stage(first_layer=s, end_layer=s + 1, ranks=(s,), device="V100-16", micro_batch_size=size, in_flight=4)
            for s, size in enumerate(sizes)
        )
        return step_rows(Replica(num_samples=12, stages=stages))

    assert rows(1, 2, 4, 2)[0] == rows(1, 2, 1, 1)[0]
    assert rows(1, 2, 4, 2)[1] == rows(1, 2, 4, 4)[1]
    assert rows(1, 2, 4, 2)[2] == rows(2, 2, 4, 2)[2]
    assert rows(1, 2, 4, 2)[2] != rows(1, 2, 4, 4)[2]
