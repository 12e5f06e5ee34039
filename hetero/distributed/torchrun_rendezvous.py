"""Lets the agents of torchrun meet as in its static rendezvous, at a store that listens on one address alone.

torchrun's own static rendezvous listens on all addresses of the host of node 0, and ``--standalone`` does so too.
"""

import datetime
import sys

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from hetero.distributed.rendezvous_names import NODE_RANK, RENDEZVOUS
from hetero.distributed.rendezvous_store import ServedStore, serve_store
from hetero.errors import ConfigError

_TIMEOUT_S = 600
"""For agents to come, as in torchrun's static rendezvous."""


class OneAddressRendezvous(RendezvousHandler):
    """Static rendezvous: node ranks are given, no agent comes later, and the ranks use the agents' store.

    Args:
        host, port: where node 0 serves the store; port 0, for a single node, is any free one.
        run_id: prefix of the agents' keys.
        timeout: of the agents' waits.
    """

    def __init__(
        self, host: str, port: int, *, node_rank: int, num_nodes: int, run_id: str, timeout: datetime.timedelta
    ) -> None:
        self._host, self._port = host, port
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._run_id, self._timeout = run_id, timeout
        self._served: ServedStore | None = None
        self._store: Store | None = None

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return RENDEZVOUS

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the agents' store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Serve the store or connect to it; before a restart of the ranks, let them connect again.

        Raises:
            ConfigError: node 0 cannot listen there.
        """
        if self._served is not None:
            self._served.reopen()
        elif self._store is None:
            self._store = self._serve() if self._node_rank == 0 else self._connect()
        if self._served is not None:
            self._served.close_when_all_connected()
        assert self._store is not None, "served or connected"
        return RendezvousInfo(
            PrefixStore(self._run_id, self._store),
            self._node_rank,
            self._num_nodes,
            RendezvousStoreInfo(self._host, self._port),
        )

    def _serve(self) -> Store:
        try:
            self._served = serve_store(
                self._host, self._port, has_other_hosts=self._num_nodes > 1, timeout=self._timeout
            )
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{RENDEZVOUS}: node 0 cannot serve the rendezvous at {self._host} port {self._port}: {reason}; give "
                "an address of its host and a free port"
            ) from None
        if self._served.note:
            sys.stderr.write(f"hetero: warning: {self._served.note}\n")
        self._port = self._served.port
        return self._served.store

    def _connect(self) -> Store:
        return TCPStore(self._host, self._port, is_master=False, timeout=self._timeout, wait_for_workers=False)

    def is_closed(self) -> bool:
        """Whether no agent may come any more; as in torchrun's static rendezvous, that is never said."""
        return False

    def set_closed(self) -> None:
        """Do nothing, as torchrun's static rendezvous."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no agent comes later."""
        return 0

    def get_run_id(self) -> str:
        """Return the prefix of the agents' keys."""
        return self._run_id

    def shutdown(self) -> bool:
        """End the watch over the store."""
        if self._served is not None:
            self._served.stop()
        return True


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of a torchrun's ``--rdzv-endpoint``, ``--rdzv-conf`` and ``--nnodes``.

    Raises:
        ConfigError: no address or port, no node rank or one that is not a node of ``--nnodes``, or a port 0 that other
            nodes could not know.
    """
    host, port = parse_rendezvous_endpoint(parameters.endpoint or "", default_port=-1)
    num_nodes = parameters.max_nodes
    given = parameters.config.get(NODE_RANK, "0" if num_nodes == 1 else "")
    if not parameters.endpoint or port < 0:
        raise ConfigError(f"{RENDEZVOUS}: --rdzv-endpoint is {parameters.endpoint!r}, must be HOST:PORT of node 0")
    if not given.isdecimal() or int(given) >= num_nodes:
        raise ConfigError(
            f"{RENDEZVOUS}: --rdzv-conf {NODE_RANK}={given} of {num_nodes} nodes; must be from 0 to {num_nodes - 1}"
        )
    if port == 0 and num_nodes > 1:
        raise ConfigError(f"{RENDEZVOUS}: --rdzv-endpoint {parameters.endpoint}: {num_nodes} nodes need one port")
    return OneAddressRendezvous(
        host,
        port,
        node_rank=int(given),
        num_nodes=num_nodes,
        run_id=parameters.run_id,
        timeout=datetime.timedelta(seconds=int(parameters.config.get("timeout", _TIMEOUT_S))),
    )
