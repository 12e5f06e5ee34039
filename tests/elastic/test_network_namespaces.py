"""The hosts that other tests cut off: that cutting, healing and capping are real."""

import subprocess
import sys

import pytest

from tests.helpers.network_namespaces import Host, can_make_namespaces, switched_hosts

pytestmark = pytest.mark.skipif(not can_make_namespaces(), reason="needs root and the commands ip and tc")

_RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 7777))
print("listening", flush=True)
peer, _ = server.accept()
start = time.monotonic()
total = 0
while data := peer.recv(2**20):
    total += len(data)
print(total / (time.monotonic() - start) / 2**20)
"""

_SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7777), timeout=10)
peer.sendall(bytes(int(sys.argv[2])))
"""


_PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=1)
except ConnectionRefusedError:
    pass
"""


def mib_per_s(receiver: Host, sender: Host, num_bytes: int) -> float:
    server = subprocess.Popen(
        receiver.command([sys.executable, "-c", _RECEIVE]), stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        words = [sys.executable, "-c", _SEND, receiver.address, str(num_bytes)]
        subprocess.run(sender.command(words), check=True, timeout=30)
        return float(server.stdout.readline())
    finally:
        server.kill()
        server.communicate()


def reaches(sender: Host, receiver: Host) -> bool:
    words = [sys.executable, "-c", _PROBE, receiver.address]
    return subprocess.run(sender.command(words), capture_output=True, check=False, timeout=20).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_links_are_cut_healed_and_capped() -> None:
    with switched_hosts(2) as switch:
        first, second = switch.hosts
        assert reaches(first, second)
        switch.cut(second)
        assert not reaches(first, second)
        switch.heal(second)
        assert reaches(first, second)
        free = mib_per_s(first, second, 64 * 2**20)
        switch.cap(first, mib_per_s=20)
        capped = mib_per_s(first, second, 20 * 2**20)
        assert free > 2 * capped
        switch.cap(first, mib_per_s=None)
        assert mib_per_s(first, second, 64 * 2**20) > 2 * capped
