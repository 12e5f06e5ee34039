"""Lets the ranks of a launch tell one another plain data through the launcher's store, before any of them is connected.

A network over which ranks cannot talk can be told like that.
"""

import contextlib
import datetime
import os
import sys
from typing import Any, TypeVar

import torch.distributed as dist

from hetero.distributed.environment import is_on_one_host
from hetero.distributed.rendezvous_store import serve_store
from hetero.errors import MembershipError
from hetero.printable import printable_lines
from hetero.serialization import from_json, to_json
from hetero.text import number_ranges

ARRIVE_WITHIN_S = 120.0
"""Imports take longer on one host than on another; a rank that is later will not come."""

LEAVE_WITHIN_S = 10.0
"""For ranks to read the last thing that they are told; one that is later has gone."""

T = TypeVar("T")


def launch_store(prefix: str) -> tuple[dist.Store, int, int]:
    """The store of this launch, of which ``prefix`` is a part by itself; and this rank, and how many there are.

    Raises:
        MembershipError: it cannot be reached.
    """
    timeout = datetime.timedelta(seconds=ARRIVE_WITHIN_S)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if rank == 0 and not is_of_launcher:
            served = serve_store(host, port, has_other_hosts=not is_on_one_host(os.environ), timeout=timeout)
            if served.note:
                sys.stderr.write(f"hetero: warning: {served.note}\n")
            store = served.store
        else:
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (OSError, dist.DistError) as error:
        raise MembershipError(
            f"the launcher's store was not reached within {ARRIVE_WITHIN_S:g} s: {str(error).splitlines()[0]}; look at "
            "MASTER_ADDR and MASTER_PORT, and at rank 0"
        ) from None
    return dist.PrefixStore(prefix, store), rank, world_size


def tell(store: dist.Store, value: Any, *, rank: int) -> None:
    """Tell the others ``value``, a dataclass, as what this rank has to say."""
    store.set(f"facts/{rank}", to_json(value))


def told_by_all(store: dist.Store, cls: type[T], *, world_size: int) -> list[T]:
    """What every rank has told, by rank.

    Raises:
        MembershipError: some rank has not told its own in time.
    """
    keys = [f"facts/{each}" for each in range(world_size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=ARRIVE_WITHIN_S))
    except dist.DistError:
        missing = number_ranges(each for each in range(world_size) if not store.check([keys[each]]))
        raise MembershipError(
            f"ranks {missing} did not arrive within {ARRIVE_WITHIN_S:g} s; look at their output, and whether their "
            "hosts reach MASTER_ADDR and MASTER_PORT"
        ) from None
    return [from_json(cls, read_text(store, key), source=f"rank {rank}") for rank, key in enumerate(keys)]


def read_text(store: dist.Store, key: str) -> str:
    """Return what is under ``key``, as text to show: whoever reaches the store may have written it."""
    return printable_lines(store.get(key).decode(errors="backslashreplace"))


def dismiss(store: dist.Store, exit_code: int, *, world_size: int) -> None:
    """On rank 0, which may be the one that serves the store: tell the others how it ended, and let them go first."""
    store.set("exit_code", str(exit_code))
    with contextlib.suppress(dist.DistError):
        store.wait([f"left/{rank}" for rank in range(1, world_size)], datetime.timedelta(seconds=LEAVE_WITHIN_S))


def dismissed(store: dist.Store, *, rank: int) -> int:
    """On the other ranks: the exit code that rank 0 says, once it is done.

    Raises:
        MembershipError: rank 0 has gone, or has not said it in time.
    """
    try:
        # Rank 0 waits for all facts itself.
        store.wait(["exit_code"], datetime.timedelta(seconds=2 * ARRIVE_WITHIN_S))
        exit_code = int(store.get("exit_code"))
        store.set(f"left/{rank}", "")
    except dist.DistError:
        raise MembershipError(f"rank {rank}: rank 0 ended, or was silent for too long; look at its output") from None
    return exit_code
