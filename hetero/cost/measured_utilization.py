"""What training runs and measured layers have made of their devices' peaks, to see what a prediction may not claim.

Hardware utilization while devices compute, with the collectives of tensor parallelism, and MFU of whole steps
(:mod:`.model_flops` says what is counted). Where a run's pipeline has a bubble of (p - 1) / m of what it computes
(interleaved v times: (p - 1) / v m), its computing is that much denser; with full recomputation it is 4/3 of its MFU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetero.cost.model_flops import Products, Utilization


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredUtilization:
    """What was measured on a generation of devices in some number formats.

    computing: least and most hardware utilization while they compute.
    most_mfu: the highest of whole steps; ``None`` where only layers were measured.
    """

    devices: tuple[str, ...]
    arithmetics: tuple[str, ...]
    computing: tuple[float, float]
    most_mfu: float | None
    source: str


MEASURED_UTILIZATIONS = (
    MeasuredUtilization(
        devices=("V100-16", "V100-32"),
        arithmetics=("fp16",),
        computing=(0.18, 0.36),
        most_mfu=0.27,
        source="7 runs of Megatron-LM, full recomputation (Oneflow-Inc/DLPerf)",
    ),
    MeasuredUtilization(
        devices=("V100-16", "V100-32"),
        arithmetics=("fp32",),
        computing=(0.30, 0.82),
        most_mfu=None,
        source="shipped profiles of three models",
    ),
    MeasuredUtilization(
        devices=("A100-40", "A100-80", "A800"),
        arithmetics=("fp16", "bf16"),
        computing=(0.43, 0.65),
        most_mfu=0.62,
        source="arXiv 2104.04473 table 1, arXiv 2205.05198 table 5, Llama-3-8B with 8192 tokens by FlagOpen/FlagPerf",
    ),
    MeasuredUtilization(
        devices=("A100-40", "A100-80", "A800"),
        arithmetics=("tf32",),
        computing=(0.08, 0.47),
        most_mfu=None,
        source="shipped profiles of two models",
    ),
    MeasuredUtilization(
        devices=("A100-40", "A100-80", "A800"),
        arithmetics=("fp32",),
        computing=(0.87, 0.93),
        most_mfu=None,
        source="shipped profile of OPT-30B",
    ),
    MeasuredUtilization(
        devices=("H100", "H800", "H200", "GH200"),
        arithmetics=("bf16",),
        computing=(0.38, 0.65),
        most_mfu=0.48,
        source=(
            "MFU of 38 to 43 % of Llama 3 405B (arXiv 2407.21783 table 4) and 41 to 48 % of models from 2B to 462B "
            "(Megatron-LM's README); that none computes denser than A100s do is a heuristic"
        ),
    ),
    MeasuredUtilization(
        devices=("GH200",),
        arithmetics=("tf32",),
        computing=(0.03, 0.30),
        most_mfu=0.10,
        source="shipped profiles of two models, and 15 runs of OPT-350M (Sailor)",
    ),
    MeasuredUtilization(
        devices=("RTX-2080Ti", "Titan-RTX"),
        arithmetics=("fp32",),
        computing=(0.10, 0.53),
        most_mfu=0.20,
        source="shipped profiles of OPT-350M, and 5 runs of it (Sailor)",
    ),
    MeasuredUtilization(
        devices=("RTX-3090",),
        arithmetics=("tf32",),
        computing=(0.01, 0.37),
        most_mfu=None,
        source="shipped profile of OPT-350M",
    ),
)
"""By generation and format, rounded outwards; ``tests/unit/cost/test_measured_utilization.py`` computes what it can of
them."""


def utilization_warnings(found: Mapping[Products, Utilization]) -> Iterator[str]:
    """A line on each device type whose utilization is outside what was ever measured on its generation.

    A step below all that was measured is not told: bubbles and links make steps as slow as they like, and the table of
    the stages shows both.
    """
    for products, each in found.items():
        measured = _measured(products)
        if measured is None:
            continue
        least, most = measured.computing
        slowest, fastest = each.computing
        where = f"{products.device} in {products.arithmetic}"
        beyond = f"which was measured there ({measured.source}): check the profile, or measure one"
        if fastest > most:
            yield f"{where} computes at {fastest:z.0%} of its peak, above the {least:z.0%} to {most:z.0%} {beyond}"
        if slowest < least:
            yield f"{where} computes at {slowest:z.0%} of its peak, below the {least:z.0%} to {most:z.0%} {beyond}"
        if measured.most_mfu is not None and each.mfu > measured.most_mfu and fastest <= most:
            yield f"{where} has an MFU of {each.mfu:z.0%}, above the {measured.most_mfu:z.0%} {beyond}"


def _measured(products: Products) -> MeasuredUtilization | None:
    return next(
        (
            measured
            for measured in MEASURED_UTILIZATIONS
            if products.device in measured.devices and products.arithmetic in measured.arithmetics
        ),
        None,
    )
