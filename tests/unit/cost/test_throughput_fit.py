"""Fits of throughput: they find what times were made from, and say how far off they are where others measured."""

import dataclasses
import math
from statistics import mean
from typing import Any

import pytest

from hetero.cost.layers.kernels import Kernels
from hetero.cost.layers.launches import counted_launches_s, num_launches
from hetero.cost.layers.layer_kernels import ComputePass, LayerConfig, kernel_seconds
from hetero.cost.layers.throughput_fit import (
    GENERATOR_S,
    MOST_HOST_S,
    NOMINAL_HOST,
    Throughput,
    fit,
    in_a_step_s,
    launches_s,
    measured_config,
    more_host_s,
    nominal,
)
from hetero.data import shipped_profiles
from hetero.spec.devices import DeviceType
from hetero.spec.link import GroupLink, Link
from hetero.spec.model import ModelSpec
from hetero.spec.profile import (
    AttentionKernel,
    LayerImplementation,
    LayerKind,
    LayerShape,
    LayerTime,
    Profile,
    ProfileStore,
)
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.bench.bench_cost_model import estimate_errors
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.synthetic_profiles import profile

A100 = SHIPPED_DEVICES.of("A100-40")
SHAPES = [LayerShape.of(gpt2_model(hidden_size=32 * n, ffn_hidden_size=64 * n)) for n in (8, 32, 64)]
LINKS = (GroupLink(size=4, bus=Link(bandwidth_gb_per_s=50.0, latency_us=0)),)
UNFUSED = LayerImplementation()


def a100() -> Kernels:
    assert A100.data_sheet is not None
    return Kernels(A100, A100.data_sheet, arithmetic="fp32")


KERNELS = a100()

BOTH = (llama_model(), moe_model())
"""A dense model, and one that has experts in its place."""


def made_of(
    shape: LayerShape, *, linear: float, attention: float, rows: float, collectives: float = 1.0, **changes: Any
) -> Profile:
    """A profile whose passes are exactly so many times their kernels' seconds."""
    empty = profile(
        gpt2_model(),
        **{
            "shape": shape,
            "seq_length": 1024,
            "updates": (),
            "implementation": UNFUSED,
            "all_reduce": LINKS,
            **changes,
        },
    )

    def seconds(tp: int, size: int, compute_pass: ComputePass) -> float:
        parts = kernel_seconds(KERNELS, measured_config(empty, "block", tp=tp, micro_batch_size=size), compute_pass)
        return (
            linear * parts.linear_s
            + attention * parts.attention_s
            + rows * parts.rows_s
            + collectives * parts.collectives_s
        )

    return dataclasses.replace(
        empty,
        times=tuple(
            LayerTime(
                kind="block",
                tp=tp,
                micro_batch_size=size,
                forward_s=seconds(tp, size, "forward"),
                backward_s=seconds(tp, size, "backward"),
            )
            for tp in (1, 2, 4)
            for size in (1, 2, 4, 8)
        ),
    )


def fitted_to(*profiles: Profile, compute_pass: ComputePass = "forward") -> Throughput:
    found = fit(profiles, KERNELS, kind="block", compute_pass=compute_pass)
    assert found is not None
    return found


def config(shape: LayerShape = SHAPES[1], **changes: Any) -> LayerConfig:
    return LayerConfig(
        **{
            "kind": "block",
            "shape": shape,
            "seq_length": 1024,
            "element_bytes": 4,
            "implementation": UNFUSED,
            "tp": 1,
            "micro_batch_size": 2,
            **changes,
        }
    )


