"""Seconds of single kernels on a device: matrix products, attention, and whatever is bound by memory.

A device reaches a share of its data sheet's peak figures. The shares are measured where somebody published them
(:data:`MEASURED_RATES`) and otherwise those of the generation (:data:`GENERATION_RATES`).

A matrix product of m x n outputs over k is computed in tiles, each by one multiprocessor, in waves of as many tiles as
there are multiprocessors (NVIDIA, "Matrix multiplication background user's guide", on tile and wave quantization):

    waves = ceil(batch  ceil(m / tile_m)  ceil(n / tile_n) / multiprocessors)
    seconds = max( waves  2 tile_m tile_n (k + PROLOGUE)  multiprocessors / (share  peak),  bytes / bandwidth )

with the tile that takes least; a small tile reuses less of what it reads and reaches less of the peak. That is for
tensor cores. Products in fp32 or fp64 without them have small tiles, many on each multiprocessor at a time, and take

    seconds = max( 2 batch m n k / (SIMT_SHARE  peak),  bytes / bandwidth )
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetero.spec.devices import DataSheet, DeviceType
from hetero.units import GB

SUSTAINED = 0.9
"""A training step's share of the best product that was ever measured on the device: matrices are not of the best shape,
and a device that multiplies without pause runs into its power limit. Calibrated on the A100 tables of arXiv 2104.04473
and 2205.05198."""

MEMORY_SHARE = 0.75
"""Share of the data sheet's bandwidth at which the kernels between the products move their bytes. Calibrated like
:data:`SUSTAINED`."""

PROLOGUE = 128
"""How much longer in k a tile takes than its operations: loading the first operands, storing the result. A heuristic;
it decides what products with a short k, as attention has, reach."""

TILES: Mapping[tuple[int, int], float] = {(128, 256): 1.0, (128, 128): 0.95, (64, 128): 0.75, (64, 64): 0.55}
"""Tiles of cuBLAS by their share of the largest one's rate. A heuristic after the same guide."""

SIMT_SHARE = 0.95
"""Share of the fp32 and fp64 peak of products that no tensor core computes. A heuristic; the shipped profiles of V100
are fitted at 1.08 times the seconds that it gives, in a running step."""

HOPPER = 9
"""Major number of the compute capability."""

