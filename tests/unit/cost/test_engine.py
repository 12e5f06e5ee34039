"""The replay, on timelines that can be drawn by hand."""

import pytest

from hetero.cost.simulation.engine import Replay
from hetero.errors import ScheduleError
from hetero.schedule.actions import Schedule, parse_schedule
from hetero.schedule.orders import one_f_one_b
from hetero.schedule.passes import add_communication, post_receives_early, split_backward
from tests.unit.cost.replays import cost, pipeline, times


def rows_of(counts: tuple[int, ...], in_flight: tuple[int, ...], *, ahead: int = 2) -> Schedule:
    order = one_f_one_b(num_microbatches=counts, in_flight=in_flight)
    return post_receives_early(add_communication(order, num_microbatches=counts), computes_ahead=ahead)


def test_two_stages_and_a_link() -> None:
    spans = Replay(
        [
            pipeline(
                rows_of((2, 2), (2, 1)),
                counts=(2, 2),
                forward_s=(1.0, 1.0),
                backward_s=(2.0, 2.0),
                transfers=(cost(0.5),),
            )
        ],
    ).spans()
    assert times(spans) == {
        "0F0": (0.0, 1.0),
        "0SEND_F0": (1.0, 1.5),
        "0F1": (1.0, 2.0),
        "1F0": (1.5, 2.5),
        "0SEND_F1": (2.0, 2.5),
        "1B0": (2.5, 4.5),
        "1SEND_B0": (4.5, 5.0),
        "1F1": (4.5, 5.5),
        "0B0": (5.0, 7.0),
        "1B1": (5.5, 7.5),
        "1SEND_B1": (7.5, 8.0),
        "0B1": (8.0, 10.0),
    }


def test_weights_gradients_fill_the_wait_for_the_next_backward() -> None:
    """The gradient leaves before the W behind it; stage 0 is at its W while the next gradient is on its way."""
    order = split_backward(one_f_one_b(num_microbatches=(2, 2), in_flight=(2, 1)), wgrad_delay=(0, 1))
    rows = post_receives_early(add_communication(order, num_microbatches=(2, 2)), computes_ahead=2)
    described = pipeline(
        rows,
        counts=(2, 2),
        forward_s=(1.0, 1.0),
        backward_s=(1.0, 1.5),
        weight_s=(1.0, 0.5),
        transfers=(cost(0.5),),
    )
    assert times(Replay([described]).spans()) == {
        "0F0": (0.0, 1.0),
        "0SEND_F0": (1.0, 1.5),
        "0F1": (1.0, 2.0),
        "1F0": (1.5, 2.5),
        "0SEND_F1": (2.0, 2.5),
        "1I0": (2.5, 4.0),
        "1SEND_B0": (4.0, 4.5),
        "1F1": (4.0, 5.0),
        "0I0": (4.5, 5.5),
        "1I1": (5.0, 6.5),
        "0W0": (5.5, 6.5),
        "1SEND_B1": (6.5, 7.0),
        "1W0": (6.5, 7.0),
        "0I1": (7.0, 8.0),
        "1W1": (7.0, 7.5),
        "0W1": (8.0, 9.0),
    }


def test_each_span_names_what_let_it_start() -> None:
    rows = rows_of((1, 1), (1, 1))
    spans = Replay(
        [pipeline(rows, counts=(1, 1), forward_s=(1.0, 1.0), backward_s=(1.0, 1.0), transfers=(cost(0.5),))],
    ).spans()
    names = [f"{span.stage}{span.kind}" for span in spans]
    causes = [names[span.cause] if span.cause >= 0 else None for span in spans]
    assert dict(zip(names, causes, strict=True)) == {
        "0F": None,
        "0SEND_F": "0F",
        "1F": "0SEND_F",
        "1B": "1F",
        "1SEND_B": "1B",
        "0B": "1SEND_B",
    }


def test_slices_of_one_direction_take_turns_on_the_link() -> None:
    """A coarse microbatch leaves as two slices; the finer stage starts with the first."""
    rows = rows_of((1, 2), (1, 2))
    spans = Replay(
        [pipeline(rows, counts=(1, 2), forward_s=(1.0, 1.0), backward_s=(1.0, 1.0), transfers=(cost(2.0),))],
    ).spans()
    found = times(spans)
    assert found["0SEND_F0"] == (1.0, 3.0)
    assert found["0SEND_F1"] == (3.0, 5.0)
    assert found["1F0"] == (3.0, 4.0)
    assert found["0B0"][0] == found["1SEND_B1"][1], "the coarse backward waits for both slices"


def test_a_receive_that_is_posted_late_holds_the_transfer_up() -> None:
    arguments = {
        "counts": (2, 2),
        "forward_s": (1.0, 3.0),
        "backward_s": (1.0, 3.0),
        "transfers": (cost(1.0),),
    }
    late = times(Replay([pipeline(rows_of((2, 2), (2, 1), ahead=0), **arguments)]).spans())
    early = times(Replay([pipeline(rows_of((2, 2), (2, 1), ahead=2), **arguments)]).spans())
    assert late["0SEND_F1"] == (8.0, 9.0), "after the backward of microbatch 0"
    assert early["0SEND_F1"] == (2.0, 3.0)
    assert early["1F1"][0] == late["1F1"][0] - 1.0


def test_replicas_take_turns_on_a_shared_interface() -> None:
    one = pipeline(
        rows_of((1, 1), (1, 1)),
        counts=(1, 1),
        forward_s=(1.0, 1.0),
        backward_s=(1.0, 1.0),
        transfers=(cost(2.0, out_0=2.0),),
    )
    spans = Replay([one, one]).spans()
    first = [(span.replica, span.start_s, span.end_s) for span in spans if span.kind == "SEND_F"]
    assert first == [(0, 1.0, 3.0), (1, 3.0, 5.0)]


def test_an_interface_is_free_again_before_a_slow_transfer_ends() -> None:
    """Another wire ends the transfer; this one was busy with a part of it only."""
    slow = pipeline(
        rows_of((1, 1), (1, 1)),
        counts=(1, 1),
        forward_s=(1.0, 1.0),
        backward_s=(1.0, 1.0),
        transfers=(cost(5.0, out_0=2.0),),
    )
    spans = Replay([slow, slow]).spans()
    assert [span.start_s for span in spans if span.kind == "SEND_F"] == [1.0, 3.0]


def test_a_replay_that_stands_still_says_so() -> None:
    rows = parse_schedule("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1B0 1RECV_F0 1SEND_B0")
    with pytest.raises(ScheduleError, match=r"the replay stands still before 0B0, 1F0"):
        Replay(
            [pipeline(rows, counts=(1, 1), forward_s=(1.0, 1.0), backward_s=(1.0, 1.0), transfers=(cost(0.5),))],
        ).spans()
