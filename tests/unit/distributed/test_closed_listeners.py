"""Sockets that go on to listen, and take no new connection."""

import socket

import pytest

from hetero.distributed.closed_listeners import (
    close_to_newcomers,
    closed_when_connected,
    listening_sockets,
    open_to_newcomers,
)
from hetero.listening import listening_socket


def connects(listener: socket.socket) -> bool:
    """Whether a stranger reaches it. A request that the kernel drops is never answered."""
    try:
        socket.create_connection(listener.getsockname()[:2], timeout=0.3).close()
    except TimeoutError:
        return False
    return True


def test_newcomers_are_not_answered_and_those_who_are_there_go_on() -> None:
    with listening_socket("127.0.0.1") as listener:
        with socket.create_connection(listener.getsockname()) as known, listener.accept()[0] as accepted:
            assert close_to_newcomers(listener.fileno())
            assert not connects(listener)
            known.sendall(b"still here")
            assert accepted.recv(10) == b"still here"
        open_to_newcomers(listener.fileno())
        assert connects(listener)


def test_only_what_began_to_listen_within_is_closed() -> None:
    with listening_socket("127.0.0.1") as before:
        with closed_when_connected():
            within = listening_socket("::1")
            assert connects(within)
        with within, socket.socket(socket.AF_UNIX) as local:
            local.bind("")
            local.listen()
            assert connects(before)
            assert not connects(within)
            found = set(listening_sockets().values())
            assert {before.fileno(), within.fileno()} <= found
            assert local.fileno() not in found


def test_gloo_that_connects_later_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with closed_when_connected():
        within = listening_socket("127.0.0.1")
    with within:
        assert connects(within)
