"""What was measured of the devices' peaks, computed anew where the project holds the measurements; and the warnings."""

from collections.abc import Iterator

import pytest

from hetero.cost.layers.work import layer_work
from hetero.cost.measured_utilization import MEASURED_UTILIZATIONS, MeasuredUtilization, utilization_warnings
from hetero.cost.model_flops import PASSES_OF_A_STEP, Products, Utilization
from hetero.data import shipped_profiles
from hetero.spec.profile import Profile
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from hetero.units import BYTES_OF_PRECISION
from tests.helpers.published_runs import read_family
from tests.helpers.published_runs.opt350m import DEEPSPEED_GH200
from tests.helpers.sources import ROOT

ROWS = {f"{each.devices[0]} in {each.arithmetics[0]}": each for each in MEASURED_UTILIZATIONS}


def block_utilizations(profile: Profile) -> Iterator[float]:
    """Of every measured block of a profile, collectives of tensor parallelism included."""
    sheet = SHIPPED_DEVICES.of(profile.device).data_sheet
    assert sheet is not None
    for time in profile.times:
        if time.kind == "block":
            work = layer_work(
                "block",
                profile.shape,
                tp=time.tp,
                micro_batch_size=time.micro_batch_size,
                seq_length=profile.seq_length,
                element_bytes=BYTES_OF_PRECISION[profile.precision],
            )
            seconds = time.forward_s + time.backward_s - 2 * profile.isolation_s
            yield PASSES_OF_A_STEP * work.operations / seconds / sheet.flops_per_s(profile.arithmetic)


@pytest.mark.parametrize("row", [each for each in MEASURED_UTILIZATIONS if "profile" in each.source], ids=str)
def test_what_layers_reach_is_what_the_shipped_profiles_say(row: MeasuredUtilization) -> None:
    found = [
        utilization
        for profile in shipped_profiles()
        if profile.device in row.devices and profile.arithmetic in row.arithmetics
        for utilization in block_utilizations(profile)
    ]
    assert row.computing == pytest.approx((min(found), max(found)), abs=0.03)
    assert row.computing[0] <= min(found)
    assert row.computing[1] >= max(found)


@pytest.mark.parametrize(
    ("name", "step_s", "gpus", "shape", "peak_tflops", "bubble"),
    [
        # arXiv 2205.05198 table 5: 1T on 512 A100 with 64 stages, the densest, selective recomputation.
        ("A100-40 in fp16", 71.49, 512, (512, 2048, 128, 25600, 51200), 312, 63 / 512),
        # The same, 22B on 8 with full recomputation, the least dense.
        ("A100-40 in fp16", 1.42, 8, (4, 2048, 48, 6144, 51200), 312, 0.0),
        # DLPerf's report of Megatron-LM, full recomputation: the densest of its runs, and tp 8 on two nodes, the least.
        ("V100-16 in fp16", 0.46412, 1, (2, 2048, 16, 1536, 51200), 125, 0.0),
        ("V100-16 in fp16", 1.31352, 16, (16, 2048, 24, 2304, 51200), 125, 0.0),
    ],
)  # fmt: skip
def test_published_runs_are_within(
    name: str, step_s: float, gpus: int, shape: tuple[int, ...], peak_tflops: float, bubble: float
) -> None:
    """Steps from the papers' tables, batch, sequence, layers, hidden size and vocabulary beside them."""
    b, s, layers, h, v = shape
    mfu = 72 * b * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h)) / (step_s * gpus * peak_tflops * 1e12)
    row = ROWS[name]
    full = bubble == 0
    low, high = row.computing
    assert low <= mfu * (4 / 3 if full else 1) * (1 + bubble) <= high
    assert row.most_mfu is not None
    assert mfu <= row.most_mfu


def test_runs_of_opt_350m_are_within() -> None:
    """What 15 measured steps on GH200 were of the peak."""
    row = ROWS["GH200 in tf32"]
    assert row.most_mfu is not None
    s, layers, h, v = 2048, 24, 1024, 50304
    for run in read_family(DEEPSPEED_GH200):
        flops = 72 * run.plan.global_batch_size * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
        assert flops / (run.step_s * run.plan.world_size * 494e12) <= row.most_mfu


def said(device: str, arithmetic: str, *, mfu: float, computing: tuple[float, float]) -> list[str]:
    found = Utilization(mfu=mfu, computing=computing, num_devices=8, peak_flops_per_s=1e14)
    return list(utilization_warnings({Products(device, arithmetic): found}))


def test_what_others_have_measured_is_not_told() -> None:
    assert said("A100-80", "bf16", mfu=0.5, computing=(0.5, 0.6)) == []
    assert said("A100-80", "bf16", mfu=0.1, computing=(0.5, 0.6)) == [], "a long bubble"


@pytest.mark.parametrize(
    ("mfu", "computing", "message"),
    [
        (0.5, (0.5, 0.9), "A100-80 in bf16 computes at 90% of its peak, above the 43% to 65% which was measured there"),
        (0.2, (0.2, 0.5), "A100-80 in bf16 computes at 20% of its peak, below the 43% to 65% which was measured there"),
        (0.64, (0.64, 0.65), "A100-80 in bf16 has an MFU of 64%, above the 62% which was measured there"),
    ],
)  # fmt: skip
def test_what_nobody_has_measured_is_told_once(mfu: float, computing: tuple[float, float], message: str) -> None:
    (line,) = said("A100-80", "bf16", mfu=mfu, computing=computing)
    assert line.startswith(message)
    assert line.endswith("): check the profile, or measure one")


def test_where_nothing_was_measured_nothing_is_told() -> None:
    assert said("L40S", "bf16", mfu=0.99, computing=(0.99, 0.99)) == []
    assert said("H20", "bf16", mfu=0.9, computing=(0.9, 0.9)) == [], "another chip than H100, if of its generation"


def test_the_page_has_the_same_figures() -> None:
    page = (ROOT / "docs/cost_model.md").read_text(encoding="utf-8")
    for row in MEASURED_UTILIZATIONS:
        low, high = (round(100 * share) for share in row.computing)
        most = f"{100 * row.most_mfu:.0f} %" if row.most_mfu is not None else ""
        assert f"| {low} to {high} % | {most} |".replace("  ", " ") in page


def test_every_row_is_of_shipped_devices_with_a_source() -> None:
    for row in MEASURED_UTILIZATIONS:
        assert row.source
        for device in row.devices:
            for arithmetic in row.arithmetics:
                sheet = SHIPPED_DEVICES.of(device).data_sheet
                assert sheet is not None
                assert sheet.flops_per_s(arithmetic) > 0
        assert 0 < row.computing[0] < row.computing[1] < 1
        assert row.most_mfu is None or row.most_mfu <= row.computing[1]
