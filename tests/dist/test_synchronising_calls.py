"""The host waits for the device once in a step, and never within it: however many microbatches there are.

Experts are left out: megatron-core's dispatcher asks for the number of tokens of each.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan, Precision
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from tests.dist.test_layouts import DELAYS, layout
from tests.helpers.layouts import with_delays
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.synchronisation import SynchronisingCalls
from tests.helpers.training import ADAM, data_of

pytestmark = pytest.mark.dist

AGREEMENT = ["tolist"]
"""On norm, loss, overflow and end, in one tensor."""


def calls_of_a_step(rank: int, made: Plan) -> tuple[list[str], list[str]]:
    """Synchronising calls of the second step: up to the summed gradients, and from there."""
    context = create_groups(made, device=torch.device("cpu"))
    trainer = Trainer(
        context,
        options=StageOptions(init_method_std=0.1, attention_dropout=0.1, hidden_dropout=0.1),
        adam=ADAM,
        seed=7,
        data_parallel=DataParallelOptions(bucket_numel=3000, overlap_param_gather=made.distributed_optimizer),
    )
    session = TrainingSession(context, trainer, data=data_of(context))
    session.step()
    with SynchronisingCalls() as computing:
        session.compute_gradients()
    with SynchronisingCalls() as updating:
        session.update()
    return computing.names, updating.names


def with_samples(made: Plan, factor: int) -> Plan:
    replicas = tuple(dataclasses.replace(each, num_samples=each.num_samples * factor) for each in made.replicas)
    return dataclasses.replace(made, replicas=replicas, global_batch_size=made.global_batch_size * factor)


def small(model: Any, **options: Any) -> Plan:
    first, second = stage(layers=(0, 1), ranks=(0, 1), tp=2, **options), stage(layers=(1, 2), ranks=(2,))
    return plan(
        model, [replica(first, second, num_samples=2), replica(stage(layers=(0, 2), ranks=(3,)), num_samples=1)]
    )


PLANS = {
    "small": small(gpt2_model(num_layers=2)),
    "small-sp-sharded": sharded(small(llama_model(num_layers=2), sp=True)),
    "small-recompute": small(llama_model(num_layers=2), recompute="full"),
    "everything": layout("everything", "gpt2-tied"),
    "everything-split": with_delays(layout("everything", "llama-gqa"), DELAYS["unlike"]),
    "interleaved-shares": layout("interleaved-shares", "gpt2-tied"),
}


def _cases() -> Iterator[Any]:
    """The small plan in fp32 and in one more, each other plan in one precision each sixth run."""
    for (place, name), precision in itertools.product(enumerate(PLANS), get_args(Precision)):
        if precision != "fp64":
            marks = [pytest.mark.rotates("small")] if precision != "fp32" else []
            marks = marks if name == "small" else [pytest.mark.rotates(f"waits of {name}", every=6, turn=place)]
            if marks or precision != "fp32":
                marks.append(pytest.mark.slow)
            yield pytest.param(name, precision, id=f"{name}-{precision}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), list(_cases()))
def test_a_step_waits_for_the_device_once(name: str, precision: Precision) -> None:
    for factor in (1, 3):
        made = dataclasses.replace(with_samples(PLANS[name], factor), precision=precision)
        for computing, updating in run_ranks(calls_of_a_step, made.world_size, made):
            assert computing == []
            assert updating == AGREEMENT


def found_by_the_counter() -> list[str]:
    values = torch.arange(4.0)
    with SynchronisingCalls() as found:
        values[0].item()
        values.tolist()
        bool(values[0] > 0)
        float(values[0])
        torch.tensor(1.0, device="cpu")
        values.nonzero()
        torch.unique(values)
        values[values > 1]
        values[values > 1] = values[2:].clone()
        values[values > 1] = 0.0
        values.masked_select(values > 1)
        torch.full((), 1.0, device="cpu")
        values.cpu()
    return found.names


def test_the_counter_finds_what_it_should() -> None:
    """Each once. A number that is filled in where a mask is true, or into a whole tensor, costs nothing."""
    assert found_by_the_counter() == [
        "item",
        "tolist",
        "__bool__",
        "__float__",
        "tensor",
        "nonzero",
        "_unique2",
        "index",
        "index_put_",
        "masked_select",
        "cpu",
    ]
