"""The figures behind ranges are what the published layers show; those of runs: test_published_runs.py."""

import math

import pytest

from hetero.cost.layers.confidence import LAYER_ERRORS, Confidence
from tests.helpers.measured_errors import factor, layer_factors

FILL_IN = "fill in what python tests/bench/bench_ranges.py prints"


def test_every_sort_of_basis_has_a_figure() -> None:
    assert set(LAYER_ERRORS) == set(Confidence)
    factors = [LAYER_ERRORS[confidence].factor for confidence in sorted(Confidence)]
    assert factors == sorted(factors), "what is less measured is not more certain"


@pytest.mark.slow
def test_figures_of_layers_are_the_computed_ones() -> None:
    assert layer_factors() == {confidence: error.factor for confidence, error in LAYER_ERRORS.items()}, FILL_IN


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([0.0] * 19 + [math.log(3)], 1.0),
        ([math.log(1.2)] * 3 + [-math.log(1.2)] * 3, 1.2),
        ([math.log(1 + i / 10) for i in range(11)], 1.9),
    ],
)
def test_a_factor_holds_nine_of_ten(errors: list[float], expected: float) -> None:
    assert factor(errors) == pytest.approx(expected, abs=0.011)


def test_one_case_is_no_range() -> None:
    with pytest.raises(ValueError, match="1 cases are too few"):
        factor([0.1])
