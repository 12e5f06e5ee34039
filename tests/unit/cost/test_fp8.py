"""What a stage in fp8 is estimated to take: less time in its linear layers, and other bytes."""

import dataclasses
from typing import Any

import pytest

from hetero.cost.cost_model import CostModel, StageConfig
from hetero.cost.layers.confidence import Confidence
from hetero.cost.stage_memory import StageMemory, stage_memory
from hetero.errors import ConfigError
from hetero.plan.ir import Recompute
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.devices import DeviceType
from hetero.spec.profile import ProfileStore
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model()
ON_H100 = profile(MODEL, device="H100", precision="bf16", arithmetic="bf16")
COSTS = cost_model(MODEL, [ON_H100], precision="bf16")
HERE: dict[str, Any] = {"device": "H100", "tp": 1, "micro_batch_size": 1}


def config(*, fp8: bool, recompute: Recompute = "none", splits: bool = False) -> StageConfig:
    return StageConfig("H100", 2, 4, 1, 2, recompute=recompute, splits_backward=splits, fp8=fp8)


@pytest.mark.parametrize("kind", ["block", "attention", "mlp"])
def test_a_layer_takes_less_but_more_than_half(kind: Any) -> None:
    """Peaks differ by two, and attention, scores and norms stay as they are."""
    bf16, fp8 = (COSTS.layer(kind, **HERE, fp8=fp8) for fp8 in (False, True))
    assert bf16.forward_s / 2 < fp8.forward_s < bf16.forward_s
    assert bf16.backward_s / 2 < fp8.backward_s < bf16.backward_s
    assert fp8.confidence == Confidence.DATA_SHEET


def test_the_wider_the_layer_the_nearer_to_half() -> None:
    """Products of weights grow with the square of the width, scores and norms with the width."""
    shares = []
    for width in (8, 32, 128):
        sizes = {"hidden_size": 32 * width, "kv_channels": 8 * width, "ffn_hidden_size": 64 * width}
        costs = cost_model(gpt2_model(**sizes), [ON_H100], precision="bf16", seq_length=2048)
        bf16, fp8 = (costs.layer("block", **HERE, fp8=each).forward_s for each in (False, True))
        shares.append(fp8 / bf16)
    assert shares == sorted(shares, reverse=True)
    assert 0.5 < shares[-1] < 0.75 < shares[0] < 1


@pytest.mark.parametrize("kind", ["block", "attention", "mlp"])
def test_a_layer_that_waits_for_its_launches_takes_as_long(kind: Any) -> None:
    """They are no fewer in fp8; counted, as no profile in bf16 shows them."""
    costs = cost_model(MODEL, [profile(MODEL)], precision="bf16", data_sheets=True)
    bf16, fp8 = (costs.layer(kind, **HERE, fp8=fp8) for fp8 in (False, True))
    assert (fp8.forward_s, fp8.backward_s) == (bf16.forward_s, bf16.backward_s)


def test_halves_add_up_to_the_whole() -> None:
    block, attention, mlp = (COSTS.layer(kind, **HERE, fp8=True) for kind in ("block", "attention", "mlp"))
    assert attention.forward_s + mlp.forward_s == pytest.approx(block.forward_s)
    assert attention.backward_s + mlp.backward_s == pytest.approx(block.backward_s)


@pytest.mark.parametrize("kind", ["embedding", "head"])
def test_the_ends_have_no_part_in_it(kind: Any) -> None:
    assert COSTS.layer(kind, **HERE, fp8=True) == COSTS.layer(kind, **HERE)


def test_stages_and_what_they_compute_again() -> None:
    bf16, fp8 = (COSTS.stage(config(fp8=each)) for each in (False, True))
    assert fp8.microbatch_s < bf16.microbatch_s
    assert fp8.update_s == bf16.update_s
    again = COSTS.stage(config(fp8=True, recompute="full"))
    assert again.backward_s == pytest.approx(fp8.backward_s + fp8.forward_s)
    selective = [COSTS.stage(config(fp8=each, recompute="selective")).backward_s for each in (False, True)]
    assert selective[1] - fp8.backward_s == pytest.approx(selective[0] - bf16.backward_s), "attention is not in fp8"
    split = [COSTS.stage(config(fp8=each, splits=True)).weight_s for each in (False, True)]
    assert split[1] == pytest.approx(split[0] / 2)


def test_a_device_without_the_figure_is_not_priced() -> None:
    bare = DeviceType(name="bare", memory_gib=24, compute_capability=(8, 9))
    store = ProfileStore(
        [profile(MODEL, device="bare", precision="bf16", arithmetic="bf16")], device_types=SHIPPED_DEVICES.plus([bare])
    )
    costs = CostModel(model=MODEL, seq_length=16, precision="bf16", profiles=store)
    with pytest.raises(ConfigError, match="'bare' has no data sheet, and its profiles do not tell its speed-up in fp8"):
        costs.layer("block", device="bare", tp=1, micro_batch_size=1, fp8=True)


def memory(**changes: Any) -> StageMemory:
    return stage_memory(COSTS, config(**changes))


INPUTS = 2 * 2 * 16 * (2 * 32 + 64 - 32)
"""Bytes that a microbatch saves less: b s (2 h + f - q), with b 2, s 16, h = q = 32, f 64, in two layers."""

WEIGHTS = 2 * 2 * (4 * 32 * 32 + 2 * 32 * 64 + 3 * 32 + 64)
"""Bytes that it saves more: two copies of 4 h^2 + 2 h f weights and of the biases that are cut, in two layers."""


def test_a_microbatch_saves_one_byte_of_each_input_and_two_of_each_weight() -> None:
    bf16, fp8 = memory(fp8=False), memory(fp8=True)
    assert fp8.activations_per_microbatch == bf16.activations_per_microbatch - INPUTS + WEIGHTS
    assert fp8.fixed == bf16.fixed, "weights, gradients and optimizer are the same"


def test_what_is_computed_again_keeps_them_for_one_layer_at_a_time() -> None:
    bf16, fp8 = (memory(fp8=each, recompute="full") for each in (False, True))
    assert fp8.activations_per_microbatch == bf16.activations_per_microbatch
    assert fp8.fixed.working == bf16.fixed.working - INPUTS // 2 + WEIGHTS // 2


def test_what_waits_for_its_weight_gradients_is_in_fp8_as_well() -> None:
    bf16, fp8 = (memory(fp8=each, splits=True).deferred_per_microbatch for each in (False, True))
    assert fp8 * 2 == bf16


def test_a_described_device_is_priced_by_its_data_sheet() -> None:
    """As the device that it copies is, wherever the description comes from."""
    h100 = SHIPPED_DEVICES.of("H100")
    copy = dataclasses.replace(h100, name="copy")
    cluster = ClusterSpec(devices=(copy,), node_types=(NodeType(name="a", device="copy", gpus_per_node=1),))
    store = ProfileStore([profile(MODEL)], device_types=cluster.device_types)
    costs = CostModel(model=MODEL, seq_length=16, precision="fp32", profiles=store, data_sheets=True)
    ours, theirs = (costs.layer("block", device=name, tp=1, micro_batch_size=1) for name in ("copy", "H100"))
    assert ours == theirs
    with pytest.raises(ConfigError, match="unknown device type 'copy'"):
        cost_model(MODEL, [profile(MODEL)], data_sheets=True).layer("block", device="copy", tp=1, micro_batch_size=1)
