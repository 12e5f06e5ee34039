"""The dry run finds what would wait for ever, on transports that behave as gloo's, NCCL's and NCCL's connects do."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ScheduleError
from hetero.plan.ir import Replica
from hetero.plan.lowering import RECEIVES_AHEAD, evaluation_rows, step_rows
from hetero.schedule.actions import RECEIVE, SEND, Action, Schedule, parse_schedule
from hetero.schedule.dry_run import Transport, _Run, check_no_deadlock
from hetero.schedule.orders import gpipe, one_f_one_b
from hetero.schedule.passes import add_communication, post_receives_early
from tests.helpers.layouts import layouts
from tests.helpers.strategies import orders, split_pipelines, step_replicas

EACH = pytest.mark.parametrize("transport", Transport)


def lowered(*, stages: int = 2, num_microbatches: int = 4, computes_ahead: int = 0) -> Schedule:
    """1F1B of equal stages, with communication."""
    each = [num_microbatches] * stages
    whole = one_f_one_b(num_microbatches=each, in_flight=list(range(stages, 0, -1)))
    return post_receives_early(add_communication(whole, num_microbatches=each), computes_ahead=computes_ahead)


@pytest.mark.parametrize(
    ("text", "stuck"),
    [
        ("0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0B0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1B0 1SEND_B0", "0B0, 1F0"),
        ("0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0B0, 1F0"),
        ("0RECV_B0 0B0 0F0 0SEND_F0\n1RECV_F0 1F0 1B0 1SEND_B0", "0B0, 1F0"),
        ("0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_F0, 1F0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1SEND_B0 1B0", "0B0, 1SEND_B0"),
        ("0F0 0SEND_F0 0RECV_B0 0W0 0I0\n1RECV_F0 1F0 1B0 1SEND_B0", "0W0"),
        ("0R0 0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0R0, 1F0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0 0R0\n1RECV_F0 1F0 1B0 1SEND_B0", "0B0"),
    ],
    ids=[
        "no RECV_B",
        "no RECV_F",
        "no SEND_F",
        "backward first",
        "SEND_F before F",
        "SEND_B before B",
        "W before I",
        "R before F",
        "B before R",
    ],
)
@pytest.mark.parametrize("transport", [Transport.BUFFERED, Transport.IN_ORDER])
def test_it_names_the_actions_that_wait(text: str, stuck: str, transport: Transport) -> None:
    with pytest.raises(ScheduleError, match=rf"^deadlock \({transport} transfers\): {stuck} all wait\n0"):
        check_no_deadlock(parse_schedule(text), num_microbatches=[1, 1], transport=transport)


@EACH
def test_too_little_in_flight_before_a_coarse_stage_deadlocks(transport: Transport) -> None:
    """Stage 1 wants four slices before its first backward, stage 0 stops after three."""
    schedule = one_f_one_b(num_microbatches=[8, 2], in_flight=[3, 1])
    with pytest.raises(ScheduleError, match=r"transfers\): 0(B0|RECV_B0), 1F0 all wait"):
        check_no_deadlock(
            add_communication(schedule, num_microbatches=[8, 2]), num_microbatches=[8, 2], transport=transport
        )


def test_a_transport_without_tags_needs_one_order_on_both_sides() -> None:
    crossed = parse_schedule(
        "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    check_no_deadlock(crossed, num_microbatches=[2, 2], transport=Transport.BUFFERED)
    for transport in (Transport.IN_ORDER, Transport.FIRST_CONTACT):
        with pytest.raises(ScheduleError, match="0SEND_F0 and 1RECV_F0 are not the same transfer of their direction"):
            check_no_deadlock(crossed, num_microbatches=[2, 2], transport=transport)


@EACH
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_receives_at_their_computes_end_on_every_transport(stages: int, transport: Transport) -> None:
    check_no_deadlock(lowered(stages=stages), num_microbatches=[4] * stages, transport=transport)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_receives_posted_early_hang_where_the_first_message_blocks(stages: int) -> None:
    """A fact of 1F1B at the lead that steps have: every stage but the last posts the receive of its first gradient
    before it has sent an activation. One compute less would do at these depths.
    """
    each = [4] * stages
    early = lowered(stages=stages, computes_ahead=RECEIVES_AHEAD)
    check_no_deadlock(early, num_microbatches=each, transport=Transport.IN_ORDER)
    with pytest.raises(ScheduleError, match=r"^deadlock \(first contact transfers\): 0RECV_B0, .*RECV_F0 all wait"):
        check_no_deadlock(early, num_microbatches=each, transport=Transport.FIRST_CONTACT)
    later = lowered(stages=stages, computes_ahead=RECEIVES_AHEAD - 1)
    check_no_deadlock(later, num_microbatches=each, transport=Transport.FIRST_CONTACT)


STAND_STILL = {Transport.BUFFERED: 0, Transport.IN_ORDER: 0, Transport.FIRST_CONTACT: 94, Transport.ONE_QUEUE: 58}
"""Of the 94 pipelines of the layout table; docs/architecture.md tells of them."""


@EACH
def test_how_many_pipelines_of_the_layout_table_stand_still(transport: Transport) -> None:
    """A fact. Programs are made for transfers in order, between ranks that are connected before the first step, on
    devices with a queue for each stream.
    """
    replicas = [replica for _, _, plan in layouts() for replica in plan.replicas if len(replica.stages) > 1]
    assert len(replicas) == 94
    assert sum(stands_still(replica, transport) for replica in replicas) == STAND_STILL[transport]


class HostsRunAhead(_Run):
    """No host waits for a compute: the device does."""

    def _can_run(self, action: Action) -> bool:
        return self._needed(action) <= self._done and (action.kind not in SEND | RECEIVE or self._may_begin(action))


def test_some_stand_still_at_first_contacts_even_if_no_host_waits_for_its_device() -> None:
    """Those that post a receive before the send that its peer is waiting for; 1F1B's least depths do so always."""
    replicas = [replica for _, _, plan in layouts() for replica in plan.replicas if len(replica.stages) > 1]
    stuck = 0
    for rows, each in [(step_rows(replica), replica.microbatch_counts) for replica in replicas] + [
        (lowered(stages=stages, computes_ahead=RECEIVES_AHEAD), [4] * stages) for stages in (2, 3, 4)
    ]:
        run = HostsRunAhead(rows, each, Transport.FIRST_CONTACT)
        while run.is_unfinished() and run.moves():
            pass
        stuck += run.is_unfinished()
    assert stuck == 37 + 3


