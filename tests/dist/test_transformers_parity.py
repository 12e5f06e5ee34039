"""An implementation that nobody here wrote computes the same loss and gradients: Hugging Face's ``transformers``.

Tiny random models are built from configurations alone and run in float64 in this process; ours runs with the same
weights, on one rank and on a plan that is uneven in every way.

What remains is the order of summation in float64, some 1e-15. That holds although both sides round the cosines and
sines of rotary positions to float32, because they round the same numbers; and although megatron-core fills masked
scores with -10000 instead of minus infinity, because exp(-10000) is 0 in float64 as well. Mixtral alone is farther
off, because its router's probabilities are rounded to float32 in ``transformers``.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hetero.errors import ConfigError
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.runtime.named_parameters import take_shard
from hetero.spec.hugging_face.families import TABLES
from hetero.spec.model import ModelSpec
from hetero.spec.model_import import from_hugging_face
from hetero.spec.parameters import parameters, shard_intervals
from tests.helpers.huggingface import canonical_tensors, loss_and_gradients, losses
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.transformers_models import (
    LINEAR,
    LLAMA3,
    canonical_weights,
    config_json,
    float64_model,
    loss_of,
    probes,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow]

FLOAT64, FLOAT32 = 1e-12, 1e-6
"""Tolerances relative to the largest element of each tensor."""

CONFIGS = {
    "llama": (config_json("llama"), FLOAT64),
    "llama-tied": (config_json("llama", tie_word_embeddings=True, rope_theta=500_000), FLOAT64),
    "llama-biases": (config_json("llama", attention_bias=True, mlp_bias=True), FLOAT64),
    "llama-attention-biases": (config_json("llama", attention_bias=True), FLOAT64),
    "llama-linear": (config_json("llama", rope_scaling=LINEAR), FLOAT64),
    # Megatron-core divides positions, transformers frequencies: not the same float32 unless by a power of 2.
    "llama-linear-2.5": (config_json("llama", rope_scaling={**LINEAR, "factor": 2.5}), FLOAT32),
    "llama3": (config_json("llama", rope_scaling=LLAMA3), FLOAT64),
    "llama3-parameters": (config_json("llama", rope_parameters={**LLAMA3, "high_freq_factor": 2.0}), FLOAT64),
    "mistral-window": (config_json("mistral", sliding_window=64, rope_parameters=LLAMA3), FLOAT64),
    "qwen2": (config_json("qwen2", sliding_window=8), FLOAT64),
    "qwen3": (config_json("qwen3", rope_theta=10_000.25), FLOAT64),
    "qwen3-attention-biases": (config_json("qwen3", attention_bias=True), FLOAT64),
    "gpt2": (config_json("gpt2"), FLOAT64),
    "gpt2-relu": (config_json("gpt2", activation_function="relu"), FLOAT64),
    "opt": (config_json("opt"), FLOAT64),
    "opt-relu": (config_json("opt", activation_function="relu"), FLOAT64),
    "mixtral": (config_json("mixtral"), FLOAT32),
    "mixtral-llama3": (config_json("mixtral", rope_scaling=LLAMA3, num_experts_per_tok=3), FLOAT32),
}


def one_process(model: ModelSpec) -> Plan:
    whole = stage(layers=(0, model.num_layers), ranks=(0,), mbs=2)
    return plan(model, [replica(whole, num_samples=6)], precision="fp64")


def two_unlike_replicas(model: ModelSpec) -> Plan:
    """tp 2 | tp 1 beside tp 1, cut between other layers, with unequal shares and microbatches."""
    first = replica(
        stage(layers=(0, 2), ranks=(0, 1), tp=2, sp=True, mbs=2), stage(layers=(2, 3), ranks=(2,)), num_samples=4
    )
    return plan(model, [first, replica(stage(layers=(0, 3), ranks=(3,)), num_samples=2)], precision="fp64")


def _cases() -> Iterator[Any]:
    """Every model under one of the plans each second run."""
    for i, (name, (config, tolerance)) in enumerate(CONFIGS.items()):
        for build_plan in (one_process, two_unlike_replicas):
            case = f"{name}-{build_plan.__name__}"
            row = pytest.mark.rotates(name, every=2, turn=i % 2)
            yield pytest.param(config, tolerance, build_plan, id=case, marks=row)


@pytest.mark.parametrize(("config", "tolerance", "build_plan"), list(_cases()))
def test_loss_and_gradients_are_those_of_transformers(
    config: dict[str, Any], tolerance: float, build_plan: Callable[[ModelSpec], Plan]
) -> None:
    model = dataclasses.replace(from_hugging_face(config, source="config.json"), padded_vocab_size=64)
    plan = build_plan(model)
    validate(plan)
    theirs = float64_model(config)
    loss = loss_of(theirs, plan)
    loss.backward()
    expected_loss = loss.item()
    expected = canonical_tensors(model, {name: tensor.grad for name, tensor in theirs.named_parameters()})
    full_weights = canonical_weights(theirs, plan)
    by_name = {parameter.name: parameter for parameter in parameters(model)}
    assert full_weights.keys() == by_name.keys()

    seen = set()
    for rank, outcome in enumerate(run_ranks(loss_and_gradients, plan.world_size, plan, full_weights)):
        assert outcome.loss == pytest.approx(expected_loss, rel=tolerance)
        for name, gradient in outcome.gradients.items():
            intervals = shard_intervals(by_name[name], tp=outcome.tp, tp_rank=outcome.tp_rank)
            wanted = take_shard(expected[name], by_name[name], intervals).numpy()
            error = np.abs(gradient - wanted).max() / np.abs(wanted).max()
            assert gradient.shape == wanted.shape
            assert error <= tolerance, f"gradient of {name} on rank {rank} is off by {error:.1e}"
            seen.add(name)
    assert seen == by_name.keys()


@pytest.mark.rotates("families")
@pytest.mark.parametrize("family", TABLES)
def test_every_value_that_is_accepted_gives_the_loss_of_transformers(family: str) -> None:
    """Of every key that their class has, one at a time."""
    cases, expected, told = [], [], []
    for changes in probes(family):
        config = {**config_json(family), **changes}
        try:
            model = from_hugging_face(config, source="config.json")
        except ConfigError:
            continue
        if model == from_hugging_face(config_json(family), source="config.json"):
            continue
        theirs, plan = float64_model(config), one_process(model)
        with torch.no_grad():
            expected.append(loss_of(theirs, plan).item())
        cases.append((plan, canonical_weights(theirs, plan)))
        told.append(changes)
    assert len(cases) >= 7
    [found] = run_ranks(losses, 1, cases, timeout_s=110)
    tolerance = FLOAT32 if family == "mixtral" else FLOAT64
    off = {str(each): abs(a / b - 1) for each, a, b in zip(told, found, expected, strict=True)}
    assert {each: error for each, error in off.items() if error > tolerance} == {}
