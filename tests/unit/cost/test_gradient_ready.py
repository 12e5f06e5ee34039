"""How far a stage is when it comes to a layer: blocks of 1 s forward and 2 s backward, embedding and head of 0.5 s."""

import pytest

from hetero.cost.simulation.gradient_ready import share_of_backward, share_of_forward
from hetero.plan.ir import Stage
from hetero.schedule.actions import ActionKind
from tests.helpers.models import gpt2_model
from tests.helpers.plans import stage
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model(tied_embeddings=False)
COSTS = cost_model(MODEL, [profile(MODEL, block_s=(1.0, 2.0), ends_s=(0.5, 0.5))])


def layers(first: float, end: float) -> Stage:
    return stage(layers=(first, end), ranks=(0,), device="A100-40", depth=1)


WHOLE, FIRST, MIDDLE, LAST = layers(0, 6), layers(0, 2), layers(2, 4), layers(4, 6)


@pytest.mark.parametrize(
    ("held", "position", "seconds", "of"),
    [
        (FIRST, -1, 0.0, 2.5),
        (FIRST, 0, 0.5, 2.5),
        (FIRST, 1, 1.5, 2.5),
        (MIDDLE, 2, 0.0, 2.0),
        (MIDDLE, 3.5, 1.5, 2.0),
        (LAST, 4, 0.0, 2.5),
        (LAST, 6, 2.0, 2.5),
        (WHOLE, 6, 6.5, 7.0),
    ],
)
def test_a_forward_comes_to_its_embedding_its_layers_and_its_head(
    held: Stage, position: float, seconds: float, of: float
) -> None:
    assert share_of_forward(COSTS, held, position) == pytest.approx(seconds / of)


@pytest.mark.parametrize(
    ("held", "position", "seconds", "of"),
    [
        (LAST, 6, 0.5, 4.5),
        (LAST, 5, 2.5, 4.5),
        (LAST, 4, 4.5, 4.5),
        (MIDDLE, 3.5, 1.0, 4.0),
        (FIRST, -1, 4.5, 4.5),
    ],
)
def test_a_backward_has_the_gradients_of_its_head_first(
    held: Stage, position: float, seconds: float, of: float
) -> None:
    assert share_of_backward(COSTS, held, position, ActionKind.B) == pytest.approx(seconds / of)


def test_weights_gradients_come_layer_by_layer() -> None:
    """Those of embedding and head are in the backward before."""
    assert share_of_backward(COSTS, LAST, 5, ActionKind.W) == pytest.approx(0.5)
    assert share_of_backward(COSTS, FIRST, 0, ActionKind.W) == pytest.approx(1.0)
