"""The small model has everything that a plan refers to."""

import dataclasses
from collections.abc import Callable

import pytest

from hetero.emulation.shrunk_model import small_model, small_plan
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import parameters
from tests.helpers.layouts import layouts
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, stage

LARGE = {"hidden_size": 4096, "kv_channels": 128, "num_attention_heads": 32, "num_query_groups": 8}


@pytest.mark.parametrize("make", [gpt2_model, llama_model, moe_model])
def test_the_small_model_has_the_large_ones_parameters_but_not_their_size(make: Callable[..., ModelSpec]) -> None:
    large = make(**LARGE, ffn_hidden_size=16384, padded_vocab_size=50304, vocab_size=50257)
    small = small_model(large, vocab_size=259, seq_length=32)
    assert [p.name for p in parameters(small)] == [p.name for p in parameters(large)]
    assert small.hidden_size == 64
    for tp in (1, 2, 4, 8):
        for p in parameters(small):
            assert p.shard_dim is None or p.shape[p.shard_dim] // p.blocks % tp == 0, (p.name, tp)


@pytest.mark.parametrize("described", [pytest.param(p, id=f"{name}-{style}") for name, style, p in layouts()])
def test_a_legal_plan_stays_legal(described: Plan) -> None:
    small = small_plan(dataclasses.replace(described, precision="bf16"), vocab_size=100, seq_length=32)
    validate(small)
    assert small.replicas == described.replicas
    assert small.precision == "fp32"


def test_the_small_model_computes_in_fp32_also_where_the_large_one_is_in_fp8() -> None:
    large = llama_model(**LARGE, ffn_hidden_size=16384)
    stages = (stage(layers=(0, 3), ranks=(0,), device="H100"), stage(layers=(3, 6), ranks=(1,), device="A100-40"))
    described = plan(large, [replica(*stages)], precision="bf16")
    described = described.with_replica(0, described.replicas[0].with_stage(0, fp8=True))
    validate(described)
    small = small_plan(described, vocab_size=100, seq_length=32)
    validate(small)
    assert [stage.fp8 for _, _, stage in small.stages()] == [False, False]