class TestFit:
    @pytest.mark.parametrize("compute_pass", ["forward", "backward"])
    @pytest.mark.parametrize("multiple", [0.5, 1.0, 3.0])
    def test_a_device_that_does_everything_so_many_times_worse(
        self, multiple: float, compute_pass: ComputePass
    ) -> None:
        """One shape is enough: the fit leans towards equal multiples, and with nothing known of links towards once."""
        times = made_of(SHAPES[2], linear=multiple, attention=multiple, rows=multiple, all_reduce=())
        found = fitted_to(times, compute_pass=compute_pass)
        multiples = (found.linear, found.attention, found.rows)
        assert multiples == pytest.approx((multiple,) * 3, rel=1e-3)
        assert found.collectives == pytest.approx(1.0, rel=1e-3)

    @pytest.mark.parametrize(
        "multiples",
        [
            {"linear": 2.0, "attention": 1.0, "rows": 1.0},
            {"linear": 1.0, "attention": 2.0, "rows": 1.0},
            {"linear": 1.0, "attention": 1.0, "rows": 1.0, "collectives": 2.0},
        ],
        ids=["products", "attention", "collectives"],
    )
    def test_a_third_shape_is_predicted_from_two(self, multiples: dict[str, float]) -> None:
        found = fitted_to(*(made_of(shape, **multiples) for shape in SHAPES[::2]))
        third = made_of(SHAPES[1], **multiples)
        for time in third.times:
            layer = measured_config(third, "block", tp=time.tp, micro_batch_size=time.micro_batch_size)
            assert found.device_s(layer) == pytest.approx(time.forward_s, rel=0.15)

    def test_multiples_are_never_negative(self) -> None:
        """Times that grow faster than any work does."""
        steep = tuple(
            LayerTime(kind="block", tp=1, micro_batch_size=size, forward_s=size**3 * 1e-3, backward_s=1.0)
            for size in (1, 2, 4, 8)
        )
        found = fitted_to(profile(gpt2_model(), times=steep, updates=()))
        assert min(found.linear, found.attention, found.rows, found.collectives) >= 0

    def test_what_isolation_adds_is_no_throughput(self) -> None:
        plain = made_of(SHAPES[2], linear=1.0, attention=1.0, rows=1.0)
        alone_s = 0.25 * min(time.forward_s for time in plain.times)
        times = tuple(dataclasses.replace(time, forward_s=time.forward_s + alone_s) for time in plain.times)
        found = fitted_to(dataclasses.replace(plain, times=times, isolation_s=alone_s))
        assert found.device_s(config()) == pytest.approx(fitted_to(plain).device_s(config()))

    def test_kernels_in_a_step_take_so_many_times_as_long(self) -> None:
        plain = made_of(SHAPES[2], linear=1.0, attention=1.0, rows=1.0, all_reduce=())
        found = fitted_to(dataclasses.replace(plain, in_a_step=1.5))
        assert found.device_s(config()) == pytest.approx(1.5 * fitted_to(plain).device_s(config()))

    def test_nothing_to_fit(self) -> None:
        blocks = tuple(time for time in profile(gpt2_model()).times if time.kind == "block")
        assert fit([profile(gpt2_model(), times=blocks)], KERNELS, kind="head", compute_pass="forward") is None

    def test_a_head_without_its_projection_says_nothing_of_heads(self) -> None:
        measured = profile(gpt2_model(), ends_s=(1.0, 1.0))
        stopped = dataclasses.replace(measured, head_has_projection=False)
        assert fit([measured], KERNELS, kind="head", compute_pass="forward") is not None
        assert fit([stopped], KERNELS, kind="head", compute_pass="forward") is None


