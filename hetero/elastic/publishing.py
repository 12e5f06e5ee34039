"""What the leader does with the object store: claims epochs, publishes steps that are whole there, deletes old ones.

None of it holds up training: a store that does not answer is asked again, one that refuses is left alone and that is
said.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from hetero.elastic.events import EventLog
from hetero.elastic.job_store import JobState
from hetero.elastic.membership import Membership
from hetero.elastic.object_store import ObjectStore, StoredHistory
from hetero.elastic.records import Epoch, HeldStep, NodeReport, RestorePoint
from hetero.elastic.recovery import OBJECT_STORE, BadCopy, last_steps
from hetero.errors import CheckpointError, ConfigError, MembershipStoreError, ObjectStoreError, ObjectStoreRefusedError
from hetero.spec.model import ModelSpec, differing_fields

_RETRY_S = 2.0

_SILENT_S = 5.0
"""After which a store that has not answered is named: one request to a host that is away takes a minute."""


def whole_upload(reports: Iterable[NodeReport], *, epoch: int) -> HeldStep | None:
    """The newest step of an epoch of which the nodes together have uploaded all units; ``None`` if there is none."""
    units: dict[int, set[str]] = {}
    num_units: dict[int, int] = {}
    for report in reports:
        if report.uploaded is not None and report.uploaded.epoch == epoch:
            step = report.uploaded.step
            units.setdefault(step, set()).update(report.uploaded.units)
            num_units[step] = report.uploaded.num_units
    whole = [step for step, found in units.items() if len(found) == num_units[step]]
    return HeldStep(epoch=epoch, step=max(whole), units=frozenset(units[max(whole)])) if whole else None


def counting_steps(
    steps: Collection[HeldStep], *, lineage: Mapping[int, RestorePoint], bad: AbstractSet[BadCopy]
) -> list[int]:
    """Those of the published steps from which the run can go on, ascending."""
    limits = last_steps(lineage)
    damaged = {(each.epoch, each.step) for each in bad if each.node == OBJECT_STORE}
    return sorted(
        held.step
        for held in steps
        if held.epoch in limits
        and ((limit := limits[held.epoch]) is None or held.step <= limit)
        and (held.epoch, held.step) not in damaged
    )


class Publisher:
    """The part of a leader that has to do with the object store; asynchronous.

    Args:
        holder: under which each leader of this job claims epochs: the name of the job, and the mark of its token.
        keep: how many published steps stay.
        show: prints a line for people.

    Attributes:
        history: what is in the store as far as it is known, empty at first.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        membership: Membership,
        events: EventLog,
        holder: str,
        keep: int,
        show: Callable[[str], None],
    ) -> None:
        self.history = StoredHistory()
        self._store = store
        self._membership = membership
        self._events = events
        self._holder = holder
        self._keep = keep
        self._show = show
        self._epoch = 0
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._state = JobState()
        self._told: type[Exception] | None = None

    @property
    def newest_step(self) -> int:
        """Of those that were published, be they whole or not; 0 for none."""
        return max([*(held.step for held in self.history.steps), *self.history.damaged], default=0)

    async def refresh(self, *, patience_s: float, waits_for_fix: bool = True) -> None:
        """Ask the store what it has, again and again for ``patience_s`` seconds; what it answers is said at once.

        Args:
            waits_for_fix: a refusal is asked again, too: a policy may be corrected meanwhile.

        Raises:
            ObjectStoreError: it has not answered, or refused; with what it said last.
            ConfigError: what is there is not of this version.
        """
        last: ObjectStoreError | None = None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        silent = f"object store {self._store.url}: no answer"
        saying = loop.call_later(_SILENT_S, self._say, silent, patience_s)
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        self.history = await self._store.history()
                        self._told = None
                        return
                    except ObjectStoreError as error:
                        saying.cancel()
                        self._tell(error)
                        is_final = isinstance(error, ObjectStoreRefusedError) and not waits_for_fix
                        if is_final or loop.time() + _RETRY_S > deadline:
                            raise
                        if last is None:
                            self._say(str(error), patience_s)
                        last = error
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            problem = f"{silent} within {patience_s:g} s; is it reachable from here?"
            raise (last or ObjectStoreError(problem)) from None
        finally:
            saying.cancel()

    def _say(self, problem: str, patience_s: float) -> None:
        self._show(f"hetero: {problem}; it is asked again for {patience_s:g} s (--wait-for-nodes)")

    async def check_model(self, model: ModelSpec) -> None:
        """Check that the run in the store trains ``model``.

        Raises:
            ConfigError: it trains another.
        """
        for held in self.history.steps[-1:]:
            try:
                stored = await asyncio.to_thread(self._store.step, held.step)
            except CheckpointError:
                # Ranks find out what is wrong with it, and go on from another.
                continue
            if names := differing_fields(stored.state.model, model):
                differing = ", ".join(
                    f"{name} {getattr(stored.state.model, name)} != {getattr(model, name)}" for name in names
                )
                raise ConfigError(
                    f"object store {self._store.url}: it holds a run of another model: {differing} here; give this job "
                    "an --object-store of its own, or the flags of that run"
                )

    def follow(self, state: JobState) -> None:
        """Claim a new epoch, and publish what its nodes have uploaded."""
        self._state = state
        if state.epoch is None:
            return
        if self._task is None or self._epoch != state.epoch.number:
            self.close()
            self._epoch = state.epoch.number
            self._task = asyncio.create_task(self._work(state.epoch))
        self._news.set()

    def close(self) -> None:
        """Drop what is under way."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _work(self, epoch: Epoch) -> None:
        if not await self._insist(lambda: self._claim(epoch)):
            return
        published = 0
        while True:
            await self._news.wait()
            self._news.clear()
            whole = whole_upload(self._state.reports.values(), epoch=epoch.number)
            if whole is not None and whole.step > published:
                published = whole.step
                await self._insist(functools.partial(self._publish, epoch, whole))

    async def _claim(self, epoch: Epoch) -> None:
        newest = await self._store.newest_claim()
        before = max((each for each in epoch.lineage if each < newest), default=0)
        is_foreign = newest > 0 and await self._store.holder_of(newest) != self._holder
        if is_foreign and before and await self._store.holder_of(before) == self._holder:
            raise ConfigError(
                f"object store {self._store.url}: another run has claimed epoch {newest} there while this one was at "
                "work; give each run an --object-store of its own"
            )
        if newest > epoch.number and not is_foreign:
            # To delete steps by the lineage of an old epoch would delete those that the next one goes on from.
            raise ConfigError(
                f"object store {self._store.url}: this run has claimed epoch {newest} there already, so etcd went back "
                f"to epoch {epoch.number}; nothing is published or deleted before the next epoch"
            )
        await self._store.claim_epoch(epoch.number, holder=self._holder, lineage=epoch.lineage, ids=epoch.ids)
        await self._delete_old(epoch)

    async def _publish(self, epoch: Epoch, whole: HeldStep) -> None:
        if await self._store.publish(epoch=whole.epoch, step=whole.step, units=whole.units):
            self._events.note("published", epoch=whole.epoch, step=whole.step)
            point = RestorePoint(epoch=whole.epoch, step=whole.step)
            await asyncio.to_thread(self._membership.report_stored, point)
        await self._delete_old(epoch)
        await self._store.delete_leftovers(before_step=whole.step, epoch=whole.epoch)

    async def _delete_old(self, epoch: Epoch) -> None:
        """Delete all but the newest steps that count, and of those that do not the ones that this job has put there.

        Steps of forgotten jobs of its name go as well, once it has a step of its own.

        Nothing of later epochs: their leader may be at work while this one does not know yet that it was evicted.
        """
        self.history = await self._store.history()
        bad = frozenset(BadCopy.parse(each) for each in self._state.bad_copies)
        counting = counting_steps(self.history.steps, lineage=epoch.lineage, bad=bad)
        old = {step for step in counting[: -self._keep] if step != epoch.start.step}
        holders = {self._holder}
        if counting:
            name = self._holder.partition(" ")[0]
            holders.update(f"{name} {mark}" for mark in self._state.forgotten)
        for held in self.history.steps:
            if (
                held.step not in counting
                and held.epoch <= epoch.number
                and await self._store.holder_of(held.epoch) in holders
            ):
                old.add(held.step)
        if old:
            await self._store.delete(old)
            self.history = await self._store.history()

    async def _insist(self, action: Callable[[], Awaitable[None]]) -> bool:
        """Do it, again and again while store or etcd do not answer; whether it was allowed."""
        while True:
            try:
                await action()
                self._told = None
                return True
            except (ConfigError, CheckpointError) as error:
                self._tell(error)
                return False
            except (ObjectStoreError, MembershipStoreError) as error:
                self._tell(error)
                await asyncio.sleep(_RETRY_S)

    def _tell(self, error: Exception) -> None:
        """Note what goes wrong, once until something works: the store words each of its answers differently."""
        if self._told is not type(error):
            self._told = type(error)
            self._events.note("upload_failed", epoch=self._epoch, detail=str(error))
