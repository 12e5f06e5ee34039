"""Cases of the elastic part of the fault matrix in turns; ``python -m tests.faults.matrix`` runs all of them."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.faults.elastic_matrix import ELASTIC_CASES, ElasticCase, ElasticOutcome, run_elastic_cases, runnable_cases

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 2
"""Each run takes a case of each: of all kinds by turns."""


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[ElasticCase, ElasticOutcome]:
    """By case, of those whose turn it is."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    cases: list[Any] = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]
    chosen = [case for case in cases if case in runnable_cases()]
    return dict(zip(chosen, run_elastic_cases(chosen, tmp_path_factory.mktemp("jobs"), parallel=2), strict=True))


def _in_turns() -> Iterator[Any]:
    for number, case in enumerate(ELASTIC_CASES):
        yield pytest.param(case, id=str(case), marks=pytest.mark.rotates(f"elastic {number % ROWS}"))


@pytest.mark.parametrize("case", list(_in_turns()))
def test_a_job_keeps_what_it_has(case: ElasticCase, outcomes: Mapping[ElasticCase, ElasticOutcome]) -> None:
    if case not in outcomes:
        pytest.skip("needs root, to mount a small file system")
    outcome = outcomes[case]
    assert not outcome.problems, f"{outcome.problems}\n{outcome.told}"
