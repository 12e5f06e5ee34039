"""Checks that the devices of a plan are known and compute what it asks of them, one rule per function.

fp8 is a property of a stage: TransformerEngine multiplies its linear layers in fp8, and everything else, weights,
activations between stages and gradients among them, stays in the plan's bf16. Stages in fp8 and others that hold the
same layers in bf16 therefore sum the same gradients.
"""

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Precision, Stage
from hetero.spec.devices import DeviceType, check_described_once
from hetero.spec.model import ModelSpec

TRANSFORMER_ENGINE_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16")
"""It has no kernel for float64, and multiplies float32 matrices in TF32."""

FP8_MULTIPLE = 16
"""Of every dimension of a product in fp8. TransformerEngine asks for multiples of 16 columns and 8 rows
(``assert_dim_for_fp8_exec`` in its ``pytorch/utils.py``), and a weight's gradient is a product along the rows, which
cuBLAS wants in 16 bytes as well. Recipes that scale blocks ask for more: 32 with ``mxfp8``, 128 with ``blockwise``."""


def check_devices_are_known(plan: Plan) -> None:
    """Every stage's device type ships or is described by the plan, which describes each once."""
    try:
        check_described_once(plan.devices)
    except ConfigError as error:
        raise PlanError(f"plan: {error}") from None
    for r, s, stage in plan.stages():
        try:
            plan.device_types.of(stage.device)
        except ConfigError as error:
            raise ConfigError(f"replica {r} stage {s}: {error}") from None


def check_devices_can_do_the_precision(plan: Plan) -> None:
    """Every working device computes the plan's precision natively."""
    for r, s, stage in plan.stages():
        device = plan.device_types.of(stage.device)
        if plan.precision not in device.precisions:
            raise PlanError(
                f"replica {r} stage {s}: device {device.name} has no {plan.precision}; choose {device.precisions[-1]} "
                "for the whole plan, which every device has, or leave its ranks idle"
            )


def check_fp8(plan: Plan) -> None:
    """Stages in fp8 sit on devices that have it, under bf16, with dimensions that it can multiply."""
    seen = set()
    for r, s, stage in plan.stages():
        # In a plan of thousands of replicas most stages are alike.
        key = stage.device, stage.tp, stage.micro_batch_size, stage.sequence_parallel
        if not stage.fp8 or key in seen:
            continue
        seen.add(key)
        obstacle = fp8_obstacle(
            plan.model,
            plan.device_types.of(stage.device),
            precision=plan.precision,
            tp=stage.tp,
            num_tokens=fp8_tokens(stage, plan.seq_length),
        )
        if obstacle is not None:
            raise PlanError(f"replica {r} stage {s}: fp8 is true, but {obstacle}; set it to false, or change that")


def fp8_tokens(stage: Stage, seq_length: int) -> int:
    """Rows of a microbatch that a rank of ``stage`` casts to fp8 by itself, before any gather."""
    return stage.micro_batch_size * seq_length // (stage.tp if stage.splits_sequence else 1)


def fp8_obstacle(
    model: ModelSpec,
    device: DeviceType,
    *,
    precision: Precision,
    tp: int,
    num_tokens: int,
    multiple: int = FP8_MULTIPLE,
) -> str | None:
    """Why a stage cannot compute in fp8, ``None`` if it can.

    Args:
        num_tokens: of a microbatch on one rank, of a part of the sequence where ranks share it.
        multiple: what the recipe asks of every dimension; the least by default.
    """
    if not device.has_fp8:
        capability = device.compute_capability
        found = "no CUDA" if capability is None else "compute capability {}.{}".format(*capability)
        return f"device {device.name} has {found}, fp8 begins with 8.9"
    if precision != "bf16":
        # fp16 finds overflow by infinities, which a cast to fp8 turns into its largest number.
        return f"the plan's precision is {precision}, fp8 goes with bf16"
    if model.num_experts is not None:
        return "the model has experts, whose tokens come in any number"
    if num_tokens % multiple:
        return f"a rank has {num_tokens} tokens of a microbatch, which must be a multiple of {multiple}"
    for name, size in _cut_features(model).items():
        if size // tp % multiple:
            return f"tp {tp} leaves a rank {size // tp} of {name} {size}, which must be a multiple of {multiple}"
    if model.hidden_size % multiple:
        return f"the model's hidden_size is {model.hidden_size}, which must be a multiple of {multiple}"
    return None


def _cut_features(model: ModelSpec) -> dict[str, int]:
    """Features between the linear layers of a block, which tensor parallelism cuts."""
    query_size = model.num_attention_heads * model.kv_channels
    return {
        "the queries' channels": query_size,
        "the channels of queries, keys and values": query_size + 2 * model.num_query_groups * model.kv_channels,
        "ffn_hidden_size": model.ffn_hidden_size,
    }
