"""Says what is to be measured of the layers of a device so that a plan's prediction rests on it."""

from dataclasses import dataclass
from typing import Literal

from hetero.cost.cost_model import CostModel
from hetero.plan.ir import Plan, Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedProfile:
    """What a profile would have to hold.

    layers: whose layers a training there has by itself.
    tps, micro_batch_sizes: by ascending size, those that the plan has on the device.
    hidden_dropout, attention_dropout: as the plan counts them.
    """

    device: str
    seq_length: int
    precision: Precision
    layers: Literal["local", "transformer_engine"]
    tps: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    hidden_dropout: float
    attention_dropout: float


def wanted_profile(plan: Plan, costs: CostModel, *, device: str) -> WantedProfile:
    """What prices the stages of ``plan`` on ``device``, which has one at least."""
    stages = [stage for _, _, stage in plan.stages() if stage.device == device]
    hidden, attention = plan.counted_dropouts
    return WantedProfile(
        device=device,
        seq_length=plan.seq_length,
        precision=plan.precision,
        layers="transformer_engine" if costs.may_have_transformer_engine(device) else "local",
        tps=tuple(sorted({stage.tp for stage in stages})),
        micro_batch_sizes=tuple(sorted({stage.micro_batch_size for stage in stages})),
        hidden_dropout=hidden,
        attention_dropout=attention,
    )
