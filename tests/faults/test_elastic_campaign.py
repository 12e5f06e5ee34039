"""A sample of the campaign of real faults; ``python -m tests.faults.elastic_campaign`` runs as many as one likes."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

import pytest

from hetero.errors import ConfigError
from tests.faults.elastic_campaign import DOCUMENTED_ENDS, Run, run_all, tell
from tests.faults.elastic_scenarios import NEEDS_ROOT, TAKES_A_NODE, FaultKind, Scenario, scenario
from tests.helpers.commands import ROOT
from tests.helpers.network_namespaces import can_make_namespaces

SEEDS = (100, 6586, 1972)
"""On two, three and four nodes; a run of the tests takes one. They draw each fault of another kind, as few seeds do."""

FAULTS = 12

SAMPLED = "test_a_run_with_faults_ends_as_without_or_as_documented"


def test_a_seed_says_all_about_a_run() -> None:
    assert scenario(5, num_faults=20) == scenario(5, num_faults=20)
    assert scenario(5, num_faults=20) != scenario(6, num_faults=20)


def test_all_kinds_of_faults_are_drawn_and_a_node_is_left() -> None:
    drawn: Counter[FaultKind] = Counter()
    for seed in range(60):
        what = scenario(seed, num_faults=16)
        away = 0
        for fault in what.faults:
            drawn[fault.kind] += 1
            away += 2 if fault.kind == "kill node and another" else int(fault.kind in TAKES_A_NODE)
            away -= fault.kind == "join"
            assert 0 <= away < len(what.types), str(what)
    assert drawn.keys() == set(get_args(FaultKind))
    assert min(drawn.values()) >= 5


def test_the_sample_has_all_kinds_and_options() -> None:
    sample = [scenario(seed, num_faults=FAULTS) for seed in SEEDS]
    drawn = [{fault.kind for fault in each.faults} for each in sample]
    assert set().union(*drawn) == set(get_args(FaultKind))
    assert {len(kinds) for kinds in drawn} == {FAULTS}
    assert {len(each.types) for each in sample} == {2, 3, 4}
    assert {each.store for each in sample} == {each.distributed_optimizer for each in sample} == {False, True}


def test_nothing_that_needs_root_is_drawn_for_others() -> None:
    kinds = {fault.kind for seed in range(60) for fault in scenario(seed, num_faults=16, is_root=False).faults}
    assert kinds == set(get_args(FaultKind)) - NEEDS_ROOT.keys()


def test_the_ends_that_runs_may_have_are_documented() -> None:
    page = (ROOT / "docs" / "elastic.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (\d+) \| (\w+) \|", page, re.MULTILINE)
    for text, (code, _) in DOCUMENTED_ENDS.items():
        assert [row[1:] for row in rows if text in row[0]] == [(str(code), "kept")], text


def test_a_campaign_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four faults each, the third of which never comes: 10 take four runs."""
    begun: list[int] = []

    def run_scenario(what: Scenario, folder: Path, oracle: Path) -> Run:
        begun.append(what.seed)
        folder.mkdir(exist_ok=True)
        return Run(what, kinds=[fault.kind for fault in what.faults[:3]], recoveries_s=[("kill rank", 1.5)])

    monkeypatch.setattr("tests.faults.elastic_campaign.run_scenario", run_scenario)
    monkeypatch.setattr("tests.faults.elastic_campaign.uninterrupted", lambda *_, **__: None)

    def campaign(faults: int, num_faults: int = 4) -> list[Run]:
        scenarios = (scenario(seed, num_faults=num_faults) for seed in itertools.count())
        return list(run_all(scenarios, tmp_path, parallel=2, faults=faults))

    first = campaign(5)
    assert begun == [0, 1]
    assert sorted(run.scenario.seed for run in campaign(10)) == begun == [0, 1, 2, 3]
    assert list(campaign(6)) == sorted(first, key=lambda run: run.scenario.seed)
    with pytest.raises(ConfigError, match="name another folder to --keep"):
        campaign(5, num_faults=5)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Run]:
    """By seed, of those whose turn it is; with ``--all`` all run beside one another, as they mostly wait."""
    is_root = can_make_namespaces()
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = [cast("int", item.callspec.params["seed"]) for item in items if item.originalname == SAMPLED]
    scenarios = [scenario(seed, num_faults=FAULTS, is_root=is_root) for seed in chosen]
    return {
        run.scenario.seed: run for run in run_all(scenarios, tmp_path_factory.mktemp("campaign"), parallel=len(chosen))
    }


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.rotates("seeds")) for seed in SEEDS])
def test_a_run_with_faults_ends_as_without_or_as_documented(seed: int, runs: Mapping[int, Run]) -> None:
    assert not runs[seed].problem, tell(runs[seed])
