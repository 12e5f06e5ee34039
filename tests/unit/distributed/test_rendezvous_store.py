"""Where the ranks' store listens, and until when it takes connections."""

import datetime
import socket
import threading

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from hetero.distributed import rendezvous_store
from hetero.distributed.closed_listeners import listening_sockets
from hetero.distributed.rendezvous_store import ALL_CONNECTED, ServedStore, serve_store
from hetero.distributed.torchrun_plugin import handler_creator
from hetero.distributed.torchrun_rendezvous import OneAddressRendezvous
from hetero.errors import ConfigError

SOON = datetime.timedelta(seconds=20)


def listens_on(port: int) -> list[str]:
    """The addresses on which this process listens at ``port``."""
    addresses = []
    for descriptor in listening_sockets().values():
        borrowed = socket.socket(fileno=descriptor)
        host, its_port = borrowed.getsockname()[:2]
        borrowed.detach()
        addresses += [host] * (its_port == port)
    return addresses


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Names and the addresses that this machine knows them by."""
    names: dict[str, str] = {}
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **options: real(names.get(host, host), *rest, **options)
    )
    return names


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "::1", "localhost"])
@pytest.mark.parametrize("has_other_hosts", [False, True])
def test_the_store_listens_on_its_address_alone(host: str, has_other_hosts: bool) -> None:
    served = serve_store(host, has_other_hosts=has_other_hosts)
    assert listens_on(served.port) == [socket.getaddrinfo(host, 0)[0][4][0]]
    assert served.note == ""
    served.store.set("a", "b")
    client = dist.TCPStore(host, served.port, is_master=False, timeout=SOON, wait_for_workers=False)
    assert client.get("a") == b"b"


def test_a_name_that_is_loopback_at_home_is_served_on_all_addresses_and_said(resolved: dict[str, str]) -> None:
    resolved["gpu-0"] = "127.0.1.1"
    alone = serve_store("gpu-0", has_other_hosts=False)
    assert (listens_on(alone.port), alone.note) == (["127.0.1.1"], "")
    served = serve_store("gpu-0", has_other_hosts=True)
    assert listens_on(served.port) == ["0.0.0.0"]
    assert served.note.startswith(
        f"the ranks' rendezvous store listens on all addresses of this host, port {served.port}: gpu-0 is 127.0.1.1 on "
        "its own host; give the address by which the other hosts reach it"
    )


def test_an_address_of_a_gateway_is_served_on_all_addresses_and_said() -> None:
    served = serve_store("192.0.2.1", has_other_hosts=True)
    assert listens_on(served.port) == ["0.0.0.0"]
    assert "192.0.2.1, which is not an address of its host" in served.note
    with pytest.raises(OSError, match="Cannot assign"):
        serve_store("192.0.2.1", has_other_hosts=False)


def reaches(served: ServedStore) -> bool:
    try:
        socket.create_connection(("127.0.0.1", served.port), timeout=0.3).close()
    except TimeoutError:
        return False
    return True


def test_once_all_are_connected_strangers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "_LOOK_EVERY_S", 0.01)
    served = serve_store("127.0.0.1", has_other_hosts=False)
    rank = dist.TCPStore("127.0.0.1", served.port, is_master=False, timeout=SOON, wait_for_workers=False)
    for _ in range(2):
        served.close_when_all_connected()
        assert reaches(served)
        rank.set(ALL_CONNECTED, "")
        assert served._watch is not None
        served._watch.join()
        assert not reaches(served)
        rank.set("key", "value")
        assert served.store.get("key") == b"value"
        served.reopen()
    assert reaches(served)
    assert not rank.check([ALL_CONNECTED])


def parameters(endpoint: str, num_nodes: int, **more: str) -> RendezvousParameters:
    return RendezvousParameters(
        backend="hetero-static", endpoint=endpoint, run_id="a", min_nodes=num_nodes, max_nodes=num_nodes, **more
    )


def test_agents_meet_at_one_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.3", 0))
        port = free.getsockname()[1]
    agents = [handler_creator()(parameters(f"127.0.0.3:{port}", 2, node_rank=str(n), timeout="20")) for n in (0, 1)]
    met = {}
    threads = [threading.Thread(target=lambda n=n: met.update({n: agents[n].next_rendezvous()})) for n in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listens_on(port) == ["127.0.0.3"]
    for node in (0, 1):
        assert (met[node].rank, met[node].world_size) == (node, 2)
        where = met[node].bootstrap_store_info
        assert (where.master_addr, where.master_port) == ("127.0.0.3", port)
        met[node].store.set(f"{node}", "here")
    assert met[0].store.get("1") == b"here"
    # The ranks are started once more, and find the store as they found it first.
    assert agents[0].next_rendezvous().store.get("1") == b"here"
    for agent in agents:
        assert agent.shutdown()


def test_a_single_node_finds_a_port_and_says_it() -> None:
    agent = handler_creator()(parameters("127.0.0.1:0", 1))
    where = agent.next_rendezvous().bootstrap_store_info
    assert listens_on(where.master_port) == ["127.0.0.1"]
    assert isinstance(agent, OneAddressRendezvous)
    assert (agent.get_backend(), agent.use_agent_store, agent.num_nodes_waiting()) == ("hetero-static", True, 0)
    agent.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "num_nodes", "more", "said"),
    [
        ("", 1, {}, "--rdzv-endpoint is '', must be HOST:PORT of node 0"),
        ("gpu-0", 1, {}, "--rdzv-endpoint is 'gpu-0', must be HOST:PORT of node 0"),
        ("a:7", 2, {}, "--rdzv-conf node_rank= of 2 nodes; must be from 0 to 1"),
        ("a:7", 2, {"node_rank": "2"}, "--rdzv-conf node_rank=2 of 2 nodes"),
        ("a:7", 2, {"node_rank": "-1"}, "--rdzv-conf node_rank=-1 of 2 nodes"),
        ("a:0", 2, {"node_rank": "0"}, "--rdzv-endpoint a:0: 2 nodes need one port"),
    ],
)
def test_a_line_that_cannot_be_is_refused(endpoint: str, num_nodes: int, more: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^hetero-static: {said}"):
        handler_creator()(parameters(endpoint, num_nodes, **more))


def test_node_0_says_where_it_cannot_listen() -> None:
    taken = serve_store("127.0.0.1", has_other_hosts=False)
    agent = handler_creator()(parameters(f"127.0.0.1:{taken.port}", 1))
    with pytest.raises(ConfigError, match=rf"cannot serve the rendezvous at 127.0.0.1 port {taken.port}: .*in use"):
        agent.next_rendezvous()
