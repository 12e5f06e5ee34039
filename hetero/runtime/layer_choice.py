"""Chooses, for a stage on this device, whose layers it is made of and which kernels they use.

What a device lacks changes how fast its stage is and how its numbers are rounded, never what is computed. So ``auto``
takes what is there, and only what is asked for by name and cannot be is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from megatron.core.fusions.fused_layer_norm import HAVE_FUSED_LAYER_NORM
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.utils import get_te_version, is_te_min_version

from hetero.distributed.process_groups import ParallelContext
from hetero.errors import ConfigError
from hetero.extras import pip_install
from hetero.plan.device_rules import FP8_MULTIPLE, TRANSFORMER_ENGINE_PRECISIONS, fp8_obstacle, fp8_tokens
from hetero.plan.ir import Plan, Precision, Stage
from hetero.runtime.main_grad import can_fuse_accumulation
from hetero.runtime.options import StageOptions
from hetero.spec.devices import DeviceType
from hetero.spec.shipped_devices import SHIPPED_DEVICES

DELAYS_WEIGHT_GRADIENTS = "2.3.0"
"""TransformerEngine's first version whose linear layers can leave the gradient of their weight for later."""

FP8_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Compute capability from which a recipe runs (transformer_engine/pytorch/quantization.py:48-100)."""

FP8_MULTIPLES = {"delayed": FP8_MULTIPLE, "tensorwise": FP8_MULTIPLE, "blockwise": 128, "mxfp8": 32}
"""What rows and columns of the matrices must be multiples of (``is_quantizable`` of its tensors)."""

ATTENTION_VARIABLES = {
    "auto": ("1", "1", "1"),
    "flash": ("1", "0", "0"),
    "fused": ("0", "1", "0"),
    "unfused": ("0", "0", "1"),
    "local": ("0", "0", "0"),
}
"""What megatron-core sets NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN to (language_module.py:92-126)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChoice:
    """Whose modules the layers of a stage are, and by which kernels they compute.

    transformer_engine: its version; ``None`` where the layers are megatron-core's local ones, ``why_local`` says why.
    torch_attention: attention is torch's ``scaled_dot_product_attention``, else TransformerEngine's.
    bias_activation, bias_dropout: one kernel each, made by torch's compiler.
    rope: queries and keys are rotated by TransformerEngine's kernel.
    apex_norm: norms are Apex's.
    cross_entropy: the loss is megatron-core's fused one.
    gradient_accumulation: the product that is a weight's gradient adds it to the sum over microbatches.
    fp8: format and recipe of TransformerEngine's products; ``None`` computes them in the plan's precision.
    """

    transformer_engine: str | None
    why_local: str = ""
    torch_attention: bool = True
    bias_activation: bool = False
    bias_dropout: bool = False
    rope: bool = False
    apex_norm: bool = False
    cross_entropy: bool = False
    gradient_accumulation: bool = False
    fp8: tuple[str, str] | None = None

    @property
    def layers(self) -> str:
        """Whose layers, as a log says it."""
        if self.transformer_engine is None:
            return f"local ({self.why_local})"
        return f"TransformerEngine {self.transformer_engine}" + (f", fp8 {' '.join(self.fp8)}" if self.fp8 else "")

    @property
    def fused(self) -> tuple[str, ...]:
        """What is computed by one kernel each, as a log says it."""
        parts = {
            "bias + activation": self.bias_activation,
            "bias + dropout": self.bias_dropout,
            "rope": self.rope,
            "Apex norm": self.apex_norm,
            "cross entropy": self.cross_entropy,
            "gradient accumulation": self.gradient_accumulation,
        }
        return tuple(name for name, is_fused in parts.items() if is_fused)


def choices_of(context: ParallelContext, options: StageOptions) -> list[LayerChoice]:
    """Choose for every stage that this rank holds.

    Raises:
        ConfigError: as :func:`choose_layers`, or there is a format for fp8 and no stage in fp8.
    """
    plan = context.plan
    if options.fp8_format is not None and not any(stage.fp8 for _, _, stage in plan.stages()):
        raise ConfigError(
            f"--fp8-format {options.fp8_format} has no effect: no stage of the plan is in fp8; set fp8 to true for "
            "stages in the plan, or leave the flag out"
        )
    return [choose_layers(plan, work.stage, options, device=context.device) for work in context.stages]


def check_attention_variables(options: StageOptions, environment: Mapping[str, str]) -> None:
    """Check that the environment asks for no other kernels of attention than the flag, as megatron-core will assert.

    Raises:
        ConfigError: it does.
    """
    backend = options.attention_backend
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    for name, wanted in zip(names, ATTENTION_VARIABLES[backend], strict=True):
        if (found := environment.get(name, wanted)) != wanted:
            raise ConfigError(
                f"environment: {name} is {found}, and --attention-backend {backend} sets it to {wanted}; unset the "
                "variable and choose by the flag"
            )


def runs_cuda(device: torch.device) -> bool:
    """Whether ``device`` runs CUDA's kernels. That of an emulated stage does not, whatever the plan calls it."""
    return device.type == "cuda"


