"""Measures the profiles of one device point by point, within a budget of time, and writes each point as it comes."""

import argparse
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hetero.doctor.facts import HostFacts
from hetero.errors import ConfigError
from hetero.plan.ir import Plan
from hetero.profiling.measure_point import Share, measure_point
from hetero.profiling.points import NUM_ESSENTIAL, RECOMPUTED, ProfilePoint, points
from hetero.profiling.profile_file import ProfileFile, model_name, profile_file_name
from hetero.profiling.profiled_plan import STAGE_OF, ProfiledModel
from hetero.profiling.repetitions import LEAST
from hetero.profiling.run_options import TPS
from hetero.runtime.layer_choice import LayerChoice, choose_layers
from hetero.runtime.options import StageOptions
from hetero.spec.devices import DeviceType
from hetero.spec.model_import import load_model, precision_of
from hetero.spec.profile import Arithmetic, LayerImplementation, LayerShape, LayerTime, Profile, Provenance

MOST_S = 3.0
"""Seconds that one point is repeated for at most: a heuristic, some hundred repetitions of a block on a GPU."""

_BUSY_S = 1.0
"""Between two looks at whether all has been measured."""

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
class _Combination:
    """A precision and whose layers, which have a profile of their own, at ``path`` and with ``head``."""

    path: Path
    head: Profile
    profiled: ProfiledModel
    options: StageOptions
    label: str


@dataclass(slots=True)
class _Expectations:
    """What points are expected to take, from those that were measured.

    repetition_s: by combination and sort of point, of one of relative cost 1.
    around_s: beside the repetitions: to build the layer, to warm up, to weigh its memory.
    """

    repetition_s: dict[tuple[int, str, str], float] = field(default_factory=dict)
    around_s: float = 0.0

    def learn(self, number: int, point: ProfilePoint, *, repetition_s: float, around_s: float) -> None:
        self.repetition_s[number, point.what, point.kind] = repetition_s / point.relative_cost
        # The first point loads libraries, too.
        self.around_s = min(self.around_s or around_s, around_s)

    def least_s(self, number: int, point: ProfilePoint) -> float:
        rate = self.repetition_s.get((number, point.what, point.kind), 0.0)
        return (1 + LEAST) * rate * point.relative_cost


def measure_device(
    args: argparse.Namespace,
    on: ProfiledDevice,
    *,
    date: str,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Path]:
    """Measure what the flags of ``hetero profile run`` ask for, and return the profiles.

    Args:
        date: of today.
        say: takes a line of progress.

    Raises:
        ConfigError: the flags do not go with the model or the device, a file is of something else, or no block fits
            in the memory.
    """
    deadline_s = clock() + args.budget_seconds
    combinations = list(_combinations(args, on, date=date))
    files = [ProfileFile(each.path, each.head) for each in combinations]
    wanted = _points(args, combinations[0].profiled)
    todo = [(number, point) for point in wanted for number, file in enumerate(files) if file.left([point])]
    total = len(wanted) * len(combinations)
    say(
        f"{on.type.name} ({on.hardware}): {len(todo)} of {total} points are to be measured, the most telling first, "
        f"in {args.budget_seconds:g} s"
    )
    expected, began_s = _Expectations(), clock()
    too_large: dict[tuple[int, str, str], float] = {}
    for done, (number, point) in enumerate(todo):
        combination, left_s = combinations[number], deadline_s - clock()
        is_essential = point in wanted[:NUM_ESSENTIAL]
        if left_s <= 0 and not is_essential:
            break
        series = number, point.what, point.kind
        begins_with_none = files[number].profile is None and point.what != "passes"
        fits = point.relative_cost < too_large.get(series, math.inf)
        in_time = is_essential or expected.least_s(number, point) <= left_s
        if begins_with_none or not fits or not in_time:
            continue
        even_s = left_s / (len(todo) - done) - expected.around_s
        longest_s, start_s = math.inf if is_essential else left_s, clock()
        share = Share(seconds=max(0.0, min(MOST_S, even_s)), longest_s=longest_s)
        try:
            found = measure_point(
                point, combination.profiled, options=combination.options, device=on.device, share=share
            )
        except torch.OutOfMemoryError as error:
            too_large[series] = point.relative_cost
            say(f"{combination.label}{point}: does not fit in the memory of the device, and is left out{_short(error)}")
            continue
        if found is None:
            continue
        repeated_s = max(share.seconds, LEAST * found.repetition_s)
        around_s = max(0.0, clock() - start_s - repeated_s)
        expected.learn(number, point, repetition_s=found.repetition_s, around_s=around_s)
        files[number].add(found.measured, found.memory)
        average_s = (clock() - began_s) / (done + 1)
        to_go_s = max(0.0, min(average_s * (len(todo) - done - 1), deadline_s - clock()))
        say(f"[{done + 1}/{len(todo)}] {combination.label}{point}: {found.said}; about {to_go_s:.0f} s to go")
    return _written(combinations, files, wanted, say)


def keep_busy(args: argparse.Namespace, on: ProfiledDevice, *, date: str, is_over: Callable[[], bool]) -> None:
    """Compute what others measure, until ``is_over``: devices that share power, memory or cores share them in training.

    Args:
        date: of today.
        is_over: is asked every second, about.

    Raises:
        ConfigError: the flags do not go with the model or the device.
    """
    combination = next(_combinations(args, on, date=date))
    point = _points(args, combination.profiled)[0]
    share = Share(seconds=_BUSY_S, longest_s=math.inf)
    while not is_over():
        try:
            measure_point(point, combination.profiled, options=combination.options, device=on.device, share=share)
        except torch.OutOfMemoryError:
            return


def _short(error: torch.OutOfMemoryError) -> str:
    """What torch says it asked for, and what was there: ``; Tried to allocate 2.00 GiB. GPU 0 has ... is free``."""
    found = re.search(r"Tried to allocate .*?(?:is free|$)", str(error), re.DOTALL)
    return "" if found is None else f"; {found[0].strip()}"


def _written(
    combinations: Sequence[_Combination],
    files: Sequence[ProfileFile],
    wanted: Sequence[ProfilePoint],
    say: Callable[[str], None],
) -> list[Path]:
    for each, file in zip(combinations, files, strict=True):
        if file.profile is None:
            raise ConfigError(
                f"{each.label}{wanted[0]}, and all that was tried beside it, does not fit in the memory of the device; "
                "give a smaller --micro-batch-size or --seq-length, or a larger --tp"
            )
        num_left = len(file.left(wanted))
        rest = f"; {num_left} are left, for which the same command goes on" if num_left else ""
        say(f"{each.path}: {len(wanted) - num_left} of {len(wanted)} points{rest}")
    flags = " ".join(f"--profile {each.path}" for each in combinations)
    say(f"hetero plan {flags} ...")
    return [each.path for each in combinations]


def _combinations(args: argparse.Namespace, on: ProfiledDevice, *, date: str) -> Iterator[_Combination]:
    """One for each precision and kind of layers."""
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
            yield _Combination(path=path, head=head, profiled=profiled, options=options, label=label)


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


def _points(args: argparse.Namespace, profiled: ProfiledModel) -> list[ProfilePoint]:
    """Those that the flags ask for.

    Raises:
        ConfigError: the model cannot be cut for a ``--tp``.
    """
    for tp in args.tp or ():
        profiled.plan(tp=tp, micro_batch_size=1)
    tps = args.tp or [tp for tp in TPS if profiled.can_have(tp=tp)]
    return points(tps, args.micro_batch_size, recomputes=[each for each in args.recompute if each in RECOMPUTED])
