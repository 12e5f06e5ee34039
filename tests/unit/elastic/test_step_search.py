"""What a leader finds to go on from, and when it looks again."""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.elastic.job_store import JobState
from hetero.elastic.object_store import StoredHistory
from hetero.elastic.records import Ancestry, HeldStep, Inventory, NodeMemory, RunFlags
from hetero.elastic.recovery import INITIAL_WEIGHTS
from hetero.elastic.step_search import StepSearch
from hetero.errors import ObjectStoreError
from tests.helpers.elastic_epochs import epoch_of, node_info

FIRST = epoch_of([node_info("a"), node_info("b")])
STATE = JobState(epoch=FIRST, committed=8)


def inventory(name: str, units: str, newest: Ancestry = FIRST.ancestry) -> Inventory:
    return Inventory(
        node=name,
        steps=(HeldStep(epoch=1, step=8, units=frozenset(units)),),
        units_of_epoch={1: frozenset("ab")},
        id_of_epoch={1: FIRST.id},
        memory=NodeMemory(newest=newest),
    )


def search(publisher: Any = None, *, resumes_in: Path | None = None, show: Callable[[str], None] = print) -> StepSearch:
    run = RunFlags(num_steps=100, save=str(resumes_in), resumes=resumes_in is not None)
    problem = SimpleNamespace(trained_model=None, run=run)
    return StepSearch(publisher, problem, missing_s=600.0, forget="hetero elastic forget --job j", show=show)  # type: ignore[arg-type]


def test_a_search_that_found_nothing_is_done_again_when_a_node_comes() -> None:
    found = search()
    found.inventories = {"a1": inventory("a", "a")}
    assert asyncio.run(found.find(STATE)) is None
    assert found.lack is not None
    assert found.lack.exit_code == 1
    assert found.lack.reason.startswith(
        "no step is whole among a, and step 8 had been committed: of step 8 they lack b"
    )
    assert "hetero elastic forget --job j, then start the agents with --load" in found.lack.reason
    assert found.again_s == math.inf
    found.inventories["b1"] = inventory("b", "b")
    assert found.lack is None
    history = asyncio.run(found.find(STATE))
    assert history is not None
    assert history.restore is not None
    assert history.restore.sources == {"a": ("a",), "b": ("b",)}


def test_a_job_that_has_committed_does_not_start_from_initial_weights_though_its_epoch_is_lost() -> None:
    """As where somebody has deleted that key, and no node has copies. A note that cannot be read says nothing."""
    none = Inventory(node="a", steps=(), units_of_epoch={}, id_of_epoch={}, memory=NodeMemory())
    for state, starts in (
        (JobState(), True),
        (JobState(committed=1, unreadable={"committed": "no number"}), True),
        (JobState(committed=8), False),
    ):
        found = search()
        found.inventories = {"a1": none}
        assert (asyncio.run(found.find(state)) is not None) == starts
    assert found.lack is not None
    assert found.lack.reason.startswith("no step is whole among a, and step 8 had been committed")


def test_the_number_of_an_epoch_is_larger_than_all_that_were_seen() -> None:
    given_up = Ancestry(ids={1: "another", 7: "x"}, lineage={1: INITIAL_WEIGHTS, 7: INITIAL_WEIGHTS})
    found = search()
    found.inventories = {"a1": inventory("a", "ab"), "b1": inventory("b", "", newest=given_up)}
    history = asyncio.run(found.find(STATE))
    assert history is not None
    made = found.next_epoch(history, STATE)
    assert (made.number, made.follows(FIRST.ancestry), sorted(made.lineage)) == (8, True, [1, 8])


def test_numbers_of_epochs_go_on_from_those_of_a_forgotten_job() -> None:
    found = search()
    begins = JobState(forgotten={"mark": 4, "older": 2})
    history = asyncio.run(found.find(begins))
    assert history is not None
    made = found.next_epoch(history, begins)
    assert (made.number, len(made.ids)) == (5, 1)


@pytest.mark.parametrize(("checkpoint", "is_taken"), [(7, False), (8, False), (9, True)])
def test_a_job_begins_from_its_checkpoint_if_that_is_newer_than_the_object_store(
    checkpoint: int, is_taken: bool, tmp_path: Path
) -> None:
    class Store:
        history = StoredHistory(
            newest_claim=3,
            ids={3: "claimed"},
            lineage={3: INITIAL_WEIGHTS},
            steps=(HeldStep(epoch=3, step=8, units=frozenset("ab")),),
        )
        newest_step = 8

        async def refresh(self, *, patience_s: float, waits_for_fix: bool) -> None: ...

        async def check_model(self, _: object) -> None: ...

    (tmp_path / f"step_{checkpoint:08d}").mkdir()
    (tmp_path / f"step_{checkpoint:08d}" / "SHA256SUMS").touch()
    shown: list[str] = []
    found = search(Store(), resumes_in=tmp_path, show=shown.append)
    history = asyncio.run(found.find(JobState()))
    assert history is not None
    assert history.restore is not None
    assert (history.restore.start.step, history.committed) == ((0, 0) if is_taken else (8, 8))
    assert any("checkpoint of step 9" in line and "step 8 of the object store" in line for line in shown) is is_taken
    assert found.next_epoch(history, JobState()).number == 4
    loads_nothing = asyncio.run(search(Store()).find(JobState()))
    assert loads_nothing is not None
    assert loads_nothing.restore is not None
    assert loads_nothing.restore.start.step == 8


def test_an_object_store_that_is_needed_and_does_not_answer_is_asked_again_and_said_at_once() -> None:
    class Silent:
        history = StoredHistory()
        newest_step = 0

        async def refresh(self, *, patience_s: float, waits_for_fix: bool) -> None:
            raise ObjectStoreError("object store s3://x: away")

    found = search(Silent())
    with pytest.raises(ObjectStoreError, match="away"):
        asyncio.run(found.find(JobState()))
    assert asyncio.run(found.find(STATE)) is None
    assert found.lack is not None
    assert (found.lack.exit_code, found.lack.reason) == (2, "object store s3://x: away")
    assert time.monotonic() < found.again_s < time.monotonic() + 3.0
    found.inventories = {"a1": inventory("a", "ab")}
    assert asyncio.run(found.find(STATE)) is not None