TENSOR_ARITHMETICS = ("tf32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class AchievedRates:
    """Shares of the peak of its tensor cores that a device reaches.

    products: of bf16 or fp16 products, the best measured.
    flash_forward, flash_backward: of attention without scores, counting the half that a causal mask leaves. Heuristics:
        on A100 within what arXiv 2307.08691 reports (50 to 73 % of the peak), on Hopper between FlashAttention-2 (37 %)
        and cuDNN (61 %) as arXiv 2407.08608 has them forward and without a mask; backwards an eighth to a fifth less.
    source: who measured the products, empty if they are what similar devices reach.
    """

    products: float
    flash_forward: float
    flash_backward: float
    source: str = ""


_MAMF = "Stas Bekman, ML engineering, maximum achievable matmul FLOPS (2025)"

MEASURED_RATES: Mapping[str, AchievedRates] = {
    "A100-40": AchievedRates(0.869, 0.60, 0.52, _MAMF),
    "A100-80": AchievedRates(0.869, 0.60, 0.52, _MAMF),
    "A800": AchievedRates(0.869, 0.60, 0.52, _MAMF),
    "H100": AchievedRates(0.803, 0.55, 0.45, _MAMF),
    "H200": AchievedRates(0.803, 0.55, 0.45, _MAMF),
    "GH200": AchievedRates(0.838, 0.55, 0.45, _MAMF),
    "B200": AchievedRates(0.776, 0.50, 0.40, _MAMF),
    "MI300X": AchievedRates(0.514, 0.25, 0.20, _MAMF),
}
"""By device type. A800 and H200 compute what A100 and H100 do; the GH200 that was measured had 141 GB."""

GENERATION_RATES: Mapping[int, AchievedRates] = {
    7: AchievedRates(0.78, 0.30, 0.25),
    8: AchievedRates(0.85, 0.55, 0.48),
    9: AchievedRates(0.80, 0.55, 0.45),
    10: AchievedRates(0.77, 0.50, 0.40),
}
"""By the major number of the compute capability, where nobody published the device's own: a heuristic. FlashAttention-2
needs Ampere; before it torch's memory-efficient kernels attend without scores."""

OTHER_RATES = AchievedRates(0.6, 0.30, 0.25)
"""Of devices without CUDA that nobody measured: a heuristic."""

TF32_ACROSS = 0.65
"""Of their rate, what TF32 products reach on Hopper that are not of rows by rows: its matrix units take TF32 operands
in that layout only (PTX ISA, wgmma), so that all products of a backward have to copy them or take older instructions.
About what the profiles of GH200 show."""

MEMORY_EFFICIENT = {True: (0.25, 0.20), False: (0.5, 0.4)}
"""Shares of the peak, forward and backward, of torch's memory-efficient attention, on tensor cores and without: what
there is without scores beside bf16 and fp16. A heuristic."""


def achieved_rates(device: DeviceType) -> AchievedRates:
    """What ``device`` reaches of its peak."""
    if device.name in MEASURED_RATES:
        return MEASURED_RATES[device.name]
    if device.compute_capability is None:
        return OTHER_RATES
    return GENERATION_RATES.get(device.compute_capability[0], GENERATION_RATES[max(GENERATION_RATES)])


class Kernels:
    """Seconds of kernels on one device in one arithmetic.

    Args:
        sheet: the peak figures; ``device`` may lack them (the host CPU).
        arithmetic: of the products: fp64, fp32, tf32, bf16 or fp16.

    Attributes:
        is_host: the device is the host itself, which launches nothing.
    """

    def __init__(self, device: DeviceType, sheet: DataSheet, *, arithmetic: str) -> None:
        rates = achieved_rates(device)
        self.is_host = device.is_host
        peak = sheet.flops_per_s(arithmetic)
        # Where TF32 falls back to fp32 there is no tensor core for it.
        on_tensor_cores = arithmetic in TENSOR_ARITHMETICS and peak > sheet.flops_per_s("fp32")
        self._products_per_s = peak * (SUSTAINED * rates.products if on_tensor_cores else SIMT_SHARE)
        flash = rates.flash_forward, rates.flash_backward
        if arithmetic not in ("bf16", "fp16"):
            flash = MEMORY_EFFICIENT[on_tensor_cores]
        self._flash_forward_per_s, self._flash_backward_per_s = (peak * share for share in flash)
        self._bytes_per_s = sheet.memory_gb_per_s * GB * MEMORY_SHARE
        self._multiprocessors = sheet.multiprocessors
        self._on_tensor_cores = on_tensor_cores
        is_hopper = device.compute_capability is not None and device.compute_capability[0] == HOPPER
        self._across = TF32_ACROSS if is_hopper and arithmetic == "tf32" else 1.0

    def product_s(
        self,
        m: int,
        n: int,
        k: int,
        *,
        element_bytes: int,
        batch: float = 1,
        across: bool = False,
        result_bytes: float | None = None,
    ) -> float:
        """Seconds of ``batch`` products of m x k and k x n matrices.

        Args:
            across: not rows by rows, as x W^T of a linear layer is and none of the products of its backward.
            result_bytes: that the product moves per element of its result; ``element_bytes`` where it only writes it.
        """
        products_per_s = self._products_per_s * (self._across if across else 1.0)
        written = element_bytes if result_bytes is None else result_bytes
        moved_s = self.moved_s(batch * ((m * k + k * n) * element_bytes + m * n * written))
        if not self._on_tensor_cores:
            return max(moved_s, 2 * batch * m * n * k / products_per_s)
        if self._multiprocessors is None:
            return max(moved_s, 2 * batch * m * n * (k + PROLOGUE) / products_per_s)
        least_s = math.inf
        for (tile_m, tile_n), share in TILES.items():
            tiles = batch * math.ceil(m / tile_m) * math.ceil(n / tile_n)
            waves = math.ceil(tiles / self._multiprocessors)
            operations = waves * self._multiprocessors * 2 * tile_m * tile_n * (k + PROLOGUE)
            least_s = min(least_s, operations / (share * products_per_s))
        return max(moved_s, least_s)

    def flash_s(self, operations: float, *, backward: bool) -> float:
        """Seconds of ``operations`` of attention that never writes its scores to memory."""
        return operations / (self._flash_backward_per_s if backward else self._flash_forward_per_s)

    def moved_s(self, num_bytes: float) -> float:
        """Seconds to read or write ``num_bytes`` of the device's memory between products."""
        return num_bytes / self._bytes_per_s
