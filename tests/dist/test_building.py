"""What a device holds while a training is built that leaves gradients or weights to its host.

Device and host are the CPU here, and what is made on the device is made on ``cpu:0``, as torch lets one call it.
"""

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.cost.memory import memory_costs, plan_memory
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.plan.offload import Offload
from hetero.runtime.buckets import local_buckets
from hetero.runtime.dtypes import GRADIENT_DTYPES
from hetero.runtime.options import StageOptions
from hetero.runtime.stage import build_stages
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_alone

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


DEVICE = torch.device("cpu", 0)


class DeviceBytes(TorchDispatchMode):
    """Counts the memory of what was made on :data:`DEVICE`: now, and the most that there was."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if kwargs and kwargs.get("device") == DEVICE:
            storage = found.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)
        self.most = max(self.most, self.now())
        return found

    def now(self) -> int:
        there = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        return sum(storage.nbytes() for storage in there)


def alone(offload: Offload) -> Plan:
    """A tied embedding and six layers on one rank."""
    held = dataclasses.replace(stage(layers=(0, 6), ranks=(0,)), offload=offload)
    return sharded(plan(gpt2_model(), [replica(held, num_samples=3)]))


def held_while_built(rank: int, made: Plan) -> tuple[int, int]:
    """The most bytes on the device, and those at the end."""
    context = dataclasses.replace(create_groups(made, device=torch.device("cpu")), device=DEVICE)
    dtype = GRADIENT_DTYPES[made.precision]
    with DeviceBytes() as held:
        (model,) = build_stages(context, options=StageOptions(init_method_std=0.1), seed=7)
        local_buckets(context, model.parameters, bucket_numel=1000, gradient_dtype=dtype)
        most, end = held.most, held.now()
    return most, end


def test_weights_that_move_are_there_twice_where_gradients_have_room() -> None:
    made = alone(Offload(optimizer_from=-1))
    most, end = run_alone(held_while_built, made)
    memory = plan_memory(made, memory_costs(made))[0, 0]
    assert end == pytest.approx(memory.weights + memory.gradients, rel=0.05)
    assert most <= 1.05 * end


@pytest.mark.parametrize("weights_from", [None, -1.0, 3.0])
def test_no_more_is_there_than_in_a_step(weights_from: float | None) -> None:
    """Nor is a weight that lives on the host, but for one at a time."""
    made = alone(Offload(optimizer_from=-1, gradients_from=-1, weights_from=weights_from))
    most, end = run_alone(held_while_built, made)
    memory = plan_memory(made, memory_costs(made))[0, 0]
    assert end == pytest.approx(memory.weights, rel=0.05)
    assert most <= memory.weights + memory.gradients + memory.working
    assert most - end < memory.working
