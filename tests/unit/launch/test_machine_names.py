"""One machine under two names, by what a stand-in for the resolver says."""

import socket
import threading
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.launch.machine_names import check_addresses_differ

ADDRESSES = {
    "gpu-0": "10.0.0.1",
    "gpu-0-ib": "10.0.1.1",
    "a100-first": "10.0.0.1",
    "10.0.0.1": "10.0.0.1",
    "login": "198.51.100.9",
    "portal": "198.51.100.9",
    "unknown-1": "93.184.215.14",
    "unknown-2": "93.184.215.14",
    "93.184.215.14": "93.184.215.14",
}


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Knows :data:`ADDRESSES`, and answers for ``silent`` once the event is set."""
    answers = threading.Event()

    def getaddrinfo(name: str, *args: Any, **options: Any) -> Any:
        if name == "silent":
            answers.wait()
        if name not in ADDRESSES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ADDRESSES[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return answers


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["gpu-0", "gpu-0-ib", "a100-first"], "--hosts: gpu-0 and a100-first are one machine, 10.0.0.1; each node"),
        (["10.0.0.1", "nobody-knows", "gpu-0"], "--hosts: 10.0.0.1 and gpu-0 are one machine, 10.0.0.1; each node"),
        (["93.184.215.14", "unknown-1"], "--hosts: 93.184.215.14 and unknown-1 are one machine, 93.184.215.14; each"),
    ],
)
def test_names_with_one_address_are_refused(resolver: threading.Event, names: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_addresses_differ(names, given_by="--hosts")
    assert str(caught.value).startswith(said)


def test_names_that_are_not_known_here_and_a_providers_answer_for_all_of_them_are_no_reason(
    resolver: threading.Event,
) -> None:
    check_addresses_differ(["gpu-0", "gpu-0-ib", "nobody-knows", "nor-this"], given_by="--hosts")
    check_addresses_differ(["unknown-1", "unknown-2"], given_by="--hosts")


def test_a_resolver_that_is_silent_is_not_waited_for(resolver: threading.Event) -> None:
    try:
        check_addresses_differ(["silent", "gpu-0-ib"], given_by="--hosts", within_s=0.1)
        with pytest.raises(ConfigError, match="gpu-0 and a100-first are one machine"):
            check_addresses_differ(["silent", "gpu-0", "a100-first"], given_by="--hosts", within_s=2.0)
    finally:
        resolver.set()
