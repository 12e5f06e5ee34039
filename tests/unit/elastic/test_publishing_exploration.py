"""No order of operations on the object store publishes what is not whole, whoever stands still meanwhile."""

import pytest

from tests.helpers.cases import slow
from tests.helpers.protocol_state import Violation
from tests.helpers.publishing_stories import LATER_STEP, MUTANTS, SAME_STEP, UPLOADS, stories


@pytest.mark.parametrize("name", [UPLOADS, *slow(SAME_STEP, LATER_STEP)])
def test_what_is_published_is_whole(name: str) -> None:
    explorer = dict(stories())[name]
    num_situations, num_moves = explorer.explore()
    assert num_moves > num_situations > 1000
    published = [{key for key, _ in store if key.endswith("/SHA256SUMS")} for store in explorer.ends]
    if name == LATER_STEP:
        assert all("step_00000110/SHA256SUMS" in each for each in published)
    else:
        # An answer that gets lost, or the leader before, can be in the way of this step, but not of each order.
        assert {"step_00000100/SHA256SUMS"} in published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "story"),
    [
        ("publishes without a look at the claims", SAME_STEP),
        ("overwrites index files", SAME_STEP),
        ("deletes a published step in any order", LATER_STEP),
    ],
)
def test_wrong_publishing_is_found(name: str, story: str) -> None:
    with pytest.raises(Violation):
        dict(stories(MUTANTS[name]))[story].explore()
