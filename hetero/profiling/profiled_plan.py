"""Makes the plan whose stages a profiler builds: each part of a model is a stage of its own."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Precision, Recompute, Replica, Stage
from hetero.plan.validate import validate
from hetero.spec.devices import DeviceType
from hetero.spec.model import ModelSpec
from hetero.spec.model_import import load_model
from hetero.spec.profile import ModuleKind
from hetero.spec.shipped_devices import SHIPPED_DEVICES

STAGE_OF: Mapping[ModuleKind, int] = {"embedding": 0, "block": 1, "attention": 2, "mlp": 3, "head": 4}
"""The first and the last one have a layer beside what is measured of them, as no stage is without."""

_EDGES = (0.0, 1.0, 2.0, 2.5, 3.0, 4.0)

NUM_LAYERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledModel:
    """What is profiled, wherever it is cut.

    model: of any number of layers, as all are alike.
    device: the type that the profile is of.
    """

    model: ModelSpec
    device: DeviceType
    seq_length: int
    precision: Precision

    def plan(
        self,
        *,
        tp: int,
        micro_batch_size: int,
        recompute: Recompute = "none",
        splits_backward: bool = False,
        on_rank_0: ModuleKind = "embedding",
        world_size: int = 0,
    ) -> Plan:
        """Make a pipeline of this model with a stage for each kind of module.

        Embedding and head have weights of their own there: what either takes does not depend on whose they are.

        Args:
            on_rank_0: whose stage has the first ranks; the stages after it have the next ones, and so on around.
            world_size: with idle ranks up to this number.

        Raises:
            ConfigError: the model cannot be cut so, or the device has not the precision.
        """
        firsts = [(number - STAGE_OF[on_rank_0]) % len(STAGE_OF) * tp for number in range(len(STAGE_OF))]
        stages = tuple(
            Stage(
                first_layer=0,
                end_layer=1,
                ranks=tuple(range(first, first + tp)),
                device=self.device.name,
                tp=tp,
                micro_batch_size=micro_batch_size,
                in_flight=len(_EDGES) - 1 - number,
                recompute=recompute,
                wgrad_delay=0 if splits_backward else None,
            ).with_layers(*_EDGES[number : number + 2])
            for number, first in enumerate(firsts)
        )
        num_samples = len(stages) * micro_batch_size
        plan = Plan(
            model=dataclasses.replace(self.model, num_layers=NUM_LAYERS, tied_embeddings=False),
            seq_length=self.seq_length,
            global_batch_size=num_samples,
            precision=self.precision,
            devices=() if self.device.name in SHIPPED_DEVICES else (self.device,),
            replicas=(Replica(num_samples=num_samples, stages=stages),),
            idle_ranks=tuple(range(len(stages) * tp, world_size)),
        )
        try:
            validate(plan)
        except PlanError as error:
            raise ConfigError(f"tp {tp}, microbatch {micro_batch_size}, {self.precision}: {error}") from None
        return plan

    def can_have(self, *, tp: int) -> bool:
        """Whether so many tensor-parallel ranks can share a layer of it."""
        try:
            self.plan(tp=tp, micro_batch_size=1)
        except ConfigError:
            return False
        return True


def check_cuts(path: Path, tps: Sequence[int]) -> None:
    """Check before torch is loaded what it has no part in: that there is a model, and that it can be cut.

    Raises:
        ConfigError: the file is missing or malformed, or the model cannot be cut for a ``--tp``.
    """
    model = load_model(path)
    device, seq_length = SHIPPED_DEVICES.of("cpu"), model.max_position_embeddings
    profiled = ProfiledModel(model=model, device=device, seq_length=seq_length, precision="fp32")
    for tp in tps:
        profiled.plan(tp=tp, micro_batch_size=1)
