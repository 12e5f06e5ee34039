"""Lets gloo behave as NCCL does at first messages: each holds its host up until the others have come to theirs.

What NCCL connects in the call that needs it first, with the host waiting for all that take part:

* a communicator, in which all its ranks take part;
* two ranks, at their first message in one direction of a communicator; of one batch all at once;
* the ranks of a communicator again for each algorithm, which it chooses by the operation and by its size.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor")

Contact = tuple[str, str, tuple[str, ...]]
"""What makes first contact, by a name that all who take part give it; the own name, and those of all."""


class FirstContactError(AssertionError):
    """A rank waits at a first contact to which another does not come."""


@contextlib.contextmanager
def blocking_first_contacts(*, timeout_s: float) -> Iterator[None]:
    """Replace what sends of ``torch.distributed`` in this process; every rank of the world does so.

    A rank that has waited for ``timeout_s`` at a first contact raises, and says for whom.
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
        deadline = time.monotonic() + self._timeout_s
        for name, _, everybody in new:
            while absent := [who for who in everybody if not self._store.check([f"{name}/{who}"])]:
                if time.monotonic() > deadline:
                    raise FirstContactError(
                        f"first contact: rank {dist.get_rank()} waited {self._timeout_s:g} s at {name} for "
                        f"{', '.join(absent)}"
                    )
                time.sleep(0.001)


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
