"""The 65 trainings whose bits are compared between versions of Python, torch and megatron-core.

* 5 dense styles x 3 precisions (fp32, bf16, fp16) x 3 features (dropout, recompute, delay): 45.
* Experts x 4 precisions (fp64 too) x 5 features (the three, and either auxiliary loss): 20.

Only experts have an auxiliary loss, so dense styles have no training with one. Experts train in fp64 as well because a
rounding can send a token to another expert: a difference that fp64 does not show is one of rounding.

Two dense styles train in one process. All others train on four ranks over gloo: two replicas of unequal depth, share,
tensor parallelism and microbatch, with a distributed optimizer.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from hetero.plan.ir import Plan, Precision, Replica
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import AuxiliaryLoss, DataParallelOptions, StageOptions
from hetero.spec.model import ModelSpec
from tests.helpers.layouts import STYLES
from tests.helpers.plans import plan, replica, sharded, stage, with_every_replica
from tests.helpers.training import Training

STEPS = 3
NUM_LAYERS = 4
IN_ONE_PROCESS = ("gpt2-untied", "llama-tied")
"""Styles whose layers are those of another style, which trains on four ranks."""

_PLAIN = StageOptions(init_method_std=0.1)
_DATA_PARALLEL = DataParallelOptions(bucket_numel=3000, overlap_param_gather=True)
_LOSS_SCALE = LossScaleOptions(initial=2.0**10)


def _keep(whole: Replica) -> Replica:
    return whole


def _recompute(whole: Replica) -> Replica:
    """Recompute some layers of the first stage, and attention of the others."""
    others = len(whole.stages) - 1
    return whole.with_each_stage(
        recompute=["full", *["selective"] * others], recompute_num_layers=[1, *[None] * others]
    )


def _delay(whole: Replica) -> Replica:
    """Delay the weights' gradients of the first stage by one microbatch, and split the backward of the others."""
    return whole.with_each_stage(wgrad_delay=[1, *[0] * (len(whole.stages) - 1)])


@dataclasses.dataclass(frozen=True)
class Feature:
    """What a training has beyond layers, loss and optimizer: options of the stages and fields of the plan."""

    options: StageOptions = _PLAIN
    change: Callable[[Replica], Replica] = _keep


def _balanced(loss: AuxiliaryLoss) -> Feature:
    return Feature(dataclasses.replace(_PLAIN, moe_router_load_balancing=loss, moe_aux_loss_coeff=1.0))


FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        "dropout": Feature(dataclasses.replace(_PLAIN, attention_dropout=0.1, hidden_dropout=0.1)),
        "recompute": Feature(change=_recompute),
        "delay": Feature(change=_delay),
    }
)
AUXILIARY_LOSSES: Mapping[str, Feature] = MappingProxyType(
    {"aux_loss": _balanced("aux_loss"), "seq_aux_loss": _balanced("seq_aux_loss")}
)
HALVES_AND_FP32: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


def trainings() -> dict[str, Training]:
    """Return all of them by name, such as ``llama-gqa bf16 dropout``."""
    return dict(_named_trainings())


def _named_trainings() -> Iterator[tuple[str, Training]]:
    for style, build in STYLES.items():
        model = dataclasses.replace(build(), num_layers=NUM_LAYERS)
        has_experts = model.num_experts is not None
        features = {**FEATURES, **AUXILIARY_LOSSES} if has_experts else FEATURES
        precisions: tuple[Precision, ...] = ("fp64", *HALVES_AND_FP32) if has_experts else HALVES_AND_FP32
        plain = _one_process(model) if style in IN_ONE_PROCESS else _four_ranks(model)
        for precision in precisions:
            for name, feature in features.items():
                made = dataclasses.replace(with_every_replica(plain, feature.change), precision=precision)
                yield (
                    f"{style} {precision} {name}",
                    Training(
                        made,
                        _DATA_PARALLEL,
                        feature.options,
                        loss_scale=_LOSS_SCALE if precision == "fp16" else None,
                        weights_at="the end",
                        tensor_parallelism="its own groups",
                    ),
                )


def _one_process(model: ModelSpec) -> Plan:
    return plan(model, [replica(stage(layers=(0, NUM_LAYERS), ranks=(0,), mbs=2), num_samples=6)])


def _four_ranks(model: ModelSpec) -> Plan:
    first = replica(
        stage(layers=(0, 1), ranks=(0, 1), tp=2, sp=True, mbs=2),
        stage(layers=(1, NUM_LAYERS), ranks=(2,)),
        num_samples=4,
    )
    second = replica(stage(layers=(0, NUM_LAYERS), ranks=(3,)), num_samples=2)
    return sharded(plan(model, [first, second]))
