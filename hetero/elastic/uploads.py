"""Uploads the step that the ranks of a node hold, beside training, which never waits for it nor ends because of it."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hetero.checkpoint.shard_files import LocalShardFile, check_whole
from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.copy_folder import epochs_in, read_placement
from hetero.elastic.events import EventLog
from hetero.elastic.held_uploads import held_units, holds_any, is_being_copied, release
from hetero.elastic.membership import Membership
from hetero.elastic.object_store import ObjectStore
from hetero.elastic.publishing import Publisher
from hetero.elastic.records import Copy, Epoch, RestorePoint, UploadedUnits, UploadSchedule
from hetero.errors import CheckpointError, ConfigError, ObjectStoreError

_LOOK_EVERY_S = 0.2
_HELD_WITHIN_S = 10.0
"""By all ranks of a node after the first of them, not counting the time of copies; a rank that could not says why."""

_CLAIMED_WITHIN_S = 60.0
"""By the leader, which claims an epoch when it begins."""

_SECOND_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def upload_schedule(text: str) -> UploadSchedule:
    """How often ``text`` says that a step is uploaded: ``500`` steps, or ``90s``, ``10m``, ``2h``.

    Raises:
        ConfigError: it says neither.
    """
    number, seconds = (text[:-1], _SECOND_UNITS[text[-1:]]) if text[-1:] in _SECOND_UNITS else (text, None)
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--upload-every {text!r}: give a number of steps, as 500, or a time, as 90s, 10m or 2h")
    if seconds is None:
        return UploadSchedule(every_steps=int(number))
    return UploadSchedule(every_s=int(number) * seconds)


class Uploads:
    """What a node puts into the object store, epoch after epoch.

    Args:
        options: of the agent, with a store.
        holder: under which the job's leaders claim epochs; nothing is put there for an epoch of others.
        on_news: is called when :attr:`uploaded` has changed.

    Attributes:
        uploaded: the newest step of which all is there that this node's ranks own; ``None`` in an epoch before that.
    """

    def __init__(
        self,
        options: AgentOptions,
        *,
        holder: str,
        events: EventLog,
        show: Callable[[str], None],
        on_news: Callable[[], None],
    ) -> None:
        self.uploaded: UploadedUnits | None = None
        assert options.object_store is not None, "has one"
        self._store = ObjectStore(options.object_store)
        self._options = options
        self._schedule = options.uploads
        self._stored: RestorePoint | None = None
        self._stored_since_s = time.monotonic()
        self._folder = options.folder
        self._holder = holder
        self._events = events
        self._show = show
        self._on_news = on_news
        self._task: asyncio.Task[None] | None = None
        self._has_told = False
        if (steps := self._schedule.every_steps) is not None:
            often = f"every {steps} steps"
        else:
            often = f"every {self._schedule.every_s:g} s"
        show(f"hetero: {often} a committed step goes to {self._store.url} (--upload-every)")

    def publisher(self, membership: Membership) -> Publisher:
        """What a leader needs, for the same store."""
        return Publisher(
            self._store,
            membership=membership,
            events=self._events,
            holder=self._holder,
            keep=self._options.keep_uploads,
            show=self._show,
        )

    async def begin(self, epoch: Epoch, *, stored: RestorePoint | None) -> UploadSchedule:
        """Upload what the ranks of this node hold from now on; what an earlier epoch held is let go.

        Args:
            stored: the newest step in the store.

        Returns:
            For these ranks, when the next upload is due.
        """
        await self.end()
        for number in epochs_in(self._folder):
            await self._release(number)
        self.uploaded = None
        ranks = next(each.ranks for each in epoch.nodes if each.node.name == self._options.name)
        self._task = asyncio.create_task(self._upload_all(epoch.number, ranks))
        now_s = time.monotonic()
        if stored != self._stored:
            self._stored, self._stored_since_s = stored, now_s
        in_s = max(0.0, self._stored_since_s + (self._schedule.every_s or 0.0) - now_s)
        after_step = 0 if stored is None else stored.step
        return dataclasses.replace(self._schedule, in_s=in_s, after_step=after_step)

    async def end(self) -> None:
        """Upload no more."""
        if self._task is not None:
            self._task.cancel()
            # Of whatever ends it, an error too, nobody wants to hear now.
            await asyncio.wait([self._task])
            self._task = None

    async def _upload_all(self, epoch: int, ranks: tuple[int, ...]) -> None:
        while True:
            step = 0
            try:
                held, num_units = await self._next_held(epoch, ranks)
                step = next(copy.step for copy, _ in held.values())
                await self._wait_for_claim(epoch)
                for copy, path in held.values():
                    await asyncio.to_thread(check_whole, LocalShardFile(path), copy.shard)
                    await self._store.upload(copy, path)
                self.uploaded = UploadedUnits(epoch=epoch, step=step, units=frozenset(held), num_units=num_units)
                self._has_told = False
                self._events.note("uploaded", epoch=epoch, step=step)
                self._on_news()
            except (ObjectStoreError, CheckpointError, ConfigError, OSError) as error:
                self._tell(epoch, step, str(error))
            if not await self._release(epoch):
                # The same step would be found again.
                return

    async def _release(self, epoch: int) -> bool:
        """Let go of what is held of an epoch; whether the file system, which may be read-only, let that happen."""
        try:
            await asyncio.to_thread(release, self._folder, epoch)
        except OSError as error:
            self._tell(epoch, 0, str(error))
            return False
        return True

    async def _wait_for_claim(self, epoch: int) -> None:
        """Wait until the leader has claimed ``epoch``: before that its names may be another run's.

        Raises:
            ObjectStoreError: it is not claimed, or the store does not answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CLAIMED_WITHIN_S
        while (holder := await self._store.holder_of(epoch)) != self._holder:
            if holder is not None or loop.time() > deadline:
                raise ObjectStoreError(f"object store {self._store.url}: epoch {epoch} is not claimed for this job")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _next_held(self, epoch: int, ranks: tuple[int, ...]) -> tuple[Mapping[str, tuple[Copy, Path]], int]:
        """The units of these ranks, once all of one step are held, and how many units the step has in all.

        Raises:
            CheckpointError: some never come.
        """
        while not holds_any(self._folder, epoch):
            await asyncio.sleep(_LOOK_EVERY_S)
        placement = read_placement(self._folder, epoch)
        assert placement is not None, "ranks have begun the epoch with it"
        own = [unit.name for unit in placement.units if unit.owner in ranks]
        try:
            async with asyncio.timeout(_HELD_WITHIN_S) as limit:
                while (held := held_units(self._folder, epoch, own)) is None:
                    if is_being_copied(self._folder, epoch):
                        limit.reschedule(asyncio.get_running_loop().time() + _HELD_WITHIN_S)
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            raise CheckpointError("a rank of this node could not hold its part; see what it printed") from None
        return held, len(placement.units)

    def _tell(self, epoch: int, step: int, error: str) -> None:
        """Say what went wrong; to people once, as a later upload may have the same trouble."""
        self._events.note("upload_failed", epoch=epoch, step=step, detail=error)
        if not self._has_told:
            self._has_told = True
            self._show(f"hetero: step {step} was not uploaded, training goes on and a later one will be tried: {error}")
