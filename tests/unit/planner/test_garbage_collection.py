"""How often the garbage collector looks for cycles while plans are searched for."""

import gc

from hetero.planner.garbage_collection import LESS_OFTEN, rare_garbage_collection


def test_it_is_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with rare_garbage_collection():
        assert gc.get_threshold() == (LESS_OFTEN * before[0], *before[1:])
    assert gc.get_threshold() == before
