"""Sockets that listen on one address."""

import socket

import pytest

from hetero.listening import is_loopback, listening_socket


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1"])
def test_loopback_is_known_by_name_and_address(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "gpu-0", "0.0.0.0", "::", "fe80::1", ""])
def test_all_else_may_be_reached_by_others(host: str) -> None:
    assert not is_loopback(host)


def test_a_socket_listens_on_its_address_alone() -> None:
    with listening_socket("127.0.0.1") as listener, socket.socket() as other:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        # The same port of another address is still free.
        other.bind(("127.0.0.2", port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        listening_socket("192.0.2.1")
