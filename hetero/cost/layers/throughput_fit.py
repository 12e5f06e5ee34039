"""Fits the throughput of a device to the layers that were measured on it, to estimate those that were not.

A layer's seconds are modelled as

    t = a operations + b score bytes + c row bytes + d collective seconds + k

with coefficients that are fitted, per device, kind of layer and pass, to all measured times of that device:
achieved throughput, never a peak. Profiles of one model cannot tell a from b and c, since all three grow alike; the
fit therefore leans towards the split that data sheets suggest. Their scale is measured: the coefficients are multiples
of a prior, and scaling the prior of those three has no influence.

    minimise  mean((t_fit / t_measured - 1)^2) + LEANING sum_i (x_i / x - 1)^2      x_i >= 0

where x_i multiplies coefficient i of the prior, and x is the single multiple of the first three that fits best.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetero.cost.layers.work import Work, layer_work
from hetero.spec.cluster import GroupLink
from hetero.spec.devices import DataSheet, DeviceType
from hetero.spec.profile import LayerKind, LayerTime, Profile
from hetero.units import BYTES_OF_PRECISION, GB

ComputePass = Literal["forward", "backward"]

LEANING = 0.01
"""Weight of the prior against the measurements. A heuristic; errors hardly change between 0.001 and 0.1."""

TYPICAL_EFFICIENCY = 0.6
"""Share of the peak that large matrix products reach, about."""

SCORE_PASSES: dict[ComputePass, float] = {"forward": 10.0, "backward": 30.0}
"""Times that unfused attention moves each score through memory: product, scale, mask, softmax, dropout, product."""

ROW_PASSES: dict[ComputePass, float] = {"forward": 3.0, "backward": 6.0}

LAUNCH_S = 3e-4
"""Seconds to launch the kernels of a layer, which small layers cannot hide."""

NOMINAL_HOST = DataSheet(
    memory_gb_per_s=10.0,
    fp64_tflops=0.05,
    fp32_tflops=0.1,
    bf16_tflops=0.1,
    fp16_tflops=0.1,
    source="ten fp32 operations per byte",
)
"""Stands in for the host CPU, which has no data sheet. The fit scales both figures, so that only their ratio counts."""

SCALED = 3
"""The first coefficients of the prior: those that a data sheet gives, up to one common scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Fitted coefficients of one device, kind of layer and pass: seconds per unit of each part of the work."""

    per_operation: float
    per_score_byte: float
    per_row_byte: float
    per_collective_s: float
    launch_s: float
    all_reduce: tuple[GroupLink, ...]

    def seconds(self, work: Work, *, tp: int) -> float:
        """Seconds of ``work``."""
        return float(
            self.per_operation * work.operations
            + self.per_score_byte * work.score_bytes
            + self.per_row_byte * work.row_bytes
            + self.per_collective_s * collective_s(work, self.all_reduce, tp=tp)
            + self.launch_s
        )

    def share(self, half: Work, block: Work, *, tp: int) -> float:
        """How much of a block's seconds one of its halves takes; each has half of the launches. The two add up to 1."""
        whole_s = self.seconds(block, tp=tp)
        return (self.seconds(half, tp=tp) - self.launch_s / 2) / whole_s if whole_s > 0 else 1 / 2

    def core_attention_s(self, work: Work) -> float:
        """Seconds of the part that selective recomputation repeats: from queries and keys to the context."""
        return self.per_operation * work.attention_operations + self.per_score_byte * work.score_bytes

    def linear_s(self, work: Work) -> float:
        """Seconds of the products with weights, attention's own without."""
        return self.per_operation * (work.operations - work.attention_operations)

    def weight_gradients_s(self, work: Work) -> float:
        """Seconds, in a backward, of one of the two products of each linear layer: output gradient times input.

        The other one yields the input's gradient. Both have as many operations as the layer's forward; attention has
        no weights.
        """
        return self.linear_s(work) / 2

    def on(self, here: DataSheet, there: DataSheet, *, arithmetic: str, other_arithmetic: str) -> "Throughput":
        """The same fractions of another device's peak figures, or of another arithmetic's on the same device."""
        compute = here.flops_per_s(arithmetic) / there.flops_per_s(other_arithmetic)
        memory = here.memory_gb_per_s / there.memory_gb_per_s
        return Throughput(
            per_operation=self.per_operation * compute,
            per_score_byte=self.per_score_byte * memory,
            per_row_byte=self.per_row_byte * memory,
            per_collective_s=self.per_collective_s,
            launch_s=self.launch_s,
            all_reduce=self.all_reduce,
        )


