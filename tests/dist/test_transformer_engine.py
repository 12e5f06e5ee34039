"""TransformerEngine's own Python, behind it torch in place of CUDA: the layers that ranks build of it train alike.

What plays its extension, and what is its own: :mod:`tests.helpers.mocked_transformer_engine`.
"""

import collections
import contextlib
import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch.testing._internal.distributed.fake_pg import FakeStore

from hetero.cost.layers.activation_memory import MicrobatchShape, deferred_bytes
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.delayed_wgrad import TransformerEngineProduct
from hetero.runtime.main_grad import attach_main_grad
from hetero.runtime.mcore import forget_groups
from hetero.runtime.options import StageOptions
from hetero.runtime.stage import build_stages
from hetero.spec.profile import LayerShape
from hetero.units import BYTES_OF_PRECISION
from tests.helpers import stock_megatron
from tests.helpers.host_training import weights_to_hosts
from tests.helpers.layouts import STYLES, layouts, with_delays
from tests.helpers.mocked_transformer_engine import default_version
from tests.helpers.plans import plan as plan_of
from tests.helpers.plans import replica, stage
from tests.helpers.stock_megatron import StockOptions, StockTrainer
from tests.helpers.training import ADAM, SMALL_BUCKETS, Trace, microbatches, train
from tests.helpers.transformer_engine_ranks import Check, answers, on_device

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 1e-9
NUM_STEPS = 2
THIS = "tests.dist.test_transformer_engine"

# Rotation by TransformerEngine's kernel is left out: the kernel is what is not here.
LOCAL = StageOptions(init_method_std=0.1, transformer_impl="local")
TRANSFORMER_ENGINE = dataclasses.replace(LOCAL, transformer_impl="transformer_engine", rope_fusion=False)

DELAYS = (1, 0, None, 2)
TRAINED = {
    "everything-llama-tied": DELAYS,
    "half-cuts-tp-1|2|2|4-sp-gpt2-tied": DELAYS,
    "half-cuts-tp-1|2|2|4-llama-qk-norm": None,
    "half-cuts-recompute-moe": DELAYS,
    "moe-moe": None,
    "interleaved-delays-llama-gqa": None,
}
"""Layouts, and the delays of their weights' gradients where they get some beside their own."""


def trained_plan(name: str) -> Plan:
    (made,) = (plan for layout, style, plan in layouts() if f"{layout}-{style}" == name)
    delays = TRAINED[name]
    return on_device(with_delays(made, delays) if delays is not None else made)


def train_both(rank: int, plan: Plan) -> dict[str, Trace | None]:
    """On every rank: the same training with layers of either kind."""
    both = {"local": LOCAL, "transformer_engine": TRANSFORMER_ENGINE}
    return {name: train(rank, plan, NUM_STEPS, SMALL_BUCKETS, options) for name, options in both.items()}


def firsts(plan: Plan) -> list[int]:
    """The ranks that hold something, of data-parallel ones the first."""
    places = {rank: plan.placements(rank) for rank in range(plan.world_size)}
    return [rank for rank, held in places.items() if held and all(place.dp_rank == 0 for place in held)]


