"""No order of events breaks an invariant, and each way in which the protocol could be wrong is found by some order."""

import pytest

from tests.helpers.elastic_simulation import Simulation
from tests.helpers.protocol_explorer import Explorer
from tests.helpers.protocol_mutants import MUTANTS
from tests.helpers.protocol_state import Violation

SMALL = {"nodes": 2, "steps": 2, "failures": 1, "returns": 0}
COMES_BACK = {"nodes": 2, "steps": 5, "failures": 1, "returns": 1, "every": 2}

CONFIGURATIONS = {
    "three nodes": {"nodes": 3, "steps": 4, "failures": 0, "returns": 0},
    "three nodes, a failure": {"nodes": 3, "steps": 2, "failures": 1, "returns": 0},
    "two nodes, a failure": {"nodes": 2, "steps": 4, "failures": 1, "returns": 0},
    "two nodes, two failures": {"nodes": 2, "steps": 1, "failures": 2, "returns": 0},
    "two nodes, one comes back": {"nodes": 2, "steps": 1, "failures": 1, "returns": 1},
    "the store goes back": {"nodes": 2, "steps": 2, "failures": 0, "returns": 0, "rewinds": 1},
    "three nodes, the store goes back": {"nodes": 3, "steps": 1, "failures": 0, "returns": 0, "rewinds": 1},
    "nodes leave, up to all": {"nodes": 2, "steps": 2, "failures": 0, "returns": 0, "leaves": 2},
    "nodes leave, up to all, a failure": {"nodes": 2, "steps": 1, "failures": 1, "returns": 0, "leaves": 2},
    "the store takes no writes": {"nodes": 2, "steps": 1, "failures": 1, "returns": 0, "refusals": 1},
    "a job that was given up starts again": {
        "nodes": 2,
        "steps": 2,
        "failures": 1,
        "returns": 0,
        "reopens": 1,
        "min_nodes": 2,
    },
}

NEEDED = {
    "votes before a fetched unit is verified": {**SMALL, "failures": 2},
    "ignores the lineage": COMES_BACK,
    "asks for copies while ranks still run": {**SMALL, "reduced": False},
    "deletes copies when given up": {**SMALL, "reopens": 1, "min_nodes": 2},
    "takes etcd's lineage after it went back": {**SMALL, "failures": 0, "rewinds": 1},
    "numbers epochs by etcd alone": {**SMALL, "failures": 0, "rewinds": 1},
    "takes epochs of one number for one": {**SMALL, "steps": 1, "returns": 1, "rewinds": 1},
    "believes a store that has forgotten a commit": {**SMALL, "nodes": 3, "steps": 1, "failures": 0, "rewinds": 1},
    "finishes without a save if all nodes leave": {**SMALL, "failures": 0, "leaves": 2},
    "leaves with 0 though no node stays": {**SMALL, "failures": 0, "leaves": 2},
}
"""What a mutant needs to be found, where that is more than a small exploration."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_order_of_events_keeps_the_invariants(name: str) -> None:
    num_states, num_moves = Explorer(**CONFIGURATIONS[name]).explore()
    assert num_moves > num_states > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_protocol_is_found(name: str) -> None:
    with pytest.raises(Violation):
        Explorer(**NEEDED.get(name, SMALL), rules=MUTANTS[name]).explore()


@pytest.mark.parametrize("name", ["has one slot", "commits by majority", "never gives up a copy"])
def test_a_wrong_protocol_is_found_by_all_reductions_too(name: str) -> None:
    """Also those that are only right for recovery and agents as they are, which these mutants leave alone."""
    with pytest.raises(Violation):
        Explorer(**SMALL, rules=MUTANTS[name], forgets=True).explore()


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        SMALL,
        {**SMALL, "failures": 0, "rewinds": 1},
        {**SMALL, "reopens": 1, "min_nodes": 2},
        {**SMALL, "steps": 1, "leaves": 1},
    ],
    ids=["failures", "the store goes back", "starts again", "nodes leave"],
)
def test_the_orders_that_are_left_out_lead_nowhere_else(what: dict[str, int]) -> None:
    """With and without them, leaders can decide on the same epochs."""
    made = []
    for reduced in (True, False):
        explorer = Explorer(**what, reduced=reduced)
        explorer.explore()
        made.append(explorer.decided)
    assert made[0] == made[1]


@pytest.mark.slow
def test_seeds_of_the_campaign_keep_the_invariants() -> None:
    """The runs end with all steps done once, or in one of the ways that are documented."""
    ends = [Simulation(seed).run() for seed in range(100)]
    assert set(ends) <= {
        "finished",
        "no whole step",
        "all nodes are lost",
        "too few nodes",
        "restarts without progress",
    }
    assert ends.count("finished") > 85


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("overwrites the committed slot", 35),
        ("has one slot", 35),
        ("commits on own copies alone", 9),
        ("commits by majority", 193),
        ("never gives up a copy", 50),
        ("deletes old epochs before its first commit", 12),
        ("writes an epoch without comparing", 0),
        ("deletes copies when given up", 16),
        ("ends with 0 without a save", 18),
        ("takes etcd's lineage after it went back", 44),
        ("numbers epochs by etcd alone", 136),
    ],
)
def test_the_campaign_finds_what_is_wrong(name: str, seed: int) -> None:
    with pytest.raises(Violation):
        Simulation(seed, MUTANTS[name]).run()


def test_a_seed_is_one_run() -> None:
    first, second = Simulation(7), Simulation(7)
    assert (first.run(), first.now_s, first.faults) == (second.run(), second.now_s, second.faults)
