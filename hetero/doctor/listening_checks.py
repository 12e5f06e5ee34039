"""Says where the sockets of a run would listen on a host, and which of them others reach beyond what is needed.

One address of a private network is what a run over several hosts needs, and is fine. All interfaces, or an address of
the internet, are a warning: whoever reaches the store or gloo owns the run (docs/network.md).
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from hetero.distributed.environment import set_one_host_environment
from hetero.doctor.facts import HostFacts, NetworkInterface
from hetero.doctor.findings import Finding
from hetero.listening import ALL_INTERFACES, LISTENING_SOCKETS, is_loopback

_CLOSED = "close its ports to all but the hosts of the run"


def check_listening(facts: HostFacts) -> Iterator[Finding]:
    """Where the sockets of docs/network.md would listen on this host, in the order of the table."""
    environment = dict(facts.environment)
    if "WORLD_SIZE" in environment:
        # As the ranks of this launch do when they join.
        set_one_host_environment(environment)
    yield from _store(facts)
    yield _gloo(facts, environment)
    if facts.gpus:
        yield _nccl(facts, environment)
    inside = [row.name for row in LISTENING_SOCKETS if row.reach in ("loopback", "one user")]
    yield _fine("others", f"unless a flag says otherwise, on loopback or for this user alone: {', '.join(inside)}")


def _store(facts: HostFacts) -> Iterator[Finding]:
    """Judge the store over which the ranks of this launch have met, on the host that has it."""
    for address in facts.store_addresses:
        port = facts.environment.get("MASTER_PORT")
        if address in ALL_INTERFACES:
            found = f"listens on all interfaces, port {port}: who reaches it owns the run"
            instead = "start torchrun with the lines of hetero launch, or with --rdzv-backend hetero-static"
            yield _open("store", found, instead)
        else:
            found = f"listens on {address}, port {port}"
            yield _judged("store", found, [address], "meet on an address of a private network")


def _would_listen(name: str, environment: Mapping[str, str]) -> str:
    """Return in which runs an answer holds: without a launch and the variable, runs on one host take loopback."""
    is_known = environment.get(name) or "WORLD_SIZE" in environment
    return "would listen" if is_known else "would listen, in a run over several hosts,"


def _gloo(facts: HostFacts, environment: Mapping[str, str]) -> Finding:
    """Judge where ranks would connect over gloo: ``makeDeviceForHostname`` and ``...Interface`` of torch's c10d."""
    name = "GLOO_SOCKET_IFNAME"
    would_listen = _would_listen(name, environment)
    names = [each for each in environment.get(name, "").split(",") if each]
    known = {each.name: each for each in facts.interfaces}
    if missing := [each for each in names if each not in known and each != "lo"]:
        return Finding(
            severity="problem",
            subject="sockets: gloo",
            found=f"{name} names {', '.join(missing)}, which this host does not have, or which is down",
            todo=f"set it to one of {', '.join(known) or 'lo'}, or unset it",
        )
    if names:
        addresses = [known[each].address for each in names if each in known]
        found = f"{would_listen} on {', '.join(names)} ({name})"
        return _judged("gloo", found, addresses, f"set {name} to an interface of a private network")
    found = f"{would_listen} on the address of the host's name, {facts.address or 'loopback'}"
    return _judged("gloo", found, [facts.address], f"set {name} to an interface of a private network")


def _nccl(facts: HostFacts, environment: Mapping[str, str]) -> Finding:
    """Judge where NCCL would listen for its bootstrap, and for its data if it takes sockets."""
    name = "NCCL_SOCKET_IFNAME"
    interfaces = _interfaces_of_nccl(environment.get(name, ""), facts.interfaces)
    said = f"({name})" if environment.get(name) else f"({name} is not set)"
    found = f"{_would_listen(name, environment)} on {', '.join(each.name for each in interfaces) or 'loopback'} {said}"
    addresses = [each.address for each in interfaces]
    return _judged("NCCL", found, addresses, f"set {name} to an interface of a private network")


def _interfaces_of_nccl(given: str, interfaces: Sequence[NetworkInterface]) -> list[NetworkInterface]:
    """Return those from which NCCL takes its own: by prefix, by ``=name``, or all others than those behind ``^``.

    Source: NCCL_SOCKET_IFNAME in NVIDIA's NCCL User Guide, "Environment Variables".
    """
    usable = [each for each in interfaces if each.address]
    is_left_out, names = given.startswith("^"), given.removeprefix("^")
    is_exact, names = names.startswith("="), names.removeprefix("=")
    words = tuple(word for word in names.split(",") if word)
    if words:
        return [
            each
            for each in usable
            if (each.name in words if is_exact else each.name.startswith(words)) is not is_left_out
        ]
    fabric = [each for each in usable if each.name.startswith("ib")]
    return fabric or [each for each in usable if not each.name.startswith("docker")] or usable


def _judged(name: str, found: str, addresses: Sequence[str | None], instead: str) -> Finding:
    """Judge sockets that listen on one address each."""
    known = [each for each in addresses if each is not None]
    if public := [each for each in known if _is_public(each)]:
        return _open(name, f"{found}: {', '.join(public)} is an address of the internet", instead)
    if all(map(is_loopback, known)):
        return _fine(name, f"{found}: loopback alone")
    return _fine(name, f"{found}: every host of that network reaches it")


def _open(name: str, found: str, instead: str) -> Finding:
    return Finding(
        severity="warning", subject=f"sockets: {name}", found=found, todo=f"{instead}, or {_CLOSED} (docs/network.md)"
    )


def _fine(name: str, found: str) -> Finding:
    return Finding(severity="ok", subject=f"sockets: {name}", found=found)


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False