def build_all_ranks() -> dict[str, Any]:
    """Build the stages of every rank of every layout, over process groups that do not communicate.

    Of data-parallel ranks, which have the same, the first.

    Returns how many there are, and errors by layout. That names and shapes are those that the plan counts on, and so
    the local layers', is asserted where the parameters are found (``canonical_parameters``).
    """
    built, errors, modules = 0, {}, collections.Counter()
    for number, (name, style, whole) in enumerate(layouts()):
        plan = on_device(whole)
        if number % 3 == 0:
            # These are built in the host's memory.
            plan = weights_to_hosts(plan, turn=number // 3, speculate=False)
        for rank in firsts(plan):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
            try:
                context = create_groups(plan, device=torch.device("cpu"))
                for model in build_stages(context, options=TRANSFORMER_ENGINE, seed=7):
                    built += 1
                    modules.update(type(each).__name__ for each in model.module.modules())
                    if model.choice.transformer_engine is None:
                        errors[name, style, rank] = f"local layers: {model.choice.why_local}"
            except Exception as error:  # noqa: BLE001  # each is told, with where it was
                errors[name, style, rank] = repr(error)
            finally:
                dist.destroy_process_group()
    return {"built": built, "errors": errors, "modules": dict(modules)}


def fp8_plan() -> Plan:
    """Two tensor-parallel ranks in fp8 before one that is not."""
    model = dataclasses.replace(STYLES["gpt2-untied"](), hidden_size=64, kv_channels=32, ffn_hidden_size=128)
    first = stage(layers=(0, 4), ranks=(0, 1), tp=2, sp=True, mbs=2)
    whole = plan_of(model, [replica(first, stage(layers=(4, 6), ranks=(2,), mbs=2), num_samples=4)])
    made = on_device(dataclasses.replace(whole, precision="bf16"), "H100")
    (only,) = made.replicas
    return dataclasses.replace(made, replicas=(only.with_stage(0, fp8=True),))


def train_in_fp8(rank: int, plan: Plan, recipe: str) -> dict[str, Any]:
    """A step in which the products of fp8 stay in bf16: what is looked at is what they would be asked."""
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    asked: list[tuple[str, str, tuple[int, ...]]] = []
    manager = quantization.FP8GlobalStateManager
    enter = manager.autocast_enter

    def record(enabled: bool, calibrating: bool, fp8_recipe: Any, fp8_group: Any, *args: Any, **options: Any) -> None:
        ranks = tuple(dist.get_process_group_ranks(fp8_group))
        asked.append((type(fp8_recipe).__name__, fp8_recipe.fp8_format.name, ranks))
        enter(False, calibrating, fp8_recipe, fp8_group, *args, **options)

    manager.autocast_enter = record
    options = dataclasses.replace(TRANSFORMER_ENGINE, transformer_impl="auto", fp8_recipe=recipe)
    trace = train(rank, plan, 1, SMALL_BUCKETS, options)
    assert trace is not None
    return {"asked": sorted(set(asked)), "losses": trace.losses, "norms": trace.grad_norms}


def bytes_put_off(rank: int, plan: Plan) -> tuple[int, int]:
    """What a backward of one microbatch leaves behind on a rank; its products that add to ``main_grad`` themselves."""
    context = create_groups(plan, device=torch.device("cpu"))
    (model,) = build_stages(context, options=TRANSFORMER_ENGINE, seed=7)
    for _, parameter in model.parameters.values():
        attach_main_grad(parameter, torch.zeros_like(parameter))
    kept: list[TransformerEngineProduct] = []
    assert model.delayed is not None
    model.delayed.delay = kept.append  # type: ignore[assignment,method-assign]
    model.forward(None, microbatches(plan, rank, step=0)[0]).sum().backward()
    return sum(each.nbytes for product in kept for each in product.tensors), sum(each.into_main_grad for each in kept)


def train_stock(rank: int, plan: Plan) -> dict[str, dict[str, np.ndarray]]:
    """Return the gradients of stock megatron-core by whose layers it has, set up as on a GPU where apex is missing."""
    seen = {}
    with contextlib.ExitStack() as stack:
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            stack.enter_context(stock_megatron.stand_ins())
        stack.enter_context(mock.patch.object(layers, "_grad_accum_fusion_available", False))
        for name, has_engine in (("local", False), ("transformer_engine", True)):
            forget_groups()
            options = StockOptions(transformer_engine=has_engine, torch_attention=not has_engine)
            trainer = StockTrainer(plan, rank, adam=ADAM, seed=7, std=0.1, options=options)
            # The norm is a kernel of TransformerEngine's.
            with mock.patch.object(trainer._optimizer, "step", return_value=(True, 0.0, 0)):
                trainer.step(microbatches(plan, rank, step=0))
            seen[name] = {key: tensor.main_grad.numpy() for key, (_, tensor) in trainer.parameters.items()}
    return seen


def stock_plan() -> Plan:
    one = stage(layers=(0, 4), ranks=(0,), mbs=2)
    model = dataclasses.replace(STYLES["llama-gqa"](), num_layers=4, vocab_size=64, padded_vocab_size=64)
    return on_device(dataclasses.replace(plan_of(model, [replica(one, num_samples=4)]), precision="fp32"))


KEPT = {"tp 1": (1, False), "tp 2": (2, False), "tp 2 with the sequence cut": (2, True)}


def delayed_plan(tp: int, sp: bool) -> Plan:
    one = stage(layers=(0, 6), ranks=range(tp), tp=tp, sp=sp, mbs=2, delay=0)
    return on_device(plan_of(STYLES["llama-gqa"](), [replica(one)]))


RECIPES = {"delayed": "TEDelayedScaling", "tensorwise": "Float8CurrentScaling"}


def asked_by(item: pytest.Function) -> Mapping[str, Check]:
    """What a test of this file wants to know of TransformerEngine's Python."""
    values: Mapping[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    match item.originalname:
        case "test_all_ranks_of_all_layouts_can_be_built":
            return {"build": Check(THIS, "build_all_ranks")}
        case "test_a_layout_trains_as_with_local_layers":
            plan = trained_plan(values["name"])
            return {values["name"]: Check(THIS, "train_both", (plan,), plan.world_size)}
        case "test_what_waits_is_what_the_memory_model_counts":
            tp, sp = KEPT[values["name"]]
            return {f"kept {values['name']}": Check(THIS, "bytes_put_off", (delayed_plan(tp, sp),), tp)}
        case "test_stock_with_its_layers_needs_no_apex":
            return {"stock": Check(THIS, "train_stock", (stock_plan(),), 1)}
    in_bf16, recipe = on_device(fp8_plan(), "H100", fp8=False), values["recipe"]
    return {
        f"fp8 {recipe}": Check(THIS, "train_in_fp8", (fp8_plan(), recipe), 3),
        "bf16": Check(THIS, "train_in_fp8", (in_bf16, "delayed"), 3),
    }


@pytest.fixture(scope="module")
def answered(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """All that the tests whose turn it is ask of TransformerEngine's Python, in one process."""
    checks: dict[str, Check] = {}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            checks |= asked_by(item)
    version = request.config.getoption("--transformer-engine") or default_version()
    return dict(zip(checks, answers(checks.values(), version), strict=True))


@pytest.mark.rotates(every=6, turn=1)
def test_all_ranks_of_all_layouts_can_be_built(answered: Mapping[str, Any]) -> None:
    found = answered["build"]
    assert not found["errors"]
    assert found["built"] == sum(len(plan.placements(rank)) for *_, plan in layouts() for rank in firsts(plan))
    assert set(found["modules"]) >= {
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
        "TEDotProductAttention",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
    }
    assert not {"SplitColumnParallelLinear", "SplitRowParallelLinear"} & set(found["modules"])


@pytest.mark.rotates("layouts")
@pytest.mark.parametrize("name", TRAINED)
def test_a_layout_trains_as_with_local_layers(name: str, answered: Mapping[str, Any]) -> None:
    for both in answered[name]:
        ours, theirs = both["transformer_engine"], both["local"]
        if theirs is None:
            assert ours is None
            continue
        assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE)
        assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=TOLERANCE)
        for step in range(NUM_STEPS):
            assert ours.weights[step].keys() == theirs.weights[step].keys()
            for parameter, weight in ours.weights[step].items():
                np.testing.assert_allclose(weight, theirs.weights[step][parameter], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", KEPT)
def test_what_waits_is_what_the_memory_model_counts(name: str, answered: Mapping[str, Any]) -> None:
    """With a cut sequence more than the local layers keep; and every product adds to ``main_grad`` by itself."""
    tp, sp = KEPT[name]
    made = delayed_plan(tp, sp)
    microbatch = MicrobatchShape(
        micro_batch_size=2,
        seq_length=made.seq_length,
        element_bytes=BYTES_OF_PRECISION[made.precision],
        tp=tp,
        sequence_ways=tp if sp else 1,
    )
    shape = LayerShape.of(made.model)
    counted = 6 * deferred_bytes("block", shape, microbatch, keeps_gathered_inputs=True)
    assert answered[f"kept {name}"] == [(counted, 6 * 4)] * tp
    assert (6 * deferred_bytes("block", shape, microbatch, keeps_gathered_inputs=False) < counted) == sp


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stage_in_fp8_asks_for_it_among_its_tensor_parallel_ranks(recipe: str, answered: Mapping[str, Any]) -> None:
    """And nobody else is asked; sums and losses go on in the precision of the plan."""
    *in_fp8, beside = answered[f"fp8 {recipe}"]
    assert [rank["asked"] for rank in in_fp8] == [[(RECIPES[recipe], "HYBRID", (0, 1))]] * 2
    assert beside["asked"] == []
    for rank, plain in zip(answered[f"fp8 {recipe}"], answered["bf16"], strict=True):
        assert plain["asked"] == []
        assert (rank["losses"], rank["norms"]) == (plain["losses"], plain["norms"])


def test_stock_with_its_layers_needs_no_apex(answered: Mapping[str, Any]) -> None:
    """Whose head asks for apex's extension where it is to add weight gradients, whosever the other layers are."""
    (seen,) = answered["stock"]
    for parameter, gradient in seen["local"].items():
        np.testing.assert_allclose(seen["transformer_engine"][parameter], gradient, rtol=1e-4, atol=1e-6)
