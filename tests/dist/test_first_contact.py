"""No message of a step is the first one: under every layout steps end where first messages hold their hosts up."""

from collections.abc import Iterator
from typing import Any

import pytest

from hetero.distributed import p2p, process_groups
from hetero.plan.ir import Plan
from hetero.runtime import trainer
from tests.helpers.first_contact import FirstContactError, blocking_first_contacts, replaced
from tests.helpers.layouts import layouts
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

ALWAYS = ("four-stages-llama-gqa", "everything-llama-gqa", "interleaved-there-and-back-llama-gqa")
"""Layouts that every run has; the fast one has the smaller ones."""

SUMMED = "uneven-layers-llama-tied"
"""In every whole run: where the optimizer is not shared, a bucket's first sum may be one of a step."""

NUM_ROWS = 12
"""Each run takes half as many layouts beside those."""


def _cases() -> Iterator[Any]:
    """Every layout in every style, with a shared optimizer unless the embedding is tied."""
    for number, (name, style, made) in enumerate(layouts()):
        always = f"{name}-{style}" in (*ALWAYS, SUMMED)
        marks = [] if always else [pytest.mark.rotates(f"row {number % NUM_ROWS}", every=2, turn=number % 2)]
        if marks or name == "everything" or f"{name}-{style}" == SUMMED:
            marks.append(pytest.mark.slow)
        yield pytest.param(made if "-tied" in style else sharded(made), id=f"{name}-{style}", marks=marks)


def train_where_first_contacts_block(rank: int, made: Plan, timeout_s: float) -> None:
    with blocking_first_contacts(timeout_s=timeout_s):
        train(rank, made, 1, weights_at="the end", tensor_parallelism="its own groups")


@pytest.mark.parametrize("made", list(_cases()))
def test_a_step_ends(made: Plan) -> None:
    run_ranks(train_where_first_contacts_block, made.world_size, made, 30.0)


START_UP = {
    "all of it": (process_groups, "connect"),
    "channels": (p2p.Channel, "connect"),
    "buckets": (trainer, "connect_buckets"),
}


def train_without(rank: int, made: Plan, part: str) -> str:
    """Train a step without a part of the start-up; at what this rank waited in vain, if it did."""
    with replaced(START_UP[part], lambda *_: None), blocking_first_contacts(timeout_s=30.0):
        try:
            train(rank, made, 1, tensor_parallelism="its own groups")
        except FirstContactError as error:
            return str(error)
    return ""


def two_stages() -> Plan:
    """As deep as 1F1B has it: stage 0 posts the receive of its first gradient before its first forward."""
    stages = stage(layers=(0, 3), ranks=(0,), depth=2), stage(layers=(3, 6), ranks=(1,), depth=1)
    return plan(gpt2_model(), [replica(*stages)])


def test_without_its_start_up_a_pipeline_stands_still_in_its_first_step() -> None:
    """Stage 0 posts the receive of a gradient and waits for stage 1 to come to its send; that posts the receive of an
    activation. Neither has a communicator for it yet.
    """
    made = two_stages()
    first, last = run_ranks(train_without, 2, made, "all of it")
    assert first.endswith("its communicator for rank 1")
    assert last.endswith("its communicator for rank 0")


def test_communicators_alone_do_not_connect_the_two_ends_of_a_channel() -> None:
    """An all-reduce connects rings and trees; a message goes another way."""
    first, last = run_ranks(train_without, 2, two_stages(), "channels")
    assert first.endswith("1 to 0 for rank 1's send")
    assert last.endswith("0 to 1 for rank 0's send")
