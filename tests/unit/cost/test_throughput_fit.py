"""Fits of throughput: they find what times were made from, and say how far off they are where others measured."""

from statistics import mean

import pytest

from hetero.cost.layers.throughput_fit import Throughput, collective_s, fit
from hetero.cost.layers.work import layer_work
from hetero.data import shipped_profiles
from hetero.spec.cluster import GroupLink, Link
from hetero.spec.profile import LayerShape, LayerTime, Profile, ProfileStore
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.bench.bench_cost_model import estimate_errors
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import profile

A100 = SHIPPED_DEVICES.of("A100-40")

SHAPES = [LayerShape.of(gpt2_model(hidden_size=32 * n, ffn_hidden_size=64 * n)) for n in (8, 16, 64)]


def made_of(shape: LayerShape, *, flops_per_s: float, score_bytes_per_s: float, launch_s: float) -> Profile:
    """A profile whose forwards are exactly operations, scores and a launch."""
    times = []
    for tp in (1, 2):
        for size in (1, 2, 4, 8):
            work = layer_work("block", shape, tp=tp, micro_batch_size=size, seq_length=1024, element_bytes=4)
            seconds = work.operations / flops_per_s + work.score_bytes / score_bytes_per_s + launch_s
            times.append(
                LayerTime(kind="block", tp=tp, micro_batch_size=size, forward_s=seconds, backward_s=2 * seconds)
            )
    return profile(gpt2_model(), shape=shape, seq_length=1024, times=tuple(times), updates=())


@pytest.mark.parametrize("flops_per_s", [2e12, 10e12, 18e12])
def test_throughput_is_what_was_achieved_not_what_the_data_sheet_says(flops_per_s: float) -> None:
    """The device's peak is 19.5 Tflop/s; a third shape is predicted from two."""
    rates = {"flops_per_s": flops_per_s, "score_bytes_per_s": 1e11, "launch_s": 2e-4}
    fitted = fit([made_of(shape, **rates) for shape in SHAPES[:2]], A100, kind="block", compute_pass="forward")
    assert fitted is not None
    for time in made_of(SHAPES[2], **rates).times:
        work = layer_work(
            "block",
            SHAPES[2],
            tp=time.tp,
            micro_batch_size=time.micro_batch_size,
            seq_length=1024,
            element_bytes=4,
        )
        assert fitted.seconds(work, tp=time.tp) == pytest.approx(time.forward_s, rel=0.25)


def test_coefficients_are_never_negative() -> None:
    """Times that grow faster than the work fit best with a launch that takes less than nothing."""
    steep = tuple(
        LayerTime(kind="block", tp=1, micro_batch_size=size, forward_s=size**3 * 1e-3, backward_s=1.0)
        for size in (1, 2, 4, 8)
    )
    fitted = fit([profile(gpt2_model(), times=steep, updates=())], A100, kind="block", compute_pass="forward")
    assert fitted is not None
    assert min(fitted.per_operation, fitted.per_score_byte, fitted.per_row_byte, fitted.launch_s) >= 0


def test_what_isolation_adds_is_no_throughput() -> None:
    plain = profile(gpt2_model(), block_s=(1.0, 1.0))
    alone = profile(gpt2_model(), block_s=(1.0, 1.0), isolation_s=0.1)
    work = layer_work("block", plain.shape, tp=1, micro_batch_size=4, seq_length=16, element_bytes=4)
    seconds = [fit([each], A100, kind="block", compute_pass="forward") for each in (plain, alone)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert seconds[1].seconds(work, tp=1) < seconds[0].seconds(work, tp=1)


@pytest.mark.parametrize("launch_s", [0.0, 1.0])
def test_the_shares_of_the_halves_of_a_block_add_up_to_one(launch_s: float) -> None:
    rates = {"per_operation": 1e-9, "per_score_byte": 1e-6, "per_row_byte": 1e-6, "per_collective_s": 1.0}
    throughput = Throughput(
        **rates, launch_s=launch_s, all_reduce=(GroupLink(size=4, bus=Link(bandwidth_gb_per_s=1.0, latency_us=0)),)
    )
    attention, mlp, block = (
        layer_work(part, SHAPES[0], tp=4, micro_batch_size=1, seq_length=1024, element_bytes=4)
        for part in ("attention", "mlp", "block")
    )
    shares = [throughput.share(half, block, tp=4) for half in (attention, mlp)]
    assert sum(shares) == pytest.approx(1)
    assert 0 < shares[1] < shares[0], "the scores are the attention's"


def test_nothing_to_fit() -> None:
    blocks = tuple(time for time in profile(gpt2_model()).times if time.kind == "block")
    assert fit([profile(gpt2_model(), times=blocks)], A100, kind="head", compute_pass="forward") is None


def test_collectives_are_those_of_the_measured_machine() -> None:
    work = layer_work("block", SHAPES[0], tp=4, micro_batch_size=1, seq_length=1024, element_bytes=4)
    groups = [
        GroupLink(size=n, bus=Link(bandwidth_gb_per_s=bandwidth, latency_us=0)) for n, bandwidth in ((2, 2.0), (4, 1.0))
    ]
    assert collective_s(work, groups, tp=4) == pytest.approx(2 * 1.5 * work.all_reduce_bytes / 1e9)
    assert collective_s(work, groups, tp=8) == pytest.approx(2 * 1.75 * work.all_reduce_bytes / 1e9)
    assert collective_s(work, [], tp=4) == 0.0


def test_estimates_of_models_whose_profile_is_left_out() -> None:
    """The errors that docs/cost_model.md states, over all profiles whose device has another model's."""
    store = shipped_profiles()
    per_profile = []
    for left_out in store:
        others = ProfileStore(each for each in store if each.model != left_out.model)
        if left_out.device in others.devices():
            errors = estimate_errors(left_out, others, "block", data_sheets=False)
            per_profile.append(mean(abs(error) for error in errors))
    assert len(per_profile) == 10
    assert mean(per_profile) < 0.07
    assert max(per_profile) < 0.12
