"""Lets gloo behave as NCCL does at first messages: each holds its host up until the others have come to theirs.

What NCCL connects in the call that needs it first, with the host waiting for all that take part:

* a communicator, in which all its ranks take part;
* two ranks, at their first message in one direction of a communicator; of one batch all at once;
* the ranks of a communicator again for each algorithm, which it chooses by the operation and by its size.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor")

Contact = tuple[str, str, tuple[str, ...]]
"""What makes first contact, by a name that all who take part give it; the own name, and those of all."""


LOOK_S = 0.2
"""Between two looks at who waits for whom."""


class FirstContactError(AssertionError):
    """A rank waits at a first contact to which another does not come."""


@contextlib.contextmanager
def blocking_first_contacts(*, timeout_s: float) -> Iterator[None]:
    """Replace what sends of ``torch.distributed`` in this process; every rank of the world does so.

    A rank raises, and says for whom it waits, once it waits at a first contact for one that waits for it in turn; where
    ranks wait for one another in other ways, after ``timeout_s``.
    """
    contacts = _Contacts(timeout_s)
    originals = {name: getattr(dist, name) for name in (*COLLECTIVES, "batch_isend_irecv")}
    try:
        for name in COLLECTIVES:
            setattr(dist, name, contacts.before_collective(name, originals[name]))
        dist.batch_isend_irecv = contacts.before_batch(originals["batch_isend_irecv"])
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class _Contacts:
    def __init__(self, timeout_s: float) -> None:
        self._store = dist.PrefixStore("first contacts", dist.distributed_c10d._get_default_store())
        self._timeout_s = timeout_s
        self._met: set[str] = set()
        # Hierarchical sums come from a thread of their own.
        self._lock = threading.Lock()

    def before_collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*tensors: Any, group: dist.ProcessGroup | None = None, **options: Any) -> Any:
            numel = max(each.numel() for each in tensors if isinstance(each, torch.Tensor))
            self._meet([_of_communicator(group), _of_all(group, f"{name} of {numel}")])
            return original(*tensors, group=group, **options)

        return collective

    def before_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def batch(operations: Sequence[dist.P2POp]) -> Any:
            self._meet([_of_communicator(operations[0].group)])
            self._meet([_of_pair(each) for each in operations])
            return original(operations)

        return batch

    def _meet(self, contacts: Iterable[Contact]) -> None:
        """Come to all of ``contacts``, then wait until the others have."""
        with self._lock:
            new = [each for each in contacts if each[0] not in self._met]
            self._met |= {name for name, _, _ in new}
        for name, own, _ in new:
            self._store.set(f"{name}/{own}", "")
        for name, _, everybody in new:
            self._wait(name, everybody)

    def _wait(self, name: str, everybody: Sequence[str]) -> None:
        start_s = time.monotonic()
        next_look_s = start_s + LOOK_S
        while absent := [who for who in everybody if not self._store.check([f"{name}/{who}"])]:
            if (now_s := time.monotonic()) > next_look_s:
                next_look_s = now_s + LOOK_S
                if now_s > start_s + self._timeout_s or self._is_waited_for_by(name, absent):
                    raise FirstContactError(
                        f"first contact: rank {dist.get_rank()} waits in vain at {name} for {', '.join(absent)}"
                    )
            time.sleep(0.001)
        if _is_main_thread():
            self._store.set(f"waits/{dist.get_rank()}", "")

    def _is_waited_for_by(self, name: str, absent: Sequence[str]) -> bool:
        """Tell for whom this rank waits, and follow those who are absent: whether one of them waits for this rank."""
        if not _is_main_thread():
            return False
        own = dist.get_rank()
        self._store.set(f"waits/{own}", "\n".join(f"{name}/{who}" for who in absent))
        seen, following = set[int](), {_rank(who) for who in absent}
        while following - seen:
            seen |= following
            following = {awaited for rank in seen for awaited in self._awaited_by(rank)}
            if own in following:
                return True
        return False

    def _awaited_by(self, rank: int) -> Iterator[int]:
        """The ranks that ``rank`` has said it waits for, and that have not come since."""
        key = f"waits/{rank}"
        keys = bytes(self._store.get(key)).decode() if self._store.check([key]) else ""
        yield from (_rank(each.rpartition("/")[2]) for each in keys.splitlines() if not self._store.check([each]))


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _rank(who: str) -> int:
    (rank,) = re.findall(r"\d+", who)
    return int(rank)


def _of_communicator(group: dist.ProcessGroup | None) -> Contact:
    return _of_all(group, "its communicator")


def _of_all(group: dist.ProcessGroup | None, what: str) -> Contact:
    group = group or dist.group.WORLD
    assert group is not None
    everybody = tuple(f"rank {rank}" for rank in dist.get_process_group_ranks(group))
    return f"group {group.group_name}: {what}", f"rank {dist.get_rank()}", everybody


def _of_pair(operation: dist.P2POp) -> Contact:
    own, peer = dist.get_rank(), operation.peer
    sender, receiver = (own, peer) if operation.op is dist.isend else (peer, own)
    ends = (f"rank {sender}'s send", f"rank {receiver}'s receive")
    name = f"group {operation.group.group_name}: {sender} to {receiver}"
    return name, ends[0] if own == sender else ends[1], ends


@contextlib.contextmanager
def replaced(place: tuple[Any, str], value: Any) -> Iterator[None]:
    """``value`` in the ``place``, an object and the name of its attribute, while the block runs."""
    owner, name = place
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
