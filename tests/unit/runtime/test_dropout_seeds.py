"""Dropout's seeds: one per place of a plan, as far as the docstring says."""

from itertools import product

from hetero.plan.ir import Placement
from hetero.runtime.mcore import _stage_seed


def test_each_of_a_hundred_stages_and_replicas_has_seeds_of_its_own() -> None:
    places = [
        Placement(replica, stage, dp_rank, tp_rank)
        for replica, stage, dp_rank, tp_rank in product((0, 1, 50, 99), (0, 1, 50, 99), (0, 1, 2), (0, 1, 99))
    ]
    seeds = [_stage_seed(1234, place) + place.tp_rank for place in places]
    assert len(set(seeds)) == len(places)


def test_beyond_that_seeds_repeat() -> None:
    """What the docstring says of plans with more."""
    assert _stage_seed(7, Placement(1, 0, 0, 0)) == _stage_seed(7, Placement(0, 100, 0, 0))
    assert _stage_seed(7, Placement(100, 0, 0, 0)) == _stage_seed(7, Placement(0, 0, 1, 0))
