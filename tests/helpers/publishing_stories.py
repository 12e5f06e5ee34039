"""Leaders and nodes at one object store, and ways in which publishing could be wrong.

    python -m tests.helpers.publishing_stories

explores every story and prints how many situations it has. Epoch 4 is the one whose leader may be evicted without
knowing, epoch 5 follows. What an earlier leader has left is in the store at first.
"""

import tempfile
import time
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from hetero.checkpoint.folder import UPLOADING, step_name
from hetero.checkpoint.shards import tensor_infos, write_shard
from hetero.elastic.object_store import ObjectStore
from hetero.elastic.publishing import Publisher
from hetero.elastic.records import Ancestry, Copy, RestorePoint
from hetero.elastic.stored_step import unit_stem
from tests.helpers.checkpoints import make_slices, plan_of, state_of
from tests.helpers.elastic_epochs import epoch_of, node_info
from tests.helpers.publishing_explorer import Actor, PublishingExplorer, Stage, WaitFor, ask

UNITS = ("rank_00000", "rank_00001")

LINEAGES = {
    3: {3: RestorePoint(epoch=0, step=0)},
    4: {3: RestorePoint(epoch=0, step=0), 4: RestorePoint(epoch=3, step=80)},
    5: {3: RestorePoint(epoch=0, step=0), 5: RestorePoint(epoch=3, step=80)},
}
"""Epoch 5 went back to where epoch 4 had begun, so that both come to the same steps."""

UPLOADS = "nodes upload, an answer gets lost"
SAME_STEP = "the leader before stands still, the next publishes the same step"
LATER_STEP = "the leader before stands still, the next publishes a later step"


