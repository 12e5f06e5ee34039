"""Explores every order of what leaders and nodes do to the object store, by ``ObjectStore`` and ``Publisher``.

    python -m tests.helpers.publishing_stories

What is explored are the single operations on the store of several leaders of one job, of which all but the newest may
stand still between any two of them for as long as they like, and of the nodes that upload: puts, create-only puts,
reads, listings, and each deletion of a bulk, forwards and backwards. An answer may get lost, with the operation done or
not. A leader that dies is one that stands still for ever. The real methods run, step by step; what one does next is
known from the answers that it has had since its stage began, so that two runs that came to the same are one.

This has a state space of its own: ranks and leaders of the other exploration never wait for the store, and what it
holds is chosen from as copies on nodes are. So the two meet in one statement, that a published step is whole.
"""

import asyncio
import contextlib
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

from obstore.exceptions import AlreadyExistsError, GenericError, NotFoundError

from hetero.checkpoint.folder import SUMS, manifest_in, state_in, step_name, verified
from hetero.elastic import object_store, publishing
from hetero.elastic.records import HeldStep
from hetero.elastic.stored_step import unit_stem
from hetero.errors import CheckpointError, ConfigError, ObjectStoreError
from tests.helpers.protocol_state import Violation
from tests.helpers.state_search import trace


class Put(NamedTuple):
    """``anew``: only if there is none."""

    key: str
    content: bytes
    anew: bool


class Get(NamedTuple):
    key: str


class Names(NamedTuple):
    """The names in a folder; of the folders for an empty one."""

    folder: str


class Order(NamedTuple):
    """In which a bulk is deleted: as it is, or backwards."""

    bulk: tuple[str, ...]


class Delete(NamedTuple):
    key: str


class WaitFor(NamedTuple):
    """Until all of these are there: what nodes report to the membership store."""

    folder: str

    keys: frozenset[str]


Request = Put | Get | Names | Order | Delete | WaitFor
Stage = Callable[[], Coroutine[Any, Any, Any]]
Store = frozenset[tuple[str, bytes]]


@types.coroutine
def ask(request: Request) -> Generator[Request, Any, Any]:
    return (yield request)


class Objects:
    """What the module ``obstore`` is for :mod:`hetero.elastic.object_store`: every operation is a request."""

    async def put_async(self, _store: Any, key: str, content: Any, mode: str = "overwrite", **_: Any) -> None:
        data = bytes(content) if isinstance(content, bytes) else content.read_bytes()
        if not await ask(Put(key, data, mode == "create")):
            raise AlreadyExistsError(key)

    async def get_async(self, _store: Any, key: str) -> Any:
        content = await ask(Get(key))
        if content is None:
            raise NotFoundError(key)

        async def read() -> bytes:
            return bytes(content)

        return types.SimpleNamespace(bytes_async=read)

    async def head_async(self, _store: Any, key: str) -> dict[str, int]:
        content = await ask(Get(key))
        if content is None:
            raise NotFoundError(key)
        return {"size": len(content)}

    async def delete_async(self, _store: Any, keys: Sequence[str]) -> None:
        for key in await ask(Order(tuple(keys))):
            await ask(Delete(key))

    async def list_with_delimiter_async(self, _store: Any, folder: str = "") -> dict[str, Any]:
        names = await ask(Names(folder))
        return {
            "common_prefixes": [] if folder else list(names),
            "objects": [{"path": f"{folder}/{name}"} for name in names] if folder else [],
        }