class TestThroughput:
    def of(self, compute_pass: ComputePass = "forward", **changes: Any) -> Throughput:
        return Throughput(
            **{
                "kernels": KERNELS,
                "compute_pass": compute_pass,
                "measured_attention": "unfused",
                "linear": 2.0,
                "attention": 3.0,
                "rows": 5.0,
                "collectives": 7.0,
                **changes,
            }
        )

    @pytest.mark.parametrize("compute_pass", ["forward", "backward"])
    def test_halves_add_up_and_parts_are_parts(self, compute_pass: ComputePass) -> None:
        throughput = self.of(compute_pass)
        attention, mlp, block = (config(kind=kind, tp=4, all_reduce=LINKS) for kind in ("attention", "mlp", "block"))
        for part in (
            Throughput.device_s,
            Throughput.core_attention_s,
            Throughput.linear_s,
            Throughput.weight_gradients_s,
        ):
            assert part(throughput, attention) + part(throughput, mlp) == pytest.approx(part(throughput, block))
        parts = kernel_seconds(KERNELS, block, compute_pass)
        assert throughput.core_attention_s(block) == 3.0 * parts.attention_s
        assert throughput.linear_s(block) == 2.0 * parts.linear_s
        assert throughput.weight_gradients_s(block) == 2.0 * parts.weight_gradients_s
        expected = 2 * parts.linear_s + 3 * parts.attention_s + 5 * parts.rows_s + 7 * parts.collectives_s
        assert throughput.device_s(block) == pytest.approx(expected)

    @pytest.mark.parametrize("attention", ["flash", "fused-softmax"])
    def test_attention_that_was_not_measured_takes_the_multiple_of_products(self, attention: AttentionKernel) -> None:
        other = config(implementation=LayerImplementation(attention=attention))
        parts = kernel_seconds(KERNELS, other, "forward")
        assert self.of().core_attention_s(other) == pytest.approx(2.0 * parts.attention_s)


