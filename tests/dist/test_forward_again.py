"""An order that keeps the input of a microbatch alone and runs its forward again is the same training.

The order is none of the project's: it is added to the table here, as whoever tries a new one would.
"""

import dataclasses

import numpy as np
import pytest
import torch

from hetero.plan.ir import Plan
from hetero.runtime.options import StageOptions
from hetero.runtime.stage import StageModel
from hetero.schedule.actions import BACKWARD, ActionKind, Schedule
from hetero.schedule.orders import ORDERS, gpipe
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import gpt2_model, moe_model
from tests.helpers.plans import plan, replica, sharded, stage, with_every_replica
from tests.helpers.ranks import run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, one_process, train

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(120)]

NUM_STEPS = 3
TOLERANCE = 1e-9
NAME = "gpipe, the last forward twice"


def the_last_forward_twice(*, num_microbatches: list[int], **arguments: object) -> Schedule:
    """GPipe, where the last microbatch of each stage keeps its input alone."""
    rows = gpipe(num_microbatches=num_microbatches, **arguments)
    out = []
    for row in rows:
        again = {
            a: a._replace(kind=ActionKind.R)
            for a in row
            if a.kind in BACKWARD and a.number == num_microbatches[a.stage] - 1
        }
        out.append([each for a in row for each in ((again[a], a) if a in again else (a,))])
    return out


def forwards_of_a_run(
    rank: int, made: Plan, num_steps: int, options: StageOptions | None = None
) -> tuple[Trace | None, list[bool]]:
    """Training under the order of above, and of each forward whether autograd recorded it."""
    ORDERS[NAME] = the_last_forward_twice  # type: ignore[index]
    recorded: list[bool] = []
    forward = StageModel.forward

    def recording(model: StageModel, *arguments: object) -> torch.Tensor:
        recorded.append(torch.is_grad_enabled())
        return forward(model, *arguments)

    StageModel.forward = recording
    return train(rank, made, num_steps, SMALL_BUCKETS, options), recorded


def under(name: str, made: Plan) -> Plan:
    ordered = with_every_replica(made, lambda each: dataclasses.replace(each, schedule=name))
    return dataclasses.replace(ordered, precision="fp64")


def unlike_replicas() -> Plan:
    first = replica(
        stage(layers=(0, 2), ranks=(0, 1), tp=2, sp=True, mbs=2),
        stage(layers=(2, 4.5), ranks=(2,), delay=1),
        stage(layers=(4.5, 6), ranks=(3,)),
        num_samples=4,
    )
    return plan(gpt2_model(), [first, replica(stage(layers=(0, 6), ranks=(4,)), num_samples=3)])


def interleaved() -> Plan:
    cuts = ((0, 1), (1, 3), (3, 4), (4, 6))
    stages = (stage(layers=cut, ranks=(s % 2,), depth=3, mbs=2) for s, cut in enumerate(cuts))
    return sharded(plan(moe_model(), [replica(*stages, num_samples=6)]))


@pytest.mark.rotates("plans")
@pytest.mark.parametrize("made", [unlike_replicas(), interleaved()], ids=["unlike-replicas", "interleaved"])
def test_the_training_is_one_processs(made: Plan) -> None:
    traces, recorded = zip(*run_ranks(forwards_of_a_run, made.world_size, under(NAME, made), NUM_STEPS), strict=True)
    assert_same_training(made, traces, one_process(under("gpipe", made), NUM_STEPS), tolerance=TOLERANCE)
    for rank, forwards in enumerate(recorded):
        (r, *_), stages = (p.replica for p in made.placements(rank)), len(made.placements(rank))
        count = made.replicas[r].num_microbatches(made.placements(rank)[0].stage)
        assert forwards.count(False) == NUM_STEPS * stages, "one microbatch of each stage kept no graph"
        assert forwards.count(True) == NUM_STEPS * stages * count


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(unlike_replicas(), id="unlike-replicas", marks=pytest.mark.rotates(every=2, turn=0)),
        # Only here another stage draws in between.
        pytest.param(interleaved(), id="interleaved"),
    ],
)
def test_dropout_drops_the_same_again(made: Plan) -> None:
    """And what comes behind draws as if nothing had run twice: bit for bit the training that keeps all graphs. Where
    stages interleave, another one has drawn in between.
    """
    dropout = StageOptions(init_method_std=0.1, attention_dropout=0.2, hidden_dropout=0.2)
    ours, theirs = (
        [trace for trace, _ in run_ranks(forwards_of_a_run, made.world_size, under(name, made), NUM_STEPS, dropout)]
        for name in (NAME, "gpipe")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.losses == other.losses
        for name, weight in mine.weights[-1].items():
            np.testing.assert_array_equal(weight, other.weights[-1][name], name)
