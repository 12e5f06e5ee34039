"""Updates on the host what a plan leaves there, beside the computes of the device.

    main thread   ... last backward ──┬──────────────┬─ agree on the norm ─┬─ next forward ── waits for what it needs
    copies out                        └ OUT_G 9      └ OUT_G 4             │
    updates                                └ [PREVIEW 9]                   └ HOST_UPDATE 4 ─┬ HOST_UPDATE 9 ─┐
    weights come back                                                                       └ IN_P 4         └ IN_P 9

A thread copies the summed gradients of a bucket out as soon as they are there. Another updates: once the norm is known,
in the order in which the next forward needs the weights, and where the plan speculates also before, as if nothing were
clipped, on a second state (:mod:`.host_adamw`). What has not been previewed by then no longer is. What was previewed
wrongly is updated again; a forward never runs on weights whose norm was not known.

After a step that was clipped or skipped nothing is previewed in the next one: it would be wrong most likely
(heuristic).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from hetero.distributed.timing import Timing, Waitable
from hetero.plan.gradient_groups import Bucket
from hetero.plan.stream_roles import StreamRole
from hetero.runtime.buckets import LocalBucket
from hetero.runtime.host_adamw import BoundThreads, HostAdamW, HostUpdate
from hetero.runtime.host_copies import Arrived, HostCopies, host_copies
from hetero.runtime.update_groups import UpdateGroup
from hetero.schedule.actions import ActionKind

UpdateOf = Mapping[UpdateGroup, HostUpdate]
"""The update of each group of parameters."""


@dataclass(slots=True, eq=False)
class HostRange:
    """A range of a bucket that this rank updates on its host, and whose weights are all of one group.

    gradients: on the host, as the last sum left them; those of the bucket itself where they add up there.
    leaving: on the host, where its new weights leave from; the weights themselves where the device has no memory of
        its own, or where they live on the host.
    """

    local: LocalBucket
    place: slice
    group: UpdateGroup
    adamw: HostAdamW
    gradients: torch.Tensor
    leaving: torch.Tensor

    @property
    def weights(self) -> torch.Tensor:
        """On the device, or on the host where they live there."""
        return self.local.weights[self.place]

    @property
    def has_master(self) -> bool:
        """The state's weights are in another precision than the layers'."""
        return self.adamw.main.dtype != self.leaving.dtype

    @torch.no_grad()
    def loaded(self) -> None:
        """The tensors of the state have been written, and those of the weights where these are all: both agree now."""
        if self.has_master:
            self.leaving.copy_(self.adamw.main)
            self.weights.copy_(self.leaving)
        else:
            self.adamw.main.copy_(self.weights)

    @property
    def nbytes(self) -> int:
        """On the host, without gradients that add up there."""
        beside = 0 if self.leaving.data_ptr() == self.weights.data_ptr() else self.leaving.nbytes
        return self.adamw.nbytes + beside + (0 if self.local.adds_on_host else self.gradients.nbytes)


@dataclass(frozen=True, slots=True)
class _Copied:
    """Gradients that are on the host.

    at_s: when.
    previewed: the preview that they gave rise to, and when its weights are back.
    """

    at_s: float
    previewed: "Future[float] | None"


@dataclass(frozen=True, slots=True)
class _Updated:
    """A bucket whose update has been computed. Its weights are back at ``at_s``, or on their way in a stream."""

    arrived: Arrived
    at_s: float


@dataclass(slots=True, eq=False)
class _HostBucket:
    """The ranges of one bucket, and how far its step has come."""

    bucket: Bucket
    ranges: list[HostRange]
    copied: "Future[_Copied] | None" = None
    updated: "Future[_Updated] | None" = None


@dataclass(slots=True, eq=False)
class _Guess:
    """The update that previews of one step try, until the right one is known."""

    updates: UpdateOf
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _CopyOut:
    """A copy of summed gradients to the host.

    computed: comes back when the device has computed them; they are summed when ``works`` are over too.
    ready_s: when that is, if there are no works.
    updated: of the step before.
    source: the bucket's sums on the device; ``None`` where they are on the host.
    """

    bucket: _HostBucket
    computed: Callable[[], None]
    works: Sequence[Waitable]
    ready_s: float
    guess: _Guess | None
    updated: "Future[_Updated] | None"
    source: torch.Tensor | None


class HostOptimizer:
    """Updates the ranges of one rank that its plan leaves to its host.

    A step is: :meth:`begin`; :meth:`summed` for each bucket as its gradients come; :meth:`update` or :meth:`skip`.

    Args:
        ranges: places in their buckets with their groups, in the order of the forward.
        speculates: previews updates.
        timing: how long copies and updates take.

    Attributes:
        counts: how many buckets were previewed, had been previewed rightly, and were updated with the norm known.
    """

    def __init__(
        self,
        ranges: Sequence[tuple[LocalBucket, slice, UpdateGroup]],
        *,
        speculates: bool,
        device: torch.device,
        cores: Sequence[int],
        timing: Timing | None = None,
    ) -> None:
        self.counts = {"previewed": 0, "right": 0, "updated": 0}
        self.trusts_guesses = True
        self.speculates = speculates
        self._timing = timing or Timing()
        self._copies = host_copies(device)
        self._threads = BoundThreads(cores)
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="host-copy-out")
        self._updating = ThreadPoolExecutor(1, thread_name_prefix="host-update-queue")
        self._may_change: Callable[[], None] = _at_once
        self._guess: _Guess | None = None
        self._buckets: dict[int, _HostBucket] = {}
        for local, place, group in ranges:
            made = _host_range(local, place, group, self._threads, self._copies, speculates=speculates)
            self._buckets.setdefault(local.number, _HostBucket(local.bucket, [])).ranges.append(made)

    def __contains__(self, bucket: int) -> bool:
        return bucket in self._buckets

    def ranges(self) -> Iterator[HostRange]:
        """All, in the order of the forward."""
        for bucket in self._buckets.values():
            yield from bucket.ranges

    @property
    def nbytes(self) -> int:
        """Of the host's memory."""
        return sum(each.nbytes for each in self.ranges())

    def before_weights_change(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` before weights of a step come back that may not be over yet."""
        self._may_change = wait

    def begin(self, guess: UpdateOf) -> None:
        """A step begins, whose update is ``guess`` if nothing is clipped."""
        self.wait_until_copied()
        self._guess = _Guess(guess) if self.speculates and self.trusts_guesses else None

    def summed(
        self,
        local: LocalBucket,
        works: Sequence[Waitable],
        *,
        ready_s: float = 0.0,
        source: torch.Tensor | None = None,
    ) -> Callable[[], float]:
        """The gradients of a bucket are there, or are once ``works`` are over: copy out what is updated here.

        Args:
            source: on the device, of a bucket whose gradients add up on the host.

        Returns:
            waits for the copy, and says when it was over.
        """
        bucket = self._buckets.get(local.number)
        if bucket is None:
            return _now
        if not local.adds_on_host:
            source = local.gradients
        begin = _CopyOut(bucket, self._copies.mark_computed(), works, ready_s, self._guess, bucket.updated, source)
        copied = bucket.copied = self._copying.submit(self._copy_out, begin)
        return lambda: copied.result().at_s

    def wait_for_update(self, bucket: int) -> Callable[[], None]:
        """What comes back when the last update of ``bucket`` has been computed."""
        found = self._buckets.get(bucket)
        updated = found.updated if found is not None else None
        return _at_once if updated is None else partial(_result, updated)

    def wait_until_copied(self) -> None:
        """Come back when the buffers of the gradients may change."""
        for bucket in self._buckets.values():
            if bucket.copied is not None:
                bucket.copied.result()

    def update(self, updates: UpdateOf) -> None:
        """Start the update of all ranges, in the order of the forward."""
        self._guess_is_over()
        agreed_s = self._timing.now_s()
        for bucket in self._buckets.values():
            bucket.updated = self._updating.submit(self._update, bucket, bucket.copied, updates, agreed_s)

    def skip(self) -> None:
        """There is no update in this step: put back the weights that were previewed."""
        self._guess_is_over()
        for bucket in self._buckets.values():
            bucket.updated = self._updating.submit(self._skip, bucket)

    def arrival(self, bucket: int) -> "HostArrival | None":
        """To be waited for before the weights of ``bucket`` that this rank updates are read on the device."""
        found = self._buckets.get(bucket)
        return HostArrival(found.updated) if found is not None and found.updated is not None else None

    def finish(self) -> None:
        """Wait for everything that was started; what a thread raised is raised here."""
        self.wait_until_copied()
        for bucket in self._buckets.values():
            if bucket.updated is not None:
                bucket.updated.result().arrived.wait()

    @torch.no_grad()
    def _copy_out(self, begin: _CopyOut) -> _Copied:
        if begin.updated is not None:
            # The last update reads what is overwritten here.
            begin.updated.result()
        with self._copies.outwards(StreamRole.SUMMED_OUT):
            begin.computed()
            there_s = max(begin.ready_s, self._timing.wait_beside(begin.works))
            if begin.source is not None:
                with self._timing.host(ActionKind.OUT_G, begin.bucket.bucket, after_s=there_s) as span:
                    for each in begin.bucket.ranges:
                        self._copies.copy(each.gradients, begin.source[each.place])
                there_s = span.end_s
        previewed = None
        if begin.guess is not None:
            previewed = self._updating.submit(self._preview, begin.bucket, begin.guess, there_s)
        return _Copied(there_s, previewed)

    @torch.no_grad()
    def _preview(self, bucket: _HostBucket, guess: _Guess, copied_s: float) -> float:
        """Returns when the weights are back."""
        if guess.is_over:
            return 0.0
        self._may_change()
        self.counts["previewed"] += 1
        with self._timing.host(ActionKind.PREVIEW, bucket.bucket, after_s=copied_s) as span:
            for each in bucket.ranges:
                each.adamw.preview(each.gradients, guess.updates[each.group], weights=each.leaving)
        return self._bring_back(bucket.bucket, bucket.ranges, after_s=span.end_s).at_s

    @torch.no_grad()
    def _update(
        self, bucket: _HostBucket, copying: "Future[_Copied] | None", updates: UpdateOf, agreed_s: float
    ) -> _Updated:
        copied = copying.result() if copying is not None else _Copied(agreed_s, None)
        # A preview that comes behind this finds that it is too late.
        has_previewed = copied.previewed is not None and copied.previewed.done()
        back_s = copied.previewed.result() if copied.previewed is not None and has_previewed else 0.0
        wrong = [each for each in bucket.ranges if not each.adamw.has_previewed(updates[each.group])]
        for each in bucket.ranges:
            if each not in wrong:
                each.adamw.commit(each.gradients, updates[each.group], weights=each.leaving)
        self.counts["updated" if wrong else "right"] += 1
        if not wrong:
            return _Updated(self._copies.arrived(StreamRole.READY_IN), max(back_s, agreed_s))
        with self._timing.host(ActionKind.HOST_UPDATE, bucket.bucket, after_s=max(agreed_s, copied.at_s)) as span:
            for each in wrong:
                each.adamw.commit(each.gradients, updates[each.group], weights=each.leaving)
        return self._bring_back(bucket.bucket, wrong, after_s=span.end_s)

    @torch.no_grad()
    def _skip(self, bucket: _HostBucket) -> _Updated:
        changed = [each for each in bucket.ranges if each.adamw.skip(weights=each.leaving)]
        with self._copies.within(StreamRole.READY_IN):
            self._copy_in(changed)
        return _Updated(self._copies.arrived(StreamRole.READY_IN), 0.0)

    def _bring_back(self, bucket: Bucket, ranges: Sequence[HostRange], *, after_s: float) -> _Updated:
        if all(each.local.weights_on_host for each in ranges):
            return _Updated(self._copies.arrived(StreamRole.READY_IN), after_s)
        with (
            self._copies.within(StreamRole.READY_IN),
            self._timing.host(ActionKind.IN_P, bucket, after_s=after_s) as span,
        ):
            self._copy_in(ranges)
        return _Updated(self._copies.arrived(StreamRole.READY_IN), span.end_s)

    def _copy_in(self, ranges: Sequence[HostRange]) -> None:
        for each in ranges:
            if each.leaving.data_ptr() != each.weights.data_ptr():
                self._copies.copy(each.weights, each.leaving)

    def _guess_is_over(self) -> None:
        if self._guess is not None:
            self._guess.is_over = True
            self._guess = None


@dataclass(frozen=True, slots=True)
class HostArrival:
    """Weights on their way back; waiting raises what the update raised."""

    updated: "Future[_Updated]"

    def wait(self) -> float:
        """Returns when they are back."""
        updated = self.updated.result()
        updated.arrived.wait()
        return updated.at_s

    def is_completed(self) -> bool:
        return self.updated.done()


def update_cores(*, local_rank: int, ranks: int) -> list[int]:
    """The cores of this process whose threads update: those that it may use, shared out to the ``ranks`` of its host.

    Where there are more ranks than cores, several share one.
    """
    usable = sorted(os.sched_getaffinity(0))
    return usable[local_rank::ranks] or [usable[local_rank % len(usable)]]


def _host_range(
    local: LocalBucket, place: slice, group: UpdateGroup, threads: BoundThreads, copies: HostCopies, *, speculates: bool
) -> HostRange:
    weights, gradients = local.weights[place], local.gradients[place]
    # Not pinned: copies leave from `leaving`, and the host alone reads and writes this.
    main = torch.empty(weights.shape, dtype=gradients.dtype)
    main.copy_(weights)
    return HostRange(
        local,
        place,
        group,
        HostAdamW(main, threads, previews=speculates),
        gradients=gradients if local.adds_on_host else copies.to_keep(gradients, dtype=gradients.dtype),
        leaving=weights if local.weights_on_host else copies.for_copies(weights),
    )


def _at_once() -> None:
    pass


def _now() -> float:
    return 0.0


def _result(updated: "Future[_Updated]") -> None:
    updated.result()