class TestLaunches:
    def test_the_time_that_does_not_grow_with_the_microbatch(self) -> None:
        assert launches_s([1, 2, 4, 8], [2e-3, 2e-3, 2e-3, 4e-3]) == 2e-3
        assert launches_s([1, 2, 4, 8], [1e-3, 2e-3, 4e-3, 8e-3]) == 0.0, "all of it grows"
        assert launches_s([1], [1e-3]) == launches_s([], []) == 0.0, "one size shows nothing"

    def test_alone_the_larger_counts_and_in_a_group_both_add_up(self) -> None:
        assert in_a_step_s(3.0, 4.0, tp=1) == in_a_step_s(4.0, 3.0, tp=1) == 4.0
        assert in_a_step_s(3.0, 4.0, tp=2) == 5.0
        assert in_a_step_s(3.0, 0.0, tp=8) == 3.0

    def test_dropout_in_a_group_exchanges_generators(self) -> None:
        dropout = LayerImplementation(dropout=True)
        assert more_host_s(config(implementation=dropout, tp=2)) == GENERATOR_S
        assert more_host_s(config(implementation=dropout)) == more_host_s(config(tp=2)) == 0.0

    def test_an_estimate_of_a_block_has_them(self) -> None:
        forward, backward = (
            Throughput(kernels=KERNELS, compute_pass=each, host_s=1.0) for each in ("forward", "backward")
        )
        dropout = LayerImplementation(dropout=True)
        grouped = config(implementation=dropout, tp=2)
        assert forward.seconds(config()) == 1.0
        assert forward.seconds(config(kind="head")) == forward.device_s(config(kind="head")) < 1.0
        assert forward.seconds(grouped) == pytest.approx(math.hypot(forward.device_s(grouped), 1.0 + GENERATOR_S))
        assert backward.seconds(grouped) == pytest.approx(math.hypot(backward.device_s(grouped), 1.0))

    def bound(self, *launches: tuple[int, float], model: ModelSpec | None = None) -> Profile:
        """Blocks at some tp that take so long for 1 to 4 samples, and twice as long for 8."""
        times = tuple(
            LayerTime(kind="block", tp=tp, micro_batch_size=size, forward_s=seconds, backward_s=seconds)
            for tp, host_s in launches
            for size, seconds in ((1, host_s), (2, host_s), (4, host_s), (8, 2 * host_s))
        )
        return profile(model or gpt2_model(), times=times, updates=())

    def test_those_of_a_group_are_found_before_those_of_one_rank(self) -> None:
        assert fitted_to(self.bound((1, 0.5e-3), (2, 0.9e-3), (4, 0.8e-3))).host_s == 0.8e-3
        assert fitted_to(self.bound((1, 0.5e-3))).host_s == 0.5e-3

    def test_none_takes_longer_than_a_host_can(self) -> None:
        """What does not grow above that is something else."""
        assert fitted_to(self.bound((1, 0.5e-3), (2, 2 * MOST_HOST_S))).host_s == 0.5e-3

    def test_where_nothing_shows_them_they_are_counted_but_no_longer_than_what_was_measured(self) -> None:
        layer = config(micro_batch_size=1, seq_length=8)
        counted_s = counted_launches_s(layer, "forward")
        unknown = nominal(KERNELS, "forward", ())
        assert unknown.device_s(layer) < counted_s == unknown.seconds(layer)
        assert fitted_to(profile(gpt2_model(), block_s=(1.0, 1.0))).host_s is None
        short = dataclasses.replace(unknown, most_host_s=counted_s / 2)
        assert short.seconds(layer) == max(counted_s / 2, short.device_s(layer))
        assert fitted_to(profile(gpt2_model(), block_s=(1e-5, 1e-5), tps=(1,))).most_host_s == 1e-5

    def test_a_block_with_experts_has_those_of_all_of_them(self) -> None:
        """Wherever a dense block shows or limits them: each expert is launched by itself."""
        dense, experts = (config(micro_batch_size=1, seq_length=8, shape=LayerShape.of(model)) for model in BOTH)
        times = counted_launches_s(experts, "forward") / counted_launches_s(dense, "forward")
        assert times == 67 / 35
        shown = nominal(KERNELS, "forward", [self.bound((1, 0.5e-3))])
        assert shown.seconds(dense) == 0.5e-3
        assert shown.seconds(experts) == pytest.approx(times * 0.5e-3)
        limited = nominal(KERNELS, "forward", [profile(gpt2_model(), block_s=(1e-5, 1e-5), tps=(1,))])
        assert limited.seconds(experts) == pytest.approx(times * limited.seconds(dense)) == pytest.approx(times * 1e-5)

    def test_a_profile_of_experts_shows_those_of_a_dense_block(self) -> None:
        def host_s(model: ModelSpec) -> float:
            found = nominal(KERNELS, "forward", [self.bound((1, 2e-3), model=model)]).host_s
            assert found is not None
            return found

        dense, experts = (num_launches(config(shape=LayerShape.of(model)), "forward") for model in BOTH)
        assert host_s(BOTH[1]) == pytest.approx(host_s(BOTH[0]) * dense / experts)

    @pytest.mark.parametrize("kind", ["embedding", "head"])
    def test_those_of_the_ends_are_counted_where_no_profile_shows_the_host(self, kind: LayerKind) -> None:
        layer = config(kind=kind, micro_batch_size=1, seq_length=8)
        assert nominal(KERNELS, "forward", ()).seconds(layer) == counted_launches_s(layer, "forward")
        shown = nominal(KERNELS, "forward", [self.bound((1, 0.5e-3))])
        assert shown.seconds(layer) == shown.device_s(layer)

    def test_the_host_itself_launches_nothing(self) -> None:
        here = Kernels(DeviceType(name="cpu"), NOMINAL_HOST, arithmetic="fp32")
        layer = config(micro_batch_size=1, seq_length=8)
        assert nominal(here, "forward", ()).seconds(layer) == nominal(here, "forward", ()).device_s(layer)

    def test_a_nominal_device_takes_what_was_published_and_the_launches_of_its_own_profiles(self) -> None:
        found = nominal(KERNELS, "forward", [self.bound((1, 0.5e-3))])
        assert (found.linear, found.attention, found.rows, found.collectives, found.host_s) == (1, 1, 1, 1, 0.5e-3)
        parts = kernel_seconds(KERNELS, config(), "forward")
        assert found.device_s(config()) == parts.linear_s + parts.attention_s + parts.rows_s + parts.collectives_s


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
