"""Model FLOPs by the published formula, and MFU per device type."""

import dataclasses

import pytest

from hetero.cost.model_flops import Products, hardware_flops, model_flops, overall_mfu, utilizations
from hetero.cost.runtime_model import HETERO
from hetero.cost.simulation.simulator import simulate
from hetero.data.cost_models import model_costs, plan_costs
from hetero.plan.ir import Plan, Recompute, Replica, Stage
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model, moe_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.published_runs.opt350m import published_model
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

LINK = Link(bandwidth_gb_per_s=100, latency_us=0)


def whole(model: ModelSpec, *, device: str = "A100-40", recompute: Recompute = "none") -> Stage:
    return stage(layers=(0, model.num_layers), ranks=(0,), device=device, depth=1, recompute=recompute)


def test_gpt_has_the_flops_of_its_paper() -> None:
    """arXiv 2104.04473, appendix, without the forward that is repeated there: 72 B s l h^2 (1 + s/6h + V/12lh)."""
    model = published_model("GPT-Neo-2.7")
    costs = model_costs(model, seq_length=2048, precision="fp32")
    s, layers, h, v = 2048, 32, 2560, 50304
    expected = 72 * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(whole(model), costs) == pytest.approx(expected, rel=1e-12)


def test_full_recomputation_is_the_papers_factor() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh): the head is not computed again."""
    model = published_model("GPT-Neo-2.7")
    costs = model_costs(model, seq_length=2048, precision="fp32")
    s, layers, h, v = 2048, 32, 2560, 50304
    expected = 96 * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert hardware_flops(whole(model, recompute="full"), costs) == pytest.approx(expected, rel=1e-12)
    assert model_flops(whole(model, recompute="full"), costs) == model_flops(whole(model), costs)
    core = hardware_flops(whole(model, recompute="selective"), costs) - model_flops(whole(model), costs)
    assert core == pytest.approx(4 * s * s * h * layers)


def test_experts_that_get_no_token_do_nothing() -> None:
    few, many = (
        model_flops(whole(model), model_costs(model, seq_length=16, precision="fp32", data_sheets=True))
        for model in (moe_model(num_experts=4), moe_model(num_experts=8))
    )
    assert few == many


MODEL = gpt2_model()


def two_devices() -> Plan:
    stages = (
        stage(layers=(0, 4), ranks=(0,), device="A100-40"),
        stage(layers=(4, 6), ranks=(1,), device="V100-16"),
    )
    return plan(MODEL, [replica(*stages, num_samples=8)])


CLUSTER = ClusterSpec(
    node_types=tuple(
        NodeType(name=device, device=device, gpus_per_node=1, inside_node=LINK) for device in ("A100-40", "V100-16")
    ),
    links=Links(between_nodes=LINK),
)


def test_each_device_type_has_its_own_and_its_own_peak() -> None:
    costs = cost_model(MODEL, [profile(MODEL, arithmetic="tf32"), profile(MODEL, device="V100-16")])
    simulation = simulate(two_devices(), CLUSTER, costs)
    found = utilizations(simulation, costs)
    assert list(found) == [Products("A100-40", "tf32"), Products("V100-16", "fp32")]
    first, last = found.values()
    assert (first.peak_flops_per_s, last.peak_flops_per_s) == (156e12, 15.7e12)
    stages = two_devices().replicas[0].stages
    for each, on in ((first, stages[0]), (last, stages[1])):
        flops = 8 * model_flops(on, costs)
        assert each.mfu == pytest.approx(flops / (simulation.step_s * each.peak_flops_per_s))
        assert each.computing[0] == each.computing[1] > each.mfu
    total = sum(8 * model_flops(on, costs) for on in stages)
    assert overall_mfu(found) == pytest.approx(total / (simulation.step_s * (156e12 + 15.7e12)))


def test_all_ranks_that_work_count_and_idle_ones_do_not() -> None:
    """Two replicas of tp 2, and two ranks without a stage."""
    replicas = [
        replica(stage(layers=(0, 6), ranks=(2 * r, 2 * r + 1), tp=2, device="A100-40", depth=1), num_samples=4)
        for r in range(2)
    ]
    costs = cost_model(MODEL, [profile(MODEL)])
    simulation = simulate(plan(MODEL, replicas, idle_ranks=(4, 5)), nodes(1, gpus_per_node=6, gb_per_s=1e6), costs)
    ((products, found),) = utilizations(simulation, costs).items()
    assert (products, found.num_devices) == (Products("A100-40", "fp32"), 4)
    flops = 8 * model_flops(whole(MODEL), costs)
    assert found.mfu == pytest.approx(flops / (simulation.step_s * 4 * 19.5e12))


def test_recomputation_takes_from_mfu_and_not_from_what_the_device_does() -> None:
    costs = cost_model(MODEL, [profile(MODEL)], runtime=dataclasses.replace(HETERO, implementation=None))
    found = []
    recomputes: tuple[Recompute, ...] = ("none", "full")
    for recompute in recomputes:
        made = plan(MODEL, [Replica(num_samples=4, stages=(whole(MODEL, recompute=recompute),))])
        ((_, each),) = utilizations(simulate(made, nodes(1), costs), costs).items()
        found.append(each)
    assert found[1].mfu == pytest.approx(found[0].mfu * 3 / 4, rel=0.01)
    assert found[1].computing[0] == pytest.approx(found[0].computing[0], rel=0.02)


def test_a_stage_in_fp8_is_held_against_the_peak_of_fp8() -> None:
    model = gpt2_model(hidden_size=64, kv_channels=16, padded_vocab_size=64)
    made = plan(model, [replica(dataclasses.replace(whole(model, device="H100"), fp8=True), num_samples=4)])
    made = dataclasses.replace(made, precision="bf16", seq_length=16)
    costs = plan_costs(made, data_sheets=True)
    found = utilizations(simulate(made, nodes(1, device="H100"), costs), costs)
    assert {products: each.peak_flops_per_s for products, each in found.items()} == {Products("H100", "fp8"): 1979e12}


def test_a_processor_has_no_peak() -> None:
    made = plan(MODEL, [replica(stage(layers=(0, 6), ranks=(0,)), num_samples=4)])
    costs = cost_model(MODEL, [profile(MODEL, device="cpu")])
    assert utilizations(simulate(made, nodes(1, device="cpu"), costs), costs) == {}
