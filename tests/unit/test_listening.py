"""Sockets that listen on one address, and the list of all of them."""

import socket

import pytest

from hetero.listening import LISTENING_SOCKETS, ListeningSocket, is_loopback, listening_socket
from tests.helpers import generated_parts, listening_table


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


def test_rows_of_the_list_have_names_of_their_own() -> None:
    names = [row.name for row in LISTENING_SOCKETS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", LISTENING_SOCKETS, ids=lambda row: row.name)
def test_what_others_can_reach_says_what_to_firewall(row: ListeningSocket) -> None:
    assert row.firewall or row.reach in ("loopback", "one user")


@pytest.mark.parametrize("begin", listening_table.TABLES)
def test_the_tables_of_sockets_are_those_of_the_code(begin: str) -> None:
    written = generated_parts.written(listening_table.PAGE, begin)
    assert written == listening_table.TABLES[begin](), "run python -m tests.helpers.listening_table"
