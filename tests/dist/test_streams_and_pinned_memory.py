"""A rank's CUDA streams and pinned memory, counted on a CPU that plays both: few streams, and the bytes predicted.

Copies are late in the played streams, and the bits are those of a training without: nothing reads what is still on its
way.
"""

import dataclasses

import numpy as np
import pytest
import torch

from hetero.elastic.copies import _Staging
from hetero.plan.ir import Plan
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.plan.stream_roles import StreamRole, stream_roles
from hetero.plan.validate import validate
from hetero.runtime.trainer import Trainer
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.played_streams import played_cuda
from tests.helpers.ranks import run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

NUM_STEPS = 3
MAX_STREAMS = 8
"""What a rank may have besides its communicators' and its computes'."""

OPTIMIZER = Offload(optimizer_from=-1)
GRADIENTS = Offload(optimizer_from=-1, gradients_from=-1)
WEIGHTS = Offload(optimizer_from=-1, gradients_from=-1, weights_from=-1)
RESIDENCIES = {
    "nothing": NOTHING_ON_HOST,
    "optimizer": OPTIMIZER,
    "previews": dataclasses.replace(OPTIMIZER, speculate=True),
    "gradients": GRADIENTS,
    "weights": WEIGHTS,
    "activations": Offload(activations_until=4),
    "everything": dataclasses.replace(WEIGHTS, activations_until=4),
}


def residency(name: str, *, in_phases: bool = False) -> Plan:
    """Copies of a stage with that on their hosts: two, or four that are summed in two domains."""
    dp = 4 if in_phases else 2
    held = stage(layers=(0, 4), ranks=range(dp), dp=dp)
    made = sharded(plan(llama_model(num_layers=4), [replica(held, num_samples=2 * dp)]))
    made = made.with_replicas({0: made.replicas[0].with_stage(0, offload=RESIDENCIES[name])})
    if in_phases:
        made = dataclasses.replace(
            made, gradient_sync=dataclasses.replace(made.gradient_sync, domains=((0, 1), (2, 3)))
        )
    validate(made)
    return made


def streams_of_a_rank(rank: int, made: Plan) -> int:
    """Streams that a rank takes from torch's pool to train, and to copy its state for recovery."""

    def copy_state(trainer: Trainer, rank: int) -> None:
        staging = _Staging(torch.device("cpu"), list(trainer.optimizer.state(owner=None)))
        staging.stage()
        staging.wait_until_staged()

    with played_cuda() as played:
        train(rank, made, 1, SMALL_BUCKETS, prepare=copy_state)
        return len(played.streams)


@pytest.mark.parametrize(("name", "in_phases"), [(name, False) for name in RESIDENCIES] + [("everything", True)])
def test_a_rank_has_a_stream_for_each_of_its_roles(name: str, in_phases: bool) -> None:
    made = residency(name, in_phases=in_phases)
    roles = stream_roles(made.replicas[0].stages, sums_in_phases=in_phases)
    assert run_ranks(streams_of_a_rank, made.world_size, made) == [len(roles)] * made.world_size
    assert len(roles) <= MAX_STREAMS


def test_all_roles_together_are_few() -> None:
    made = residency("everything", in_phases=True)
    assert stream_roles(made.replicas[0].stages, sums_in_phases=True) == set(StreamRole)
    assert len(StreamRole) == MAX_STREAMS


def train_with_streams(rank: int, made: Plan) -> Trace | None:
    with played_cuda():
        return train(rank, made, NUM_STEPS, SMALL_BUCKETS, weights_at="the end")


def train_without(rank: int, made: Plan) -> Trace | None:
    return train(rank, made, NUM_STEPS, SMALL_BUCKETS, weights_at="the end")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RESIDENCIES))
def test_nothing_reads_what_is_still_on_its_way(name: str) -> None:
    made = residency(name)
    both = (run_ranks(each, made.world_size, made) for each in (train_without, train_with_streams))
    for expected, found in zip(*both, strict=True):
        assert found.losses == expected.losses
        for weight, values in expected.weights[-1].items():
            np.testing.assert_array_equal(found.weights[-1][weight], values, err_msg=weight)
