"""Serves the store that ranks meet over: on one address of this machine, closed to newcomers once training begins.

torch's store knows no password. Who reaches it reads and writes its keys, and can end the ranks by that.
"""

import datetime
import errno
import socket
import threading

import torch.distributed as dist

from hetero.distributed.closed_listeners import close_to_newcomers, open_to_newcomers
from hetero.listening import is_loopback, listening_socket

ALL_CONNECTED = "all-connected"
"""Key that rank 0 sets once no rank will make another connection to the store."""

_LOOK_EVERY_S = 0.5


class ServedStore:
    """A store that this process serves.

    Attributes:
        store: this process's client of it.
        port: where it listens.
        note: why it listens on all addresses of this machine, for the user; empty where it listens on one.
    """

    def __init__(self, listener: socket.socket, *, timeout: datetime.timedelta, note: str = "") -> None:
        host, self.port = listener.getsockname()[:2]
        self.note = note
        self._descriptor = listener.detach()
        # What listens on all addresses is reached by that of loopback.
        self.store = dist.TCPStore(
            {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host),
            self.port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=self._descriptor,
            use_libuv=True,
        )
        self._stopped = threading.Event()
        self._watch: threading.Thread | None = None

    def close_when_all_connected(self) -> None:
        """Watch in a thread for :data:`ALL_CONNECTED`, and take no new connections from then on."""
        self._watch = threading.Thread(target=self._close, name="rendezvous-store", daemon=True)
        self._watch.start()

    def reopen(self) -> None:
        """Take new connections again: the ranks are started once more."""
        self.stop()
        open_to_newcomers(self._descriptor)
        self.store.delete_key(ALL_CONNECTED)
        self._stopped.clear()

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()
        if self._watch is not None:
            self._watch.join()

    def _close(self) -> None:
        # A connection of its own: this process may wait in the other.
        store = self.store.clone()  # type: ignore[attr-defined,unused-ignore]  # not in torch 2.13's stubs
        while not self._stopped.wait(_LOOK_EVERY_S):
            if store.check([ALL_CONNECTED]):
                close_to_newcomers(self._descriptor)
                return


def serve_store(
    host: str, port: int = 0, *, has_other_hosts: bool, timeout: datetime.timedelta = datetime.timedelta(minutes=5)
) -> ServedStore:
    """Serve a store on the address of ``host`` alone.

    Args:
        host: a name or an address, by which the other ranks reach it.
        port: 0 for a free one.
        has_other_hosts: ranks of other machines meet there as well. Then it has to listen on all addresses where none
            of ``host`` is one of this machine that others can reach, as behind a NAT, and where ``/etc/hosts`` gives a
            machine's own name to loopback.
        timeout: of waits in it.

    Raises:
        OSError: the name is not known, the port is taken, or the address is not one of this machine and no other host
            takes part.
    """
    addresses = [each[4][0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    assert all(isinstance(each, str) for each in addresses)
    # Who names loopback means it: agents of one machine, say, which stand for several.
    needs_reach = has_other_hosts and not is_loopback(host)
    reachable = [str(each) for each in addresses if not (needs_reach and is_loopback(str(each)))]
    why = f"{host} is {addresses[0]} on its own host"
    if reachable:
        try:
            return ServedStore(listening_socket(reachable[0], port), timeout=timeout)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or not needs_reach:
                raise
        why = f"{host} is {reachable[0]}, which is not an address of its host"
    listener = listening_socket("::" if ":" in str(addresses[0]) else "0.0.0.0", port)
    note = (
        f"the ranks' rendezvous store listens on all addresses of this host, port {listener.getsockname()[1]}: {why}; "
        "give the address by which the other hosts reach it (hetero launch --master-addr, MASTER_ADDR)"
    )
    return ServedStore(listener, timeout=timeout, note=note)
