"""Finds machines that a list of hosts has twice, under two names or addresses."""

import contextlib
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from hetero.errors import ConfigError

_LOCALHOST = ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "127.0.0.1", "::1")
"""Names that every machine has for itself. Other addresses of 127.0.0.0/8 stand for nodes that one machine plays."""

_LOOKUPS_AT_ONCE = 32


def check_names_differ(names: Sequence[str], *, given_by: str) -> None:
    """Check that no machine is there twice, by names and addresses alone: ``gpu-0`` and ``gpu-0.cluster`` are one.

    Args:
        given_by: what messages name, a flag or a file.

    Raises:
        ConfigError: one is; the message has both names.
    """
    same_first_label: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        machine = _normalized(name)
        is_address = _address_in(machine) is not None
        others = same_first_label.setdefault(machine if is_address else machine.partition(".")[0], [])
        for other, other_machine in others:
            if name == other:
                raise ConfigError(f"{given_by}: {name} is named twice; each node of the plan is a host of its own")
            short, full = sorted((machine, other_machine), key=len)
            if f"{full}.".startswith(f"{short}."):
                raise ConfigError(
                    f"{given_by}: {other} and {name} name one machine, each node of the plan is a host of its own; "
                    "leave one out, or write both in full if they are two"
                )
        others.append((name, machine))


def check_addresses_differ(names: Sequence[str], *, given_by: str, within_s: float = 2.0) -> None:
    """Check that no two names have the same address, as far as they can be looked up in time.

    A public address that no name is itself does not count: some providers answer every unknown name with one.

    Args:
        given_by: what messages name, a flag or a file.
        within_s: for all lookups together, seconds; a name that takes longer is not compared.

    Raises:
        ConfigError: two have; the message has both names.
    """
    addresses = _looked_up(names, within_s=within_s)
    first_with: dict[str, str] = {}
    for name in names:
        for address in addresses.get(name, ()):
            other = first_with.setdefault(address, name)
            if other != name and (address in names or ipaddress.ip_address(address).is_private):
                raise ConfigError(
                    f"{given_by}: {other} and {name} are one machine, {address}; each node of the plan is a host of "
                    "its own"
                )


def _normalized(name: str) -> str:
    """Return one spelling for all spellings of a name or an address."""
    plain = name.lower().rstrip(".")
    address = _address_in(plain)
    plain = plain if address is None else str(getattr(address, "ipv4_mapped", None) or address)
    return "localhost" if plain in _LOCALHOST else plain


def _address_in(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _looked_up(names: Sequence[str], *, within_s: float) -> Mapping[str, frozenset[str]]:
    """Return the addresses of each name that is found in time.

    A resolver that does not answer cannot be interrupted: its thread is left to end with the process.
    """
    pending: queue.SimpleQueue[str] = queue.SimpleQueue()
    found: dict[str, frozenset[str]] = {}

    def look_up() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name = pending.get_nowait()
                # UnicodeError: a label that is too long for a name.
                with contextlib.suppress(OSError, UnicodeError):
                    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                    found[name] = frozenset(str(answer[4][0]).partition("%")[0] for answer in answers)

    for name in names:
        pending.put(name)
    threads = [threading.Thread(target=look_up, daemon=True) for _ in range(min(len(names), _LOOKUPS_AT_ONCE))]
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)