@cache
def copies(epoch: int, step: int, units: tuple[str, ...]) -> dict[str, tuple[Copy, Any]]:
    """The units of a step of an epoch, each with what is read like its file."""
    found: dict[str, tuple[Copy, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, unit in enumerate(units):
            path = Path(folder) / unit
            slices = make_slices(step=step, rank=i, num_ranks=len(units), kinds=("weights",))
            shard = write_shard(path, slices, rank=i, rank_state={})
            state = state_of(plan_of(world_size=len(units)), step=step)
            copy = Copy(epoch=epoch, step=step, unit=unit, shard=shard, tensors=tensor_infos(slices), state=state)
            found[unit] = (copy, types.SimpleNamespace(read_bytes=partial(bytes, path.read_bytes())))
    return found


def upload(store: type[ObjectStore], epoch: int, step: int, units: tuple[str, ...], of: Collection[str]) -> Stage:
    async def stage() -> None:
        for unit in of:
            await store("memory:///").upload(*copies(epoch, step, units)[unit])

    return stage


def leader(
    store: type[ObjectStore],
    epoch: int,
    *,
    steps: Sequence[int],
    units: tuple[str, ...] = UNITS,
    uploads: bool = True,
) -> Actor:
    """Claims an epoch and publishes these steps, each when it is there.

    uploads: the nodes of the epoch do so one after the other, within this actor.
    """
    record = epoch_of(
        [node_info("a")], number=epoch, before=Ancestry(lineage=LINEAGES[epoch]), start=LINEAGES[epoch][epoch]
    )

    def publisher() -> Publisher:
        return Publisher(
            store("memory:///"),
            membership=types.SimpleNamespace(report_stored=lambda point: None),  # type: ignore[arg-type]
            events=types.SimpleNamespace(note=lambda *_, **__: None),  # type: ignore[arg-type]
            holder="job",
            keep=1,
            show=lambda line: None,
        )

    async def claim() -> None:
        await publisher()._claim(record)

    def publish(step: int) -> list[Stage]:
        """What ``Publisher`` does with a whole step, in its order."""

        async def publishes() -> None:
            names = (f"{step_name(step)}/{unit_stem(epoch, unit)}.json" for unit in units)
            await ask(WaitFor(step_name(step), frozenset(names)))
            await store("memory:///").publish(epoch=epoch, step=step, units=units)

        async def deletes_old() -> None:
            await publisher()._delete_old(record)

        async def deletes_leftovers() -> None:
            await store("memory:///").delete_leftovers(before_step=step, epoch=epoch)

        return [publishes, deletes_old, deletes_leftovers]

    stages: list[Stage] = [claim]
    for step in steps:
        stages += [upload(store, epoch, step, units, units)] if uploads else []
        stages += publish(step)
    return Actor(name=f"leader of epoch {epoch}", epoch=epoch, stages=stages)


def left_by(actor: Actor, before: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """What the store holds when an actor has come to its end undisturbed."""
    explorer = PublishingExplorer(actors=[actor], before=before or {})
    explorer.explore()
    (store,) = explorer.ends
    return dict(store)


def uploaded(epoch: int, step: int, units: tuple[str, ...] = UNITS) -> dict[str, bytes]:
    """What the store holds when all units of a step are there."""
    return left_by(Actor(name="node", epoch=epoch, stages=[upload(ObjectStore, epoch, step, units, units)]))


def begun(epoch: int, step: int, index: Collection[str], units: tuple[str, ...]) -> dict[str, bytes]:
    """What a leader leaves that was killed while it published a step, with these files of the index there."""
    whole = left_by(leader(ObjectStore, epoch, steps=[step], units=units))
    names = {f"{step_name(step)}/{name}" for name in index} | {f"epochs/epoch_{epoch:08d}.json"}
    return {**uploaded(epoch, step, units), **{name: whole[name] for name in names}}


def stories(store: type[ObjectStore] = ObjectStore) -> Iterator[tuple[str, PublishingExplorer]]:
    """By name."""
    one = UNITS[:1]
    nodes = [Actor(name=f"node of {unit}", epoch=4, stages=[upload(store, 4, 100, UNITS, [unit])]) for unit in UNITS]
    publishes = leader(store, 4, steps=[100], uploads=False)
    yield UPLOADS, PublishingExplorer(actors=[*nodes, publishes], failures=1)
    old = leader(store, 4, steps=[100], units=one, uploads=False)
    there = uploaded(4, 100, one)
    yield SAME_STEP, PublishingExplorer(actors=[old, leader(store, 5, steps=[100], units=one)], before=there)
    yield LATER_STEP, PublishingExplorer(actors=[old, leader(store, 5, steps=[110], units=one)], before=there)
    for index in ([], ["manifest.json"], ["manifest.json", "state.json"]):
        yield (
            f"the leader before deletes what was left of an earlier step, with {' and '.join(index) or 'no index'}",
            PublishingExplorer(
                actors=[old, leader(store, 5, steps=[90], units=one)], before={**begun(3, 90, index, one), **there}
            ),
        )


class PublishesUnfenced(ObjectStore):
    """Publishes without a look at the claims."""

    async def _check_claim(self, epoch: int) -> None:
        pass


class OverwritesIndex(ObjectStore):
    """Puts index files over those of others."""

    async def _create_same(self, key: str, content: bytes) -> bool:
        await self._put(key, content)
        return True


class DeletesAllAtOnce(ObjectStore):
    """Deletes a published step in any order."""

    async def _delete_step(self, step: int) -> None:
        folder = step_name(step)
        await self._put(f"{folder}/{UPLOADING}", b"")
        await self._delete(folder, await self._names(folder))


MUTANTS: dict[str, type[ObjectStore]] = {
    "publishes without a look at the claims": PublishesUnfenced,
    "overwrites index files": OverwritesIndex,
    "deletes a published step in any order": DeletesAllAtOnce,
}


def main() -> None:
    for name, explorer in stories():
        began_s = time.monotonic()
        num_situations, num_moves = explorer.explore()
        print(f"{name}: {num_situations:,} situations, {num_moves:,} moves, {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()
