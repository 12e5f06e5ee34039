"""The replay of transfers that block both sides."""

import pytest

from hetero.cost.other_runtimes.deepspeed import deepspeed_1f1b
from hetero.cost.simulation.blocking_replay import BlockingReplay
from tests.unit.cost.replays import cost, pipeline, times


def test_blocking_transfers_hold_both_sides() -> None:
    spans = BlockingReplay(
        [
            pipeline(
                deepspeed_1f1b(num_stages=2, num_microbatches=2),
                counts=(2, 2),
                forward_s=(1.0, 1.0),
                backward_s=(2.0, 2.0),
                transfers=(cost(0.5),),
            )
        ]
    ).spans()
    found = times(spans)
    assert found["0SEND_F0"] == (1.0, 1.5)
    assert found["0F1"] == (1.5, 2.5), "not beside the transfer"
    assert found["1B0"] == (2.5, 4.5)
    assert found["0SEND_F1"] == (4.5, 5.0), "the receiver comes to it only after its backward"
    assert found["1SEND_B0"] == (5.0, 5.5)
    assert found["0B0"] == (5.5, 7.5)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 1), (4, 2), (4, 9), (5, 5)])
def test_deepspeed_1f1b_finishes_and_meets_every_transfer(num_stages: int, num_microbatches: int) -> None:
    counts = (num_microbatches,) * num_stages
    spans = BlockingReplay(
        [
            pipeline(
                deepspeed_1f1b(num_stages=num_stages, num_microbatches=num_microbatches),
                counts=counts,
                forward_s=(1.0,) * num_stages,
                backward_s=(2.0,) * num_stages,
                transfers=(cost(0.1),) * (num_stages - 1),
            )
        ]
    ).spans()
    assert len(spans) == 2 * num_microbatches * (2 * num_stages - 1)