def stands_still(replica: Replica, transport: Transport) -> bool:
    try:
        check_no_deadlock(step_rows(replica), num_microbatches=replica.microbatch_counts, transport=transport)
    except ScheduleError as error:
        return f"deadlock ({transport} transfers): " in str(error)
    return False


def test_one_queue_holds_a_send_up_behind_a_receive() -> None:
    """By hand. Stage 0 posts the receive of its second gradient behind that of the first; the queue goes on to the
    forward of microbatch 2, for which stage 1 waits before its first backward, when that has come.
    """
    rows = parse_schedule(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0F2 0SEND_F2 0B0 0B1 0RECV_B2 0B2\n"
        "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"
    )
    check_no_deadlock(rows, num_microbatches=[3, 3], transport=Transport.IN_ORDER)
    with pytest.raises(ScheduleError, match=r"^deadlock \(one queue transfers\): 0RECV_B1, 1F2 all wait"):
        check_no_deadlock(rows, num_microbatches=[3, 3], transport=Transport.ONE_QUEUE)


def test_interleaved_stages_may_hang_at_the_first_message_even_without_early_receives() -> None:
    """A fact as well: the group between blocks in its first gradient's send while the other waits for its next
    activation. Neither would come back, though each direction alone is in order.
    """
    turns = one_f_one_b(num_microbatches=[2, 2, 2], in_flight=[2, 1, 1], groups=[[0, 2], [1]])
    rows = add_communication(turns, num_microbatches=[2, 2, 2])
    check_no_deadlock(rows, num_microbatches=[2, 2, 2], transport=Transport.IN_ORDER)
    with pytest.raises(ScheduleError, match=r"^deadlock \(first contact transfers\): 2F1, 1SEND_B0 all wait"):
        check_no_deadlock(rows, num_microbatches=[2, 2, 2], transport=Transport.FIRST_CONTACT)


def test_who_waits_at_the_first_contact() -> None:
    """Stage 0 wants to hear of the gradients, stage 1 to compute; nobody has sent an activation."""
    early = lowered(stages=2, computes_ahead=2)
    with pytest.raises(ScheduleError, match=r"^deadlock \(first contact transfers\): 0RECV_B0, 1RECV_F0 all wait"):
        check_no_deadlock(early, num_microbatches=[4, 4], transport=Transport.FIRST_CONTACT)


@EACH
def test_one_stage_talks_to_nobody(transport: Transport) -> None:
    check_no_deadlock(gpipe(num_microbatches=[3]), num_microbatches=[3], transport=transport)


@pytest.mark.slow
@given(step_replicas(), st.sampled_from([Transport.BUFFERED, Transport.IN_ORDER]))
@settings(max_examples=80, deadline=None)
def test_steps_of_legal_replicas_end(replica: Replica, transport: Transport) -> None:
    check_no_deadlock(step_rows(replica), num_microbatches=replica.microbatch_counts, transport=transport)


@given(split_pipelines(), orders())
@settings(max_examples=80, deadline=None)
def test_plain_pipelines_without_early_receives_end_where_the_first_message_blocks(plain: Replica, order: str) -> None:
    rows = step_rows(dataclasses.replace(plain, schedule=order), receives_ahead=0)
    check_no_deadlock(rows, num_microbatches=plain.microbatch_counts, transport=Transport.FIRST_CONTACT)


@given(step_replicas())
@settings(max_examples=40, deadline=None)
def test_evaluations_end(replica: Replica) -> None:
    """Forwards alone: the dry run has no backward to wait for."""
    check_no_deadlock(evaluation_rows(replica), num_microbatches=replica.microbatch_counts)
