"""Lists what the flags of a profile run ask for: precisions and kinds of layers, each with its profile, and points."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.doctor.facts import HostFacts
from hetero.errors import ConfigError
from hetero.plan.ir import Plan
from hetero.profiling.built_parts import LayersOfModel
from hetero.profiling.points import RECOMPUTED, ProfilePoint, points
from hetero.profiling.profile_file import model_name, profile_file_name
from hetero.profiling.profiled_plan import STAGE_OF, ProfiledModel
from hetero.profiling.run_options import TPS
from hetero.runtime.layer_choice import LayerChoice, choose_layers
from hetero.runtime.options import StageOptions
from hetero.spec.devices import DeviceType
from hetero.spec.model_import import load_model, precision_of
from hetero.spec.profile import Arithmetic, LayerImplementation, LayerShape, LayerTime, Profile, Provenance

NO_PRECISION = "fp32"
"""Of a model whose file says none, as ``hetero plan`` has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledDevice:
    """The device that is measured.

    type: what profiles and plans call it.
    hardware: what it calls itself.
    node: the name of its node.
    facts: of its host.
    num_beside: other devices of the launch, which compute while this one is measured.
    is_shared: several ranks of the launch are on one device.
    """

    device: torch.device
    type: DeviceType
    hardware: str
    node: str
    facts: HostFacts
    num_beside: int = 0
    is_shared: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedProfile:
    """A precision and whose layers, which have a profile of their own, at ``path`` and with ``head``.

    label: for lines of progress, empty where there is one profile.
    """

    path: Path
    head: Profile
    layers: LayersOfModel
    label: str


def requested_profiles(args: argparse.Namespace, on: ProfiledDevice, *, date: str) -> Iterator[RequestedProfile]:
    """Make one for each precision and kind of layers.

    Args:
        date: of today.

    Raises:
        ConfigError: the flags do not go with the model or the device.
    """
    model = load_model(args.model)
    seq_length = model.max_position_embeddings if args.seq_length is None else args.seq_length
    precisions = args.precision or [precision_of(args.model) or NO_PRECISION]
    paths: dict[Path, str] = {}
    for precision in precisions:
        for layers in args.transformer_impl:
            profiled = ProfiledModel(model=model, device=on.type, seq_length=seq_length, precision=precision)
            options = StageOptions(
                hidden_dropout=args.hidden_dropout, attention_dropout=args.attention_dropout, transformer_impl=layers
            )
            plan = profiled.plan(tp=1, micro_batch_size=1)
            choice = choose_layers(plan, plan.replicas[0].stages[STAGE_OF["block"]], options, device=on.device)
            whose = "local" if choice.transformer_engine is None else "transformer_engine"
            name = model_name(args.model)
            path = args.out / profile_file_name(name, device=on.type.name, precision=precision, layers=whose)
            if path in paths:
                raise ConfigError(
                    f"--transformer-impl: {paths[path]} and {layers} are the same layers here ({choice.layers}); keep "
                    "one of them"
                )
            paths[path] = layers
            head = _head(args, plan, on, name=name, date=date, choice=choice)
            several = len(precisions) * len(args.transformer_impl) > 1
            label = f"{precision} {whose}: " if several else ""
            yield RequestedProfile(path=path, head=head, layers=LayersOfModel(profiled, options), label=label)


def requested_points(args: argparse.Namespace, profiled: ProfiledModel) -> list[ProfilePoint]:
    """List those that the flags ask for, the most telling first.

    Raises:
        ConfigError: the model cannot be cut for a ``--tp``.
    """
    for tp in args.tp or ():
        profiled.plan(tp=tp, micro_batch_size=1)
    tps = args.tp or [tp for tp in TPS if profiled.can_have(tp=tp)]
    return points(tps, args.micro_batch_size, recomputes=[each for each in args.recompute if each in RECOMPUTED])


def _beside(num: int) -> str:
    others = f"{num} other device{'' if num == 1 else 's'}"
    return f"{others} of the launch computed meanwhile" if num else "no other device was made to compute meanwhile"


def _head(
    args: argparse.Namespace, plan: Plan, on: ProfiledDevice, *, name: str, date: str, choice: LayerChoice
) -> Profile:
    """A profile of nothing yet: its one time is to be replaced."""
    return Profile(
        device=on.type.name,
        model=name,
        shape=LayerShape.of(plan.model),
        seq_length=plan.seq_length,
        precision=plan.precision,
        arithmetic=_arithmetic(plan),
        tp_collectives_included=False,
        implementation=LayerImplementation(
            attention="flash",
            dropout=max(args.hidden_dropout, args.attention_dropout) > 0,
            overlaps_collectives=True,
            gradient_sums="fused" if choice.gradient_accumulation else "separate",
        ),
        layers="local" if choice.transformer_engine is None else "transformer_engine",
        provenance=Provenance(
            measured_by="hetero profile run",
            source=f"hetero profile run, {date}, on {on.facts.host}",
            licence="that of whoever measured",
            notes=(
                "each layer was timed alone, tensor-parallel ones as one of their ranks, without collectives",
                _beside(on.num_beside),
                *(["several ranks shared a device: the times mean nothing"] if on.is_shared else []),
                "medians; spreads are from the first to the third quartile, as a part of the median",
            ),
            date=date,
            command=args.command_line,
            hardware=on.hardware,
            versions=versions_of(on.facts),
        ),
        times=(LayerTime(kind="block", tp=1, micro_batch_size=1, forward_s=0.0, backward_s=0.0),),
    )


def versions_of(facts: HostFacts) -> dict[str, str]:
    """Of what seconds may depend on."""
    cuda = facts.torch.cuda if facts.torch is not None else None
    cudnn = str(facts.torch.cudnn) if facts.torch is not None and facts.torch.cudnn is not None else None
    others = {"cuda": cuda, "cudnn": cudnn, "driver": facts.driver}
    packages = {name: version for name, version in facts.packages.items() if name != "safetensors"}
    return packages | {name: version for name, version in others.items() if version}


def _arithmetic(plan: Plan) -> Arithmetic:
    if plan.precision == "fp32" and torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return plan.precision
