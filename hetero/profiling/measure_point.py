"""Measures one point of a profile: warms up, and times and weighs the passes of a part of the model."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from hetero.profiling.figures import rounded
from hetero.profiling.laps import time_parts
from hetero.profiling.points import ProfilePoint
from hetero.profiling.profile_file import Measured
from hetero.profiling.repetitions import Repetitions
from hetero.profiling.stage_part import StagePart, allocated_bytes
from hetero.spec.profile import (
    LAYER_KINDS,
    AttentionKernel,
    LayerMemory,
    LayerTime,
    RecomputedTime,
    SplitBackwardTime,
    UpdateTime,
)


class Share(NamedTuple):
    """Time for one point.

    seconds: to repeat it for.
    longest_s: in which it is to be over, whatever it is.
    """

    seconds: float
    longest_s: float


class MeasuredPoint(NamedTuple):
    """Has what was measured of a point.

    repetition_s: what one repetition of all its passes took; there were ``repetitions``.
    said: a line that says it.
    memory: parameters and bytes of the layer, where they are known from it.
    bytes: of passes, what they save and the most that they allocate.
    attention: the kernel of attention that ran, where it is known.
    """

    measured: Measured
    repetition_s: float
    repetitions: int
    said: str
    memory: LayerMemory | None = None
    bytes: "PassBytes | None" = None
    attention: AttentionKernel | None = None


class PassBytes(NamedTuple):
    """What a forward and a backward hold: as in :class:`.LayerTime`, and the bytes of the forward's output."""

    saved: int
    peak: int
    output: int


def measure_point(
    point: ProfilePoint,
    part: StagePart,
    *,
    device: torch.device,
    share: Share,
    clock: Callable[[], float],
    known: PassBytes | None = None,
) -> MeasuredPoint | None:
    """Measure ``point`` on its ``part``; ``None`` where ``share`` is too short for it, as is known after its warm-up.

    Args:
        known: bytes of its passes, from when it was measured before.

    Raises:
        torch.OutOfMemoryError: it does not fit on the device.
    """

    def timed(*passes: Callable[[], None]) -> list[Repetitions] | None:
        return time_parts(passes, device=device, seconds=share.seconds, longest_s=share.longest_s, clock=clock)

    match point.what:
        case "update":
            return _update(point, timed(part.update))
        case "split":
            found = _split(point, timed(part.forward, part.backward, part.weight_gradients))
        case _:
            found = _passes(point, part, timed(part.forward, part.backward), device, known)
    return found if found is None else found._replace(attention=part.attention)


def _update(point: ProfilePoint, found: list[Repetitions] | None) -> MeasuredPoint | None:
    if found is None:
        return None
    assert point.kind == "embedding" or point.kind == "block" or point.kind == "head", "halves are updated with theirs"
    (update,) = found
    measured = UpdateTime(
        kind=point.kind,
        tp=point.tp,
        update_s=rounded(update.median_s),
        spread=rounded(update.spread),
        repetitions=update.count,
    )
    return MeasuredPoint(measured, update.median_s, update.count, _said(update=update))


def _split(point: ProfilePoint, found: list[Repetitions] | None) -> MeasuredPoint | None:
    if found is None:
        return None
    forward, inputs, weights = found
    measured = SplitBackwardTime(
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        input_gradients_s=rounded(inputs.median_s),
        weight_gradients_s=rounded(weights.median_s),
        input_gradients_spread=rounded(inputs.spread),
        weight_gradients_spread=rounded(weights.spread),
        repetitions=weights.count,
    )
    repetition_s = forward.median_s + inputs.median_s + weights.median_s
    said = _said(input_gradients=inputs, weight_gradients=weights)
    return MeasuredPoint(measured, repetition_s, weights.count, said)


def _passes(
    point: ProfilePoint,
    part: StagePart,
    found: list[Repetitions] | None,
    device: torch.device,
    known: PassBytes | None,
) -> MeasuredPoint | None:
    if found is None:
        return None
    num_bytes = known or _weigh(part, device)
    forward, backward = found
    said = f"{_said(forward=forward, backward=backward)}; saves {num_bytes.saved:,} bytes, peak {num_bytes.peak:,}"
    plain = LayerTime(
        kind=point.kind,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        forward_s=rounded(forward.median_s),
        backward_s=rounded(backward.median_s),
        forward_spread=rounded(forward.spread),
        backward_spread=rounded(backward.spread),
        repetitions=forward.count,
        saved_bytes=num_bytes.saved,
        peak_bytes=num_bytes.peak,
    )
    measured: Measured = plain
    if point.what == "selective" or point.what == "full":
        same = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain) if field.name != "kind"}
        measured = RecomputedTime(recompute=point.what, **same)
    return MeasuredPoint(
        measured,
        forward.median_s + backward.median_s,
        forward.count,
        said,
        memory=_layer_memory(point, part, num_bytes) if point.what == "passes" else None,
        bytes=num_bytes,
    )


def _weigh(part: StagePart, device: torch.device) -> PassBytes:
    saved = part.saved_bytes()
    output = part.output_bytes
    part.backward()

    def both() -> None:
        part.forward()
        part.backward()

    return PassBytes(saved=saved, peak=allocated_bytes(both, device).peak, output=output)


def _layer_memory(point: ProfilePoint, part: StagePart, num_bytes: PassBytes) -> LayerMemory | None:
    """Return the memory of a whole layer; profiles do not have that of halves."""
    for kind in LAYER_KINDS:
        if kind == point.kind:
            return LayerMemory(
                kind=kind,
                tp=point.tp,
                parameters=part.parameters,
                saved_bytes=num_bytes.saved // point.micro_batch_size,
                output_bytes=num_bytes.output // point.micro_batch_size,
            )
    return None


def _said(**found: Repetitions) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {each.median_s * 1e3:.4g} ms ({each.spread:z.1%} of {each.count})"
        for name, each in found.items()
    )