def choose_layers(plan: Plan, stage: Stage, options: StageOptions, *, device: torch.device) -> LayerChoice:
    """Choose for ``stage`` of ``plan`` on this device.

    Raises:
        ConfigError: ``options`` or the plan ask for something by name that cannot be.
    """
    model, on_cuda = plan.model, runs_cuda(device)
    device_type = plan.device_types.of(stage.device)
    why_local = why_no_transformer_engine(
        options,
        device_type if on_cuda else SHIPPED_DEVICES.of("cpu"),
        precision=plan.precision,
        splits_backward=stage.wgrad_delay is not None,
    )
    transformer_engine = not why_local
    fuses_activation = {
        "swiglu": options.bias_swiglu_fusion,
        "gelu": options.bias_gelu_fusion and model.linear_bias,
        "relu": False,
    }[model.activation]
    return LayerChoice(
        transformer_engine=str(get_te_version()) if transformer_engine else None,
        why_local=why_local,
        torch_attention=not transformer_engine or options.attention_backend == "local",
        bias_activation=on_cuda and fuses_activation,
        bias_dropout=on_cuda and options.bias_dropout_fusion,
        rope=on_cuda and transformer_engine and options.rope_fusion and model.position_embedding == "rope",
        apex_norm=on_cuda
        and not transformer_engine
        and HAVE_FUSED_LAYER_NORM
        and model.normalization == "LayerNorm"
        and plan.precision != "fp64",
        cross_entropy=_fuses_cross_entropy(options, plan.precision),
        gradient_accumulation=options.gradient_accumulation_fusion
        and (transformer_engine or can_fuse_accumulation(plan.precision, device)),
        fp8=_fp8(plan, stage, options, why_local=why_local),
    )


def why_no_transformer_engine(
    options: StageOptions, device: DeviceType, *, precision: Precision, splits_backward: bool
) -> str:
    """Why the layers of a stage on this device are not TransformerEngine's; empty where they are.

    Raises:
        ConfigError: it is asked for and cannot be.
    """
    if options.transformer_impl == "local":
        return "--transformer-impl local"
    why, fix = _obstacle(device, precision=precision, splits_backward=splits_backward)
    if why and options.transformer_impl == "transformer_engine":
        raise ConfigError(
            f"--transformer-impl transformer_engine: {why}; {fix}choose auto, which takes the local layers there"
        )
    return why


def _obstacle(device: DeviceType, *, precision: Precision, splits_backward: bool) -> tuple[str, str]:
    """What keeps TransformerEngine away, and the beginning of what to do about it; empty if nothing does."""
    if not device.has_transformer_engine:
        return f"TransformerEngine does not run on {device.name}", ""
    if precision not in TRANSFORMER_ENGINE_PRECISIONS:
        return f"TransformerEngine does not compute in {precision}", "add --bf16 or --fp16, or "
    if not HAVE_TE:
        return "TransformerEngine is not installed", f"run: {pip_install('transformer-engine')}, or "
    if splits_backward and not is_te_min_version(DELAYS_WEIGHT_GRADIENTS):
        return (
            f"TransformerEngine {get_te_version()} cannot delay weight gradients as the plan does (wgrad_delay)",
            f"install {DELAYS_WEIGHT_GRADIENTS} or newer, set wgrad_delay to null in the plan, or ",
        )
    return "", ""


def may_split_backward(options: StageOptions) -> bool:
    """Whether a planner may split backwards without taking TransformerEngine's layers away from a device."""
    return options.transformer_impl == "local" or not HAVE_TE or is_te_min_version(DELAYS_WEIGHT_GRADIENTS)


def _fuses_cross_entropy(options: StageOptions, precision: Precision) -> bool:
    if options.cross_entropy_loss_fusion and precision != "bf16":
        raise ConfigError(
            f"--cross-entropy-loss-fusion: megatron-core's fused loss rounds its gradient to bf16, and the plan is in "
            f"{precision}; leave it out"
        )
    return options.cross_entropy_loss_fusion


def _fp8(plan: Plan, stage: Stage, options: StageOptions, *, why_local: str) -> tuple[str, str] | None:
    """Format and recipe of a stage in fp8; what every recipe asks of it the plan's rules have checked."""
    if not stage.fp8:
        return None
    device, recipe = plan.device_types.of(stage.device), options.fp8_recipe
    where = f"the plan has fp8 for a stage on {stage.device} (fp8 is true)"
    if why_local:
        raise ConfigError(
            f"{where}: its layers would be local ({why_local}), which cannot; set fp8 to false there, or make "
            "TransformerEngine available"
        )
    needed = FP8_CAPABILITY[recipe]
    if device.compute_capability is None or device.compute_capability < needed:
        has = "none" if device.compute_capability is None else "{}.{}".format(*device.compute_capability)
        raise ConfigError(
            f"{where}: --fp8-recipe {recipe} needs compute capability {needed[0]}.{needed[1]}, the device has {has}; "
            "choose another recipe, or set fp8 to false there"
        )
    obstacle = fp8_obstacle(
        plan.model,
        device,
        precision=plan.precision,
        tp=stage.tp,
        num_tokens=fp8_tokens(stage, plan.seq_length),
        multiple=FP8_MULTIPLES[recipe],
    )
    if obstacle is not None:
        raise ConfigError(
            f"{where}: with --fp8-recipe {recipe}, {obstacle}; change the shape, or set fp8 to false there"
        )
    return options.fp8_format or "hybrid", recipe
