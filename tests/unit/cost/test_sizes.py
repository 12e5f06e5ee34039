"""Six numbers stand for all parameters of a model."""

from hypothesis import given, settings

from hetero.cost.sizes import LayerSizes
from hetero.plan.ir import Plan
from hetero.spec.parameters import parameters, stage_parameters
from tests.helpers.strategies import legal_plans


@given(legal_plans())
@settings(max_examples=60, deadline=None)
def test_a_stage_holds_what_its_parameters_add_up_to(legal: Plan) -> None:
    sizes = LayerSizes(legal.model)
    for _, _, each in legal.stages():
        held = stage_parameters(legal.model, first_layer=each.first_layer, end_layer=each.end_layer)
        exact = sum(p.numel // (each.tp if p.shard_dim is not None else 1) for p in held)
        assert sizes.held(first_layer=each.first_layer, end_layer=each.end_layer, tp=each.tp) == exact


@given(legal_plans())
@settings(max_examples=20, deadline=None)
def test_positions_add_up_to_the_model(legal: Plan) -> None:
    sizes = LayerSizes(legal.model)
    total = sum(sizes.cut(position) + sizes.whole(position) for position in range(-1, legal.model.num_layers + 1))
    assert total == sum(parameter.numel for parameter in parameters(legal.model))
