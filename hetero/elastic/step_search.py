"""Looks for the step that the next epoch goes on from, in the copies of nodes and in the object store.

The membership store says which epoch was the newest, but it may have gone back to an earlier state. So nodes and object
store are asked too, and the newest epoch of all of them is the one that the next follows.
"""

import asyncio
import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetero.checkpoint.folder import latest_step
from hetero.elastic.job_store import JobState
from hetero.elastic.leadership import LackOfStep
from hetero.elastic.object_store import StoredHistory
from hetero.elastic.planning_problem import PlanningProblem
from hetero.elastic.publishing import Publisher
from hetero.elastic.records import Ancestry, Inventory
from hetero.elastic.recovery import (
    INITIAL_WEIGHTS,
    BadCopy,
    History,
    Restore,
    choose_history,
    lineage_of,
    why_none_is_whole,
)
from hetero.errors import ObjectStoreError

_PATIENCE_S = 1.0
"""With an object store that may not be needed: nodes have a step."""
_NEEDED_PATIENCE_S = 30.0
"""With an object store that alone can have a step, until it is looked whether a node has come that has one."""
_ASK_STORE_EVERY_S = 2.0
"""While there is nothing else to go on from."""


@dataclass(frozen=True, slots=True)
class _Lack:
    """A search that found nothing: among which incarnations, and until when this is believed."""

    lack: LackOfStep
    among: frozenset[str]
    until_s: float


class StepSearch:
    """What one leader knows of copies, of the object store, and of the epochs that they are of.

    Args:
        missing_s: the longest that the object store is waited for.
        forget: the command that deletes what etcd has of the job.
        show: prints a line.

    Attributes:
        inventories: of the nodes that have ended their ranks of the newest epoch, by incarnation.
        made: the newest epoch that this leader has made.
        committed: the newest step of which it has read that it was committed.
    """

    def __init__(
        self,
        publisher: Publisher | None,
        problem: PlanningProblem,
        *,
        missing_s: float,
        forget: str,
        show: Callable[[str], None],
    ) -> None:
        self.inventories: dict[str, Inventory] = {}
        self.made = Ancestry()
        self.committed = 0
        self._publisher = publisher
        self._problem = problem
        self._missing_s = missing_s
        self._forget = forget
        self._show = show
        self._checkpoint = 0
        self._lack: _Lack | None = None

    @property
    def lack(self) -> LackOfStep | None:
        """Why the last search found nothing; ``None`` if it found a step, or if it is worth to search again."""
        last = self._lack
        if last is None or last.among != self.inventories.keys() or time.monotonic() >= last.until_s:
            return None
        return last.lack

    @property
    def again_s(self) -> float:
        """When it is worth to search again though no other node has come, on the clock of ``time.monotonic``."""
        return math.inf if self._lack is None or self.lack is None else self._lack.until_s

    def history(self, state: JobState) -> History:
        """What the next epoch goes on with, as far as is known; before the first that of the object store."""
        in_store = Ancestry() if state.epoch is None else state.epoch.ancestry
        stored, claimed = self._stored, Ancestry(ids=self._stored.ids, lineage=self._stored.lineage)
        known = [self.made, *(each.memory.newest for each in self.inventories.values())]
        is_first = max(each.number for each in [in_store, *known]) == 0
        if is_first:
            in_store = Ancestry(lineage=stored.lineage)
        elif any(each.number and claimed.follows(each) for each in [in_store, *known]):
            known.append(claimed)
        # Before the first epoch nothing is committed, so a number that is noted is of epochs that are lost.
        noted = 0 if is_first and "committed" in state.unreadable else state.committed
        history = choose_history(
            list(self.inventories.values()),
            in_store=in_store,
            known=[each for each in known if each.number],
            noted=max(self._newest_stored if is_first else self.committed, noted),
            stored=stored.steps,
            bad=frozenset(BadCopy.parse(each) for each in state.bad_copies),
        )
        step = self._newest_stored if history.restore is None else history.restore.start.step
        if is_first and not noted and self._checkpoint > step:
            # The ranks load it, as where a job without an object store begins.
            restore = Restore(start=INITIAL_WEIGHTS, sources={})
            return dataclasses.replace(history, committed=0, restore=restore)
        return history

    def next_epoch(self, history: History, state: JobState) -> Ancestry:
        """The epoch that goes on with ``history``. No node that is there has seen another one with its number."""
        assert history.restore is not None
        before, start = history.newest, history.restore.start
        seen = [each.memory.newest.number for each in self.inventories.values()]
        number = max([before.number, state.newest_number, self.made.number, self._stored.newest_claim, *seen]) + 1
        return Ancestry(
            ids={**before.ids, number: secrets.token_hex(4)}, lineage=lineage_of(number, start, before.lineage)
        )

    async def find(self, state: JobState) -> History | None:
        """Look for a step, in the object store too; ``None`` if there is none, and :attr:`lack` says why.

        Raises:
            ConfigError: the object store holds another run.
            ObjectStoreError: the job begins, and the object store refuses or does not answer.
        """
        among = frozenset(self.inventories)
        try:
            await self._ask_store(state)
        except ObjectStoreError as error:
            if self.history(state).newest.number == 0:
                raise
            lack = LackOfStep(reason=str(error), exit_code=2)
        else:
            history = self.history(state)
            if history.restore is not None:
                if self._newest_stored and history.newest.number == 0 and history.restore.start == INITIAL_WEIGHTS:
                    self._show(
                        f"hetero: the checkpoint of step {self._checkpoint} in {self._problem.run.save} is newer than "
                        f"step {self._newest_stored} of the object store: the job begins from it"
                    )
                return history
            why = why_none_is_whole(
                history.copies,
                lineage=history.newest.lineage,
                committed=history.committed,
                object_store=self._publisher is not None,
            )
            instead = f"to go on from the last checkpoint of --save: {self._forget}, then start the agents with --load"
            lack = LackOfStep(reason=f"{why}; {instead}", exit_code=1)
        until_s = math.inf if self._publisher is None else time.monotonic() + _ASK_STORE_EVERY_S
        self._lack = _Lack(lack, among, until_s)
        return None

    async def _ask_store(self, state: JobState) -> None:
        """See what the object store has; with patience only if there is nothing else to go on from.

        Raises:
            ObjectStoreError: it does not answer, and there is nothing else.
            ConfigError: it holds another run.
        """
        if self._publisher is None:
            return
        history = self.history(state)
        is_first = history.newest.number == 0
        nothing_else = is_first or history.restore is None
        needed_s = self._missing_s if is_first else min(_NEEDED_PATIENCE_S, self._missing_s)
        try:
            # A job that begins has nothing to lose yet: a refusal ends it at once.
            await self._publisher.refresh(
                patience_s=needed_s if nothing_else else _PATIENCE_S, waits_for_fix=not is_first
            )
        except ObjectStoreError:
            if nothing_else:
                raise
        if is_first:
            self._checkpoint = await asyncio.to_thread(self._newest_checkpoint)
            await self._publisher.check_model(self._problem.trained_model)

    def _newest_checkpoint(self) -> int:
        """The step that the program's flags have a job go on from, 0 for none."""
        run = self._problem.run
        if not run.resumes or run.save is None:
            return 0
        # Ranks say what is wrong with the folder.
        with contextlib.suppress(OSError):
            return latest_step(Path(run.save)) or 0
        return 0

    @property
    def _stored(self) -> StoredHistory:
        """What is in the object store, as far as it is known."""
        return StoredHistory() if self._publisher is None else self._publisher.history

    @property
    def _newest_stored(self) -> int:
        return 0 if self._publisher is None else self._publisher.newest_step
