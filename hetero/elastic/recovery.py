"""Chooses the step at which an epoch starts, and who has what of it.

The history of a run is a chain: epoch 4 went on after step 120 of epoch 2, that one after step 80 of epoch 1. Epoch 3
is not in it if all its copies were lost. What epoch 2 computed beyond step 120, and all of epoch 3, happened in a
history that was given up: others have gone on from step 120 since. So a copy counts only if its epoch is in the
lineage, up to the step at which the next epoch of the lineage started.

The membership store may go back to an earlier state, as if it was restored from a snapshot. So each node remembers the
newest epoch that it has seen, and the newest of all is the one that the next follows. Epochs that were made before that
was noticed are another history, which may use the same numbers: a copy counts only if the id of its epoch is right too.

The inventories have to be those of nodes that have ended all ranks of the epoch before, and start none of it again: a
rank that goes on could overwrite a slot after its node has told what is in it.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hetero.elastic.records import Ancestry, HeldStep, Inventory, RestorePoint
from hetero.errors import CheckpointError

INITIAL_WEIGHTS = RestorePoint(epoch=0, step=0)

OBJECT_STORE = "object-store"
"""Stands in a :class:`BadCopy` where the name of a node would."""

_NUMBER = re.compile(r"[0-9]{1,12}")
"""Of an epoch or a step (:data:`hetero.elastic.records.EpochOrStep`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadCopy:
    """A copy whose bytes did not have their checksums, or were not there.

    node: who has it, ``OBJECT_STORE`` for the object store.
    """

    node: str
    epoch: int
    step: int
    unit: str

    @classmethod
    def parse(cls, detail: str) -> "BadCopy":
        """Read the ``detail`` of a rank's ``bad_copy`` report, ``NODE/EPOCH/STEP/UNIT``.

        Raises:
            CheckpointError: it has another form.
        """
        parts = detail.split("/")
        if len(parts) != 4 or not all(_NUMBER.fullmatch(part) for part in parts[1:3]) or not detail.isprintable():
            raise CheckpointError(f"report of a bad copy: {detail!r} is not NODE/EPOCH/STEP/UNIT; update this rank")
        return cls(node=parts[0], epoch=int(parts[1]), step=int(parts[2]), unit=parts[3])

    def __str__(self) -> str:
        return f"{self.node}/{self.epoch}/{self.step}/{self.unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """A whole step, and where each of its units is.

    sources: by unit, the nodes that have it; none where the object store alone has. Empty for the initial weights.
    """

    start: RestorePoint
    sources: dict[str, tuple[str, ...]]

    @property
    def holders(self) -> frozenset[str]:
        """The nodes that have a unit."""
        return frozenset(node for nodes in self.sources.values() for node in nodes)

    @property
    def from_store(self) -> frozenset[str]:
        """The units that only the object store has."""
        return frozenset(unit for unit, nodes in self.sources.items() if not nodes)


def newest_epochs(in_store: Ancestry, known: Iterable[Ancestry]) -> list[Ancestry]:
    """Return the epochs that the next one may follow: those that no other known epoch has followed.

    It is one, that of the membership store, unless the store went back. Then it may be a later one of the same history.
    If others went on before that was noticed, there are two histories. An epoch that no node remembers has never had a
    rank: it is not among them if nodes remember others.

    Args:
        in_store: as the membership store has it, empty if it has none.
        known: the newest epoch that each node has seen, and those that are remembered elsewhere.
    """
    known = list(known)
    every = {(each.number, each.id): each for each in [in_store, *known]}
    newest = [each for each in every.values() if not any(o.id != each.id and o.follows(each) for o in every.values())]
    remembered = [each for each in newest if each.id != in_store.id or any(o.follows(in_store) for o in known)]
    return remembered or [in_store]


def newest_commit(noted: int, newest: Ancestry, *, in_store: Ancestry) -> int | None:
    """Return the newest step of a history that is known to be committed, 0 if none was; ``None`` if unknown.

    Args:
        noted: by the membership store, or by the leader.
        newest: the newest epoch of the history; if the store has another, it does not know what was committed since.
    """
    return noted or (0 if newest.id == in_store.id else None)


def select_copies(inventory: Inventory, ids: Mapping[int, str]) -> Inventory:
    """Return an inventory without the copies of epochs that are not in ``ids``, or there under another id."""
    ours = {epoch for epoch, name in inventory.id_of_epoch.items() if ids.get(epoch) == name}
    return dataclasses.replace(
        inventory,
        steps=tuple(held for held in inventory.steps if held.epoch in ours),
        units_of_epoch={epoch: units for epoch, units in inventory.units_of_epoch.items() if epoch in ours},
        id_of_epoch={epoch: name for epoch, name in inventory.id_of_epoch.items() if epoch in ours},
    )


def lineage_of(number: int, start: RestorePoint, before: Mapping[int, RestorePoint]) -> dict[int, RestorePoint]:
    """The lineage of epoch ``number``, which starts at ``start``: that of the epoch before, as far as it led there."""
    return {**{epoch: each for epoch, each in sorted(before.items()) if epoch <= start.epoch}, number: start}


def last_steps(lineage: Mapping[int, RestorePoint]) -> dict[int, int | None]:
    """Up to which step the copies of each epoch count, ``None`` for all: of the newest epoch.

    Epoch 0, what was there before the run, is part of every lineage.
    """
    limits: dict[int, int | None] = dict.fromkeys([0, *sorted(lineage)])
    # The first epoch of a job may have begun where an earlier job had come to, by the object store.
    for start in lineage.values():
        limits[start.epoch] = start.step
    return limits


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """One history of the run, and what is left of it.

    newest: its newest epoch.
    copies: those of its epochs.
    committed: the newest step that was committed, 0 if none was, ``None`` if unknown.
    restore: its newest whole step, ``None`` if there is none though one was committed.
    """

    newest: Ancestry
    copies: tuple[Inventory, ...]
    committed: int | None
    restore: Restore | None


def choose_history(
    inventories: Sequence[Inventory],
    *,
    in_store: Ancestry,
    known: Iterable[Ancestry] = (),
    noted: int = 0,
    stored: Sequence[HeldStep] = (),
    bad: AbstractSet[BadCopy] = frozenset(),
    choose: Callable[..., Restore | None] | None = None,
) -> History:
    """Return the history that the next epoch goes on with: of several, that with the newest whole step.

    Args:
        inventories, stored, bad: as for :func:`choose_step`.
        in_store, known: as for :func:`newest_epochs`; what nodes have seen is in the inventories already.
        noted: as for :func:`newest_commit`.
        choose: instead of :func:`choose_step`.
    """
    memories = [each.memory for each in inventories]
    noted = noted or int(any(each.has_committed for each in memories))
    seen = [each.newest for each in memories if each.newest.number]
    histories = []
    for newest in newest_epochs(in_store, [*seen, *known]):
        copies = tuple(select_copies(each, newest.ids) for each in inventories)
        committed = newest_commit(noted, newest, in_store=in_store)
        restore = (choose or choose_step)(copies, lineage=newest.lineage, stored=stored, bad=bad, committed=committed)
        histories.append(History(newest=newest, copies=copies, committed=committed, restore=restore))
    return max(
        histories,
        key=lambda each: (
            -1 if each.restore is None else each.restore.start.step,
            each.newest.id == in_store.id,
            each.newest.number,
            each.newest.id,
        ),
    )


def choose_step(
    inventories: Sequence[Inventory],
    *,
    lineage: Mapping[int, RestorePoint],
    stored: Sequence[HeldStep] = (),
    bad: AbstractSet[BadCopy] = frozenset(),
    committed: int | None = 0,
) -> Restore | None:
    """The newest step that is whole among nodes and object store, within the lineage.

    A step copied by two epochs, as where one restored what the other had, is the same state: the one of which the
    fewest units come from the object store is taken, then that of the newer epoch, whose plan is nearer to the next.

    Without a lineage (the first epoch of a job) copies on nodes are an earlier run's and do not count; of the object
    store the newest step of the newest epoch counts.

    Args:
        inventories: of nodes without ranks, see above.
        lineage: of the newest epoch, empty before the first.
        stored: published steps of the object store, each whole.
        bad: copies that do not count, because a rank found them damaged.
        committed: the newest step that anybody knows to have been committed, 0 for none, ``None`` if that is not
            known.

    Returns:
        ``None`` if no step is whole though one was committed: the run is lost. Where none was, the initial weights.
    """
    options = list(_whole_steps(inventories, lineage, stored, bad))
    if options:
        if not lineage:
            return max(options, key=lambda each: (each.start.epoch, each.start.step))
        return max(options, key=lambda each: (each.start.step, -len(each.from_store), each.start.epoch))
    return None if committed != 0 else Restore(start=INITIAL_WEIGHTS, sources={})


def _whole_steps(
    inventories: Sequence[Inventory],
    lineage: Mapping[int, RestorePoint],
    stored: Sequence[HeldStep],
    bad: AbstractSet[BadCopy],
) -> Iterator[Restore]:
    limits = last_steps(lineage)
    units_of_epoch: dict[int, frozenset[str]] = {}
    holders: dict[tuple[int, int], dict[str, list[str]]] = {}
    for inventory in inventories if lineage else ():
        units_of_epoch.update(inventory.units_of_epoch)
        for held in inventory.steps:
            units = holders.setdefault((held.epoch, held.step), {})
            for unit in held.units:
                if BadCopy(node=inventory.node, epoch=held.epoch, step=held.step, unit=unit) not in bad:
                    units.setdefault(unit, []).append(inventory.node)
    in_store = {(held.epoch, held.step): held.units for held in stored}
    for epoch, step in sorted(holders.keys() | in_store.keys()):
        if lineage and (epoch not in limits or not _counts(step, limits[epoch])):
            continue
        nodes = holders.get((epoch, step), {})
        from_store = {
            unit
            for unit in in_store.get((epoch, step), ())
            if BadCopy(node=OBJECT_STORE, epoch=epoch, step=step, unit=unit) not in bad
        }
        wanted = in_store.get((epoch, step)) or units_of_epoch.get(epoch)
        if wanted and wanted <= nodes.keys() | from_store:
            sources = {unit: tuple(sorted(nodes.get(unit, ()))) for unit in sorted(wanted)}
            yield Restore(start=RestorePoint(epoch=epoch, step=step), sources=sources)


def _counts(step: int, limit: int | None) -> bool:
    return limit is None or step <= limit


def why_none_is_whole(
    inventories: Sequence[Inventory],
    *,
    lineage: Mapping[int, RestorePoint],
    committed: int | None,
    object_store: bool = False,
) -> str:
    """What to tell a person for whom :func:`choose_step` found no step: what is missing of the newest, and the fix.

    Args:
        committed: the newest step that was, ``None`` if the membership store went back and it is unknown.
        object_store: the job has one.
    """
    limits = last_steps(lineage)
    found: dict[tuple[int, int], set[str]] = {}
    units_of_epoch: dict[int, frozenset[str]] = {}
    for inventory in inventories:
        units_of_epoch.update(inventory.units_of_epoch)
        for held in inventory.steps:
            if held.epoch in limits and _counts(held.step, limits[held.epoch]):
                found.setdefault((held.step, held.epoch), set()).update(held.units)
    names = ", ".join(sorted(inventory.node for inventory in inventories)) or "no node"
    lack = "they have no copies of this run"
    if found:
        (step, epoch), units = max(found.items(), key=lambda each: each[0])
        missing = sorted(units_of_epoch.get(epoch, frozenset()) - units)
        lack = f"of step {step} they lack {', '.join(missing[:3])}" + (" and more" if len(missing) > 3 else "")
    store = ", and the object store has none either that can be read" if object_store else ""
    fix = "" if object_store else ", or give the job an object store"
    had = (
        f"step {committed} had been committed"
        if committed is not None
        else "etcd does not know any more what was committed"
    )
    return (
        f"no step is whole among {names}{store}, and {had}: {lack}; more than one failure domain was lost between two "
        f"commits, or is not back yet. Bring a lost node back with its memory{fix}"
    )