@contextlib.contextmanager
def without_a_loop() -> Iterator[None]:
    """The modules of the store without obstore and without an event loop: coroutines are advanced by hand."""

    async def here(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    stepped = types.SimpleNamespace(
        **{name: getattr(asyncio, name) for name in ("Task", "Event", "create_task")},
        timeout=lambda _: contextlib.nullcontext(),
        to_thread=here,
    )
    with (
        mock.patch.object(object_store, "obstore", Objects()),
        mock.patch.object(object_store, "asyncio", stepped),
        mock.patch.object(publishing, "asyncio", stepped),
    ):
        yield


@dataclass(frozen=True, kw_only=True)
class Actor:
    """A leader, or a node that uploads. After a stage whose error says that it may not, only a leader's next is tried.

    stages: one after the other; each knows of those before only what is in the store.
    """

    name: str
    epoch: int
    stages: Sequence[Stage]


class Position(NamedTuple):
    """How far an actor is. ``answers``: to its requests in this stage; ``claimed``: the newest claim at its begin."""

    stage: int
    answers: tuple[Any, ...]
    claimed: int


class Situation(NamedTuple):
    store: Store
    positions: tuple[Position, ...]
    failures: int


LOST = "the answer is lost"


@dataclass(kw_only=True)
class PublishingExplorer:
    """Visits every situation that can be reached.

    actors: what they do.
    before: what the store holds at first.
    failures: how many answers of the store may get lost.
    """

    actors: Sequence[Actor]
    before: Mapping[str, bytes] = field(default_factory=dict)
    failures: int = 0

    def __post_init__(self) -> None:
        self.requests: dict[Any, Request | type[Exception] | None] = {}
        self.ends: set[Store] = set()

    def explore(self) -> tuple[int, int]:
        """Number of situations and of moves.

        Raises:
            Violation: with the operations that led there.
        """
        with without_a_loop():
            store = frozenset(self.before.items())
            start = Situation(
                store, tuple(self.settled(i, 0, (), store) for i in range(len(self.actors))), self.failures
            )
            parents: dict[Situation, tuple[Situation, str] | None] = {start: None}
            queue, num_moves = deque([start]), 0
            while queue:
                situation = queue.popleft()
                try:
                    check_whole(situation.store)
                    moves = list(self.moves(situation))
                except Violation as violation:
                    raise Violation(f"{violation}\n" + "\n".join(trace(parents, situation))) from None
                for label, following in moves:
                    num_moves += 1
                    if following not in parents:
                        parents[following] = (situation, label)
                        queue.append(following)
                if not moves:
                    self.ends.add(situation.store)
            return len(parents), num_moves

    def next_request(self, i: int, position: Position) -> Request | type[Exception] | None:
        """What an actor asks of the store after these answers, ``None`` at the end of its stage; or how that failed."""
        key = (i, position.stage, position.answers)
        if key not in self.requests:
            stage = self.actors[i].stages[position.stage]()
            try:
                request = stage.send(None)
                for answer in position.answers:
                    request = stage.throw(GenericError(LOST)) if answer == LOST else stage.send(answer)
                self.requests[key] = request
            except StopIteration:
                self.requests[key] = None
            except (ObjectStoreError, ConfigError, CheckpointError) as error:
                self.requests[key] = type(error)
            stage.close()
        return self.requests[key]

    def settled(
        self, i: int, stage: int, answers: tuple[Any, ...], store: Store, claimed: int | None = None
    ) -> Position:
        """The position in which an actor asks something, or has come to its end."""
        claimed = newest_claim(store) if claimed is None else claimed
        position = Position(stage, answers, claimed)
        while position.stage < len(self.actors[i].stages):
            found = self.next_request(i, position)
            if isinstance(found, tuple):
                return position
            if found is ObjectStoreError:
                # As Publisher insists.
                following = position.stage
            elif found is ConfigError:
                following = len(self.actors[i].stages)
            else:
                following = position.stage + 1
            position = Position(following, (), newest_claim(store))
        return Position(len(self.actors[i].stages), (), 0)

    def moves(self, situation: Situation) -> Iterator[tuple[str, Situation]]:
        for i, position in enumerate(situation.positions):
            if position.stage == len(self.actors[i].stages):
                continue
            request = self.next_request(i, position)
            assert isinstance(request, tuple)
            for answer, store in answers_to(request, situation.store):
                self.check_move(i, position, request, answer, situation.store)
                yield self.moved(situation, i, request, answer, store, situation.failures)
                if situation.failures and not isinstance(request, WaitFor | Order):
                    for after in {situation.store, store}:
                        yield self.moved(situation, i, request, LOST, after, situation.failures - 1)

    def moved(
        self, situation: Situation, i: int, request: Request, answer: Any, store: Store, failures: int
    ) -> tuple[str, Situation]:
        stage, answers, claimed = situation.positions[i]
        position = self.settled(i, stage, (*answers, answer), store, claimed)
        positions = (*situation.positions[:i], position, *situation.positions[i + 1 :])
        return f"{self.actors[i].name}: {told(request, answer)}", Situation(store, positions, failures)

    def check_move(self, i: int, position: Position, request: Request, answer: Any, store: Store) -> None:
        """No leader publishes by what it has begun after a later claim, or deletes what a later one has published."""
        epoch = self.actors[i].epoch
        if isinstance(request, Put) and request.key.endswith(SUMS) and answer and position.claimed > epoch:
            raise Violation(
                f"{self.actors[i].name} publishes, epoch {position.claimed} had been claimed before it began"
            )
        if isinstance(request, Delete) and request.key.endswith(SUMS) and request.key in dict(store):
            folder = request.key.partition("/")[0]
            if (found := published(files_in(store, folder), folder).epoch) > epoch:
                raise Violation(f"{self.actors[i].name} deletes {folder}, which epoch {found} has published")


def answers_to(request: Request, store: Store) -> Iterator[tuple[Any, Store]]:
    """What the store may say to a request, and holds then."""
    objects = dict(store)
    if isinstance(request, Put):
        if request.anew and request.key in objects:
            yield False, store
        else:
            yield True, frozenset({**objects, request.key: request.content}.items())
    elif isinstance(request, Get):
        yield objects.get(request.key), store
    elif isinstance(request, Names):
        prefix = f"{request.folder}/" if request.folder else ""
        rest = (key.removeprefix(prefix) for key in objects if key.startswith(prefix))
        yield (
            tuple(sorted({name.partition("/")[0] for name in rest if bool(request.folder) == ("/" not in name)})),
            store,
        )
    elif isinstance(request, Order):
        yield from ((order, store) for order in dict.fromkeys((request.bulk, request.bulk[::-1])))
    elif isinstance(request, Delete):
        yield True, frozenset((key, content) for key, content in store if key != request.key)
    elif request.keys <= objects.keys():
        yield True, store


def told(request: Request, answer: Any) -> str:
    if answer == LOST:
        return f"{type(request).__name__}, {LOST}"
    if isinstance(request, Put):
        return f"puts {request.key}" + (f" anew: {answer}" if request.anew else "")
    return f"{type(request).__name__} {request[0]}"


def newest_claim(store: Store) -> int:
    return max((int(key[len("epochs/epoch_") :][:8]) for key, _ in store if key.startswith("epochs/")), default=0)


def files_in(store: Store, folder: str) -> frozenset[tuple[str, bytes]]:
    return frozenset((key.rpartition("/")[2], content) for key, content in store if key.startswith(f"{folder}/"))


def check_whole(store: Store) -> None:
    """A published step has all that its sums and its manifest name, byte by byte as they name it."""
    for folder in {key.partition("/")[0] for key, _ in store if key.endswith(f"/{SUMS}")}:
        published(files_in(store, folder), folder)


@cache
def published(files: frozenset[tuple[str, bytes]], folder: str) -> HeldStep:
    """What a published step says of itself, read as ranks and leaders read it.

    Raises:
        Violation: it is not whole.
    """
    contents = dict(files)

    def read(name: str) -> bytes:
        if name not in contents:
            raise CheckpointError(f"{name} is not there")
        return contents[name]

    try:
        held = verified(HeldStep, "held.json", read, where=folder)
        state, manifest = state_in(read, where=folder), manifest_in(read, where=folder)
        for shard in manifest.shards:
            if len(read(shard.file)) != shard.size_bytes:
                raise CheckpointError(f"{shard.file} is cut short")
    except CheckpointError as error:
        raise Violation(f"{folder} is published and not whole: {error}") from None
    named = {f"{unit_stem(held.epoch, unit)}.safetensors" for unit in held.units}
    if {shard.file for shard in manifest.shards} != named or step_name(state.step) != folder:
        raise Violation(f"{folder} is published and not what it says: {held}")
    return held
