"""A few numbers stand for all parameters of a model."""

from hypothesis import given, settings

from hetero.cost.layers.parameter_counts import ParameterCounts
from hetero.plan.ir import Plan
from hetero.spec.parameters import parameters, stage_parameters
from hetero.spec.profile import HALVES
from tests.helpers.strategies import legal_plans


@given(legal_plans())
@settings(max_examples=60, deadline=None)
def test_a_stage_holds_what_its_parameters_add_up_to(legal: Plan) -> None:
    counts = ParameterCounts(legal.model)
    for _, _, each in legal.stages():
        held = stage_parameters(legal.model, first_layer=each.start, end_layer=each.end)
        exact = sum(p.numel // (each.tp if p.shard_dim is not None else 1) for p in held)
        assert counts.of_layers(first_layer=each.start, end_layer=each.end, tp=each.tp) == exact


@given(legal_plans())
@settings(max_examples=20, deadline=None)
def test_parts_add_up_to_the_model(legal: Plan) -> None:
    counts = ParameterCounts(legal.model)
    elements = {
        part: counts.sharded(part) + counts.replicated(part) for part in ("embedding", "block", "head", *HALVES)
    }
    assert elements["block"] == elements["attention"] + elements["mlp"]
    total = elements["embedding"] + legal.model.num_layers * elements["block"] + elements["head"]
    assert total == sum(parameter.numel for parameter in parameters(legal.model))
