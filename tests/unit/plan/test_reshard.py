"""What crosses a boundary, against a brute-force oracle: number every (row, sample) cell of a replica's samples, give
each sender the numbers of its box, move them with the transfers, and look at what each receiver then holds.

The boxes come from :mod:`tests.helpers.cells`, which shares no code with what is tested.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.plan.ir import Stage
from hetero.plan.reshard import Transfer, num_phases, transfers
from tests.helpers.cells import boxes, sample_of
from tests.helpers.plans import stage

SEQ_LENGTH = 12
ALL = slice(0, SEQ_LENGTH)


def slice_size(sender: Stage, receiver: Stage) -> int:
    return min(s.micro_batch_size * s.dp for s in (sender, receiver))


def all_slices(sender: Stage, receiver: Stage) -> list[tuple[Transfer, ...]]:
    """The transfers of every slice of two rounds of phases, so that phases are seen to repeat."""
    phases = num_phases(sender, receiver)
    return [transfers(sender, receiver, seq_length=SEQ_LENGTH, phase=i % phases) for i in range(2 * phases)]


def make_stage(*, first_rank: int, tp: int, dp: int, mbs: int, sp: bool) -> Stage:
    # Ranks in descending order: a rank's number must not be taken for its position.
    ranks = range(first_rank + tp * dp - 1, first_rank - 1, -1)
    return stage(layers=(0, 1), ranks=ranks, tp=tp, dp=dp, mbs=mbs, sp=sp, depth=1)


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[Stage, Stage]:
    """Two stages with different tp, dp, sequence parallelism and microbatches, of which one divides the other."""
    tp, dp, mbs = st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 4)
    sender = make_stage(first_rank=100, tp=draw(tp), dp=draw(dp), mbs=draw(mbs), sp=draw(st.booleans()))
    samples, receiver_dp = sender.micro_batch_size * sender.dp, draw(dp)
    fitting = [m for m in range(1, 17) if (m * receiver_dp) % samples == 0 or samples % (m * receiver_dp) == 0]
    receiver = make_stage(
        first_rank=0, tp=draw(tp), dp=receiver_dp, mbs=draw(st.sampled_from(fitting)), sp=draw(st.booleans())
    )
    return sender, receiver


@given(neighbours())
@settings(deadline=None)
def test_every_receiver_gets_each_cell_of_its_box_once(pair: tuple[Stage, Stage]) -> None:
    sender, receiver = pair
    size, slices = slice_size(sender, receiver), all_slices(sender, receiver)
    wanted = boxes(receiver, size * len(slices), seq_length=SEQ_LENGTH)
    held = boxes(sender, size * len(slices), seq_length=SEQ_LENGTH)
    got = {key: np.full_like(box, -1) for key, box in wanted.items()}
    writes = {key: np.zeros_like(box) for key, box in wanted.items()}
    for i, messages in enumerate(slices):
        for t in messages:
            source = held[t.sender, i * size // sender.samples_per_microbatch]
            key = t.receiver, i * size // receiver.samples_per_microbatch
            got[key][t.receiver_rows, t.receiver_samples] = source[t.sender_rows, t.sender_samples]
            writes[key][t.receiver_rows, t.receiver_samples] += 1
    for key, box in wanted.items():
        np.testing.assert_array_equal(writes[key], 1, f"rank and microbatch {key}: cells written never or again")
        np.testing.assert_array_equal(got[key], box, f"rank and microbatch {key}: cells of another row or sample")


@given(neighbours())
@settings(deadline=None)
def test_a_slice_carries_its_own_samples_and_no_others(pair: tuple[Stage, Stage]) -> None:
    sender, receiver = pair
    size, slices = slice_size(sender, receiver), all_slices(sender, receiver)
    held = boxes(sender, size * len(slices), seq_length=SEQ_LENGTH)
    for i, messages in enumerate(slices):
        sent = {
            sample_of(int(cell))
            for t in messages
            for cell in held[t.sender, i * size // sender.samples_per_microbatch][t.sender_rows, t.sender_samples].flat
        }
        assert sent == set(range(i * size, (i + 1) * size))


@given(neighbours())
@settings(deadline=None)
def test_a_message_knows_its_data_parallel_ranks_and_its_size(pair: tuple[Stage, Stage]) -> None:
    sender, receiver = pair
    for messages in all_slices(sender, receiver):
        for t in messages:
            assert t.sender in sender.tp_groups[t.sender_dp_rank]
            assert t.receiver in receiver.tp_groups[t.receiver_dp_rank]
            assert t.num_tokens == length(t.sender_rows) * length(t.sender_samples)
            assert t.num_tokens == length(t.receiver_rows) * length(t.receiver_samples)


@given(neighbours())
@settings(deadline=None)
def test_two_ranks_exchange_one_message_per_slice_at_most(pair: tuple[Stage, Stage]) -> None:
    sender, receiver = pair
    for messages in all_slices(sender, receiver):
        assert max(Counter((t.sender, t.receiver) for t in messages).values()) == 1
        assert {t.sender for t in messages} <= set(sender.ranks)
        assert {t.receiver for t in messages} <= set(receiver.ranks)


@given(neighbours())
@settings(deadline=None)
def test_nothing_is_sent_that_no_one_needs(pair: tuple[Stage, Stage]) -> None:
    """The volume of a slice is what its receivers lack: all tp ranks' rows of each of its samples."""
    sender, receiver = pair
    copies = 1 if receiver.sequence_parallel else receiver.tp
    for messages in all_slices(sender, receiver):
        cells = sum(length(t.receiver_rows) * length(t.receiver_samples) for t in messages)
        assert cells == copies * SEQ_LENGTH * slice_size(sender, receiver)
        assert all(length(t.sender_rows) == length(t.receiver_rows) > 0 for t in messages)
        assert all(length(t.sender_samples) == length(t.receiver_samples) > 0 for t in messages)


