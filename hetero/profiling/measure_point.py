"""Measures one point of a profile: builds the layer, warms up, and times and weighs its passes."""

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from hetero.profiling.figures import rounded
from hetero.profiling.laps import time_parts
from hetero.profiling.points import ProfilePoint
from hetero.profiling.profile_file import Measured
from hetero.profiling.profiled_plan import ProfiledModel
from hetero.profiling.repetitions import Repetitions
from hetero.profiling.stage_part import StagePart, one_rank, peak_bytes
from hetero.runtime.options import StageOptions
from hetero.spec.profile import LAYER_KINDS, LayerMemory, LayerTime, RecomputedTime, SplitBackwardTime, UpdateTime


class Share(NamedTuple):
    """Time for one point.

    seconds: to repeat it for.
    longest_s: in which it is to be over, whatever it is.
    """

    seconds: float
    longest_s: float


class MeasuredPoint(NamedTuple):
    """Has what was measured of a point.

    memory: parameters and bytes of the layer, where they are known from it.
    repetition_s: what one repetition of all its parts took.
    said: a line that says it.
    """

    measured: Measured
    memory: LayerMemory | None
    repetition_s: float
    said: str


def measure_point(
    point: ProfilePoint, profiled: ProfiledModel, *, options: StageOptions, device: torch.device, share: Share
) -> MeasuredPoint | None:
    """Measure ``point``; ``None`` where ``share`` is too short for it, as is known after its warm-up.

    Raises:
        ConfigError: the model cannot be cut so.
        torch.OutOfMemoryError: it does not fit on the device.
    """
    plan = profiled.plan(
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        recompute=point.what if point.what in ("selective", "full") else "none",
        splits_backward=point.what == "split",
    )
    _free(device)
    began_s = time.perf_counter()
    with one_rank(plan, point.kind, device) as context:
        part = StagePart(context, point.kind, options=options)

        def timed(*parts: Callable[[], None]) -> list[Repetitions] | None:
            left_s = share.longest_s - (time.perf_counter() - began_s)
            return time_parts(parts, device=device, seconds=share.seconds, longest_s=left_s)

        match point.what:
            case "update":
                return _update(point, timed(part.update))
            case "split":
                return _split(point, timed(part.forward, part.backward, part.weight_gradients))
            case _:
                return _passes(point, part, timed, device)


def _free(device: torch.device) -> None:
    """Let go of what the last point has left behind, cycles of modules among it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
    return MeasuredPoint(measured, None, update.median_s, _said(update=update))


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
    return MeasuredPoint(measured, None, repetition_s, _said(input_gradients=inputs, weight_gradients=weights))


def _passes(
    point: ProfilePoint, part: StagePart, timed: Callable[..., list[Repetitions] | None], device: torch.device
) -> MeasuredPoint | None:
    found = timed(part.forward, part.backward)
    if found is None:
        return None
    saved = part.saved_bytes()
    output = part.output_bytes
    part.backward()

    def both() -> None:
        part.forward()
        part.backward()

    peak = peak_bytes(both, device)
    forward, backward = found
    repetition_s = forward.median_s + backward.median_s
    said = f"{_said(forward=forward, backward=backward)}; saves {saved:,} bytes, peak {peak:,}"
    plain = LayerTime(
        kind=point.kind,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        forward_s=rounded(forward.median_s),
        backward_s=rounded(backward.median_s),
        forward_spread=rounded(forward.spread),
        backward_spread=rounded(backward.spread),
        repetitions=forward.count,
        saved_bytes=saved,
        peak_bytes=peak,
    )
    if point.what == "selective" or point.what == "full":
        same = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain) if field.name != "kind"}
        return MeasuredPoint(RecomputedTime(recompute=point.what, **same), None, repetition_s, said)
    memory = next(
        (
            LayerMemory(
                kind=kind,
                tp=point.tp,
                parameters=part.parameters,
                saved_bytes=saved // point.micro_batch_size,
                output_bytes=output // point.micro_batch_size,
            )
            for kind in LAYER_KINDS
            if kind == point.kind
        ),
        None,
    )
    return MeasuredPoint(plain, memory, repetition_s, said)


def _said(**found: Repetitions) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {each.median_s * 1e3:.4g} ms ({each.spread:z.1%} of {each.count})"
        for name, each in found.items()
    )