def collective_s(work: Work, all_reduce: Sequence[GroupLink], *, tp: int) -> float:
    """Seconds of the collectives of ``work`` on the machine that ``all_reduce`` describes; 0 where nothing is known."""
    if not work.num_all_reduces or not all_reduce:
        return 0.0
    nearest = next((group for group in all_reduce if group.size >= tp), all_reduce[-1])
    crossing = 2 * (tp - 1) / tp * work.all_reduce_bytes
    return work.num_all_reduces * crossing / nearest.bus.bytes_per_s(work.all_reduce_bytes)


def fit(
    profiles: Sequence[Profile], device: DeviceType, *, kind: LayerKind, compute_pass: ComputePass
) -> Throughput | None:
    """Coefficients for ``device``, that of ``profiles``, which share precision and arithmetic.

    Returns:
        ``None`` if no profile has a time of this kind and pass.
    """
    rows: list[list[float]] = []
    measured: list[float] = []
    for profile in profiles:
        if kind == "head" and not profile.head_has_projection:
            continue
        for time in profile.times:
            seconds = (time.forward_s if compute_pass == "forward" else time.backward_s) - profile.isolation_s
            if time.kind == kind and seconds > 0:
                rows.append(_features(profile, time))
                measured.append(seconds)
    if not rows:
        return None
    prior = _prior(device, arithmetic=profiles[0].arithmetic, compute_pass=compute_pass)
    fitted = _fit_near_prior(np.array(rows), np.array(measured), prior)
    return Throughput(
        per_operation=float(fitted[0]),
        per_score_byte=float(fitted[1]),
        per_row_byte=float(fitted[2]),
        per_collective_s=float(fitted[3]),
        launch_s=float(fitted[4]),
        all_reduce=profiles[0].all_reduce,
    )


def _features(profile: Profile, time: LayerTime) -> list[float]:
    work = layer_work(
        time.kind,
        profile.shape,
        tp=time.tp,
        micro_batch_size=time.micro_batch_size,
        seq_length=profile.seq_length,
        element_bytes=BYTES_OF_PRECISION[profile.precision],
    )
    waits = collective_s(work, profile.all_reduce, tp=time.tp)
    return [work.operations, work.score_bytes, work.row_bytes, waits, 1.0]


def _prior(device: DeviceType, *, arithmetic: str, compute_pass: ComputePass) -> NDArray[np.float64]:
    sheet = device.data_sheet or NOMINAL_HOST
    bytes_per_s = sheet.memory_gb_per_s * GB
    operations = 1.0 if compute_pass == "forward" else 2.0
    return np.array(
        [
            operations / (TYPICAL_EFFICIENCY * sheet.flops_per_s(arithmetic)),
            SCORE_PASSES[compute_pass] / bytes_per_s,
            ROW_PASSES[compute_pass] / bytes_per_s,
            1.0,
            LAUNCH_S,
        ]
    )


def _fit_near_prior(
    features: NDArray[np.float64], measured: NDArray[np.float64], prior: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The coefficients that minimise the sum at the head of this file."""
    parts = features * prior / measured[:, None]
    scalable = parts[:, :SCALED].sum(axis=1)
    scale = float(scalable.sum() / (scalable @ scalable)) if scalable.any() else 1.0
    target = np.array([scale] * SCALED + [1.0] * (len(prior) - SCALED))
    weighted = np.vstack([parts / np.sqrt(len(measured)), np.sqrt(LEANING) * np.diag(1 / target)])
    wanted = np.concatenate([np.full(len(measured), 1 / np.sqrt(len(measured))), np.full(len(prior), np.sqrt(LEANING))])
    return _least_squares(weighted, wanted) * prior


def _least_squares(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 that minimises |matrix x - wanted|: the best over all sets of columns that are not held at 0."""
    columns = matrix.shape[1]
    best = np.zeros(columns)
    least = float("inf")
    for size in range(1, columns + 1):
        for chosen in map(list, itertools.combinations(range(columns), size)):
            solution = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            error = float(np.sum((matrix[:, chosen] @ solution - wanted) ** 2))
            if (solution >= 0).all() and error < least - 1e-12:
                best = np.zeros(columns)
                best[chosen] = solution
                least = error
    return best