@given(neighbours())
@settings(deadline=None)
def test_senders_that_hold_the_same_share_the_work(pair: tuple[Stage, Stage]) -> None:
    """Without sequence parallelism the tp ranks of a sender have the same rows: each serves its part of the
    receivers, and none more than its part."""
    sender, receiver = pair
    if sender.sequence_parallel and sender.tp > 1:
        return
    most = -(-receiver.tp // sender.tp)
    dp_rank_of = {rank: i // sender.tp for i, rank in enumerate(sender.ranks)}
    dp_rank_of |= {rank: i // receiver.tp for i, rank in enumerate(receiver.ranks)}
    for messages in all_slices(sender, receiver):
        served = Counter((t.sender, dp_rank_of[t.receiver]) for t in messages)
        assert max(served.values()) <= most
        sources = Counter((t.receiver, dp_rank_of[t.sender]) for t in messages)
        assert set(sources.values()) == {1}, "a receiver hears from one of several equal senders"


def length(span: slice) -> int:
    return int(span.stop) - int(span.start)


def routes(sender: Stage, receiver: Stage, *, phase: int = 0) -> list[tuple[object, ...]]:
    """The messages of a slice as (sender, receiver, rows sent, samples sent, rows written, samples written)."""
    return [
        (t.sender, t.receiver, t.sender_rows, t.sender_samples, t.receiver_rows, t.receiver_samples)
        for t in transfers(sender, receiver, seq_length=SEQ_LENGTH, phase=phase)
    ]


def one(*ranks: int, tp: int = 1, dp: int = 1, mbs: int = 1, sp: bool = False) -> Stage:
    return stage(layers=(0, 1), ranks=ranks, tp=tp, dp=dp, mbs=mbs, sp=sp, depth=1)


ONE = slice(0, 1)
LOWER, UPPER = slice(0, 6), slice(6, 12)


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"),
    [
        pytest.param(one(0), one(1), [(0, 1, ALL, ONE, ALL, ONE)], id="alike"),
        pytest.param(one(0, 1, tp=2), one(2), [(0, 2, ALL, ONE, ALL, ONE)], id="repeated-rows-cross-once"),
        pytest.param(
            one(0),
            one(1, 2, tp=2),
            [(0, 1, ALL, ONE, ALL, ONE), (0, 2, ALL, ONE, ALL, ONE)],
            id="each-receiver-needs-all-rows",
        ),
        pytest.param(
            one(0, 1, tp=2),
            one(2, 3, 4, 5, tp=4),
            [(s, r, ALL, ONE, ALL, ONE) for s, r in ((0, 2), (0, 3), (1, 4), (1, 5))],
            id="two-senders-serve-two-each",
        ),
        pytest.param(
            one(0, 1, 2, 3, tp=4),
            one(4, 5, tp=2),
            [(0, 4, ALL, ONE, ALL, ONE), (2, 5, ALL, ONE, ALL, ONE)],
            id="of-four-senders-two-work",
        ),
        pytest.param(
            one(0, 1, tp=2, sp=True),
            one(2),
            [(0, 2, LOWER, ONE, LOWER, ONE), (1, 2, LOWER, ONE, UPPER, ONE)],
            id="the-halves-of-a-sequence-meet",
        ),
        pytest.param(
            one(0),
            one(1, 2, tp=2, sp=True),
            [(0, 1, LOWER, ONE, LOWER, ONE), (0, 2, UPPER, ONE, LOWER, ONE)],
            id="a-sequence-is-halved",
        ),
        pytest.param(
            one(0, 1, tp=2, sp=True),
            one(2, 3, tp=2),
            [
                (0, 2, LOWER, ONE, LOWER, ONE),
                (1, 2, LOWER, ONE, UPPER, ONE),
                (0, 3, LOWER, ONE, LOWER, ONE),
                (1, 3, LOWER, ONE, UPPER, ONE),
            ],
            id="halves-to-each-of-two",
        ),
        pytest.param(
            one(0, mbs=2),
            one(1, 2, dp=2),
            [(0, 1, ALL, slice(0, 1), ALL, ONE), (0, 2, ALL, slice(1, 2), ALL, ONE)],
            id="samples-are-dealt-to-dp-ranks",
        ),
        pytest.param(
            one(0, 1, 2, dp=3, mbs=2),
            one(3, 4, dp=2, mbs=3),
            [
                (0, 3, ALL, slice(0, 2), ALL, slice(0, 2)),
                (1, 3, ALL, slice(0, 1), ALL, slice(2, 3)),
                (1, 4, ALL, slice(1, 2), ALL, slice(0, 1)),
                (2, 4, ALL, slice(0, 2), ALL, slice(1, 3)),
            ],
            id="dp-3-meets-dp-2",
        ),
    ],
)
def test_messages_of_a_slice(sender: Stage, receiver: Stage, expected: list[tuple[object, ...]]) -> None:
    assert routes(sender, receiver) == expected


@pytest.mark.parametrize("phase", range(4))
def test_a_coarse_sender_sends_slice_after_slice_of_its_microbatch(phase: int) -> None:
    part = slice(phase, phase + 1)
    assert routes(one(0, mbs=4), one(1), phase=phase) == [(0, 1, ALL, part, ALL, ONE)]


@pytest.mark.parametrize("phase", range(4))
def test_a_coarse_receiver_fills_its_microbatch_slice_by_slice(phase: int) -> None:
    part = slice(phase, phase + 1)
    assert routes(one(0), one(1, mbs=4), phase=phase) == [(0, 1, ALL, ONE, ALL, part)]


def test_only_those_data_parallel_ranks_take_part_that_hold_samples_of_the_slice() -> None:
    coarse, fine = one(0, 1, dp=2, mbs=2), one(2, mbs=2)
    assert [routes(coarse, fine, phase=phase) for phase in range(num_phases(coarse, fine))] == [
        [(0, 2, ALL, slice(0, 2), ALL, slice(0, 2))],
        [(1, 2, ALL, slice(0, 2), ALL, slice(0, 2))],
    ]


@given(neighbours())
@settings(deadline=None)
def test_both_directions_have_the_same_slices(pair: tuple[Stage, Stage]) -> None:
    """A gradient travels back in the slices in which its activation came."""
    sender, receiver = pair
    coarse, fine = sorted((sender.micro_batch_size * sender.dp, receiver.micro_batch_size * receiver.dp), reverse=True)
    assert num_phases(sender, receiver) == num_phases(receiver, sender) == coarse // fine
