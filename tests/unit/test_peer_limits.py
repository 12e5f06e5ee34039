"""Limits of what a peer may cost."""

import json
import subprocess
import sys

import pytest

from hetero.peer_limits import MAX_DESCRIPTORS, MAX_PEERS, max_peers, raise_descriptor_limit

RAISE = """
import json, resource
from hetero.peer_limits import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, {limits})
print(json.dumps([raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


@pytest.mark.parametrize("limits", [(256, 900), (900, 900)])
def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one(limits: tuple[int, int]) -> None:
    said = subprocess.run(
        [sys.executable, "-c", RAISE.format(limits=limits)], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(said.stdout) == [900, 900, 900]


@pytest.mark.parametrize(("soft", "hard"), [(256, 10**9), (256, -1), (1024, MAX_DESCRIPTORS)])
def test_it_is_raised_to_no_more_than_a_program_can_close(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int
) -> None:
    """This process may not be allowed such limits, so the calls are recorded."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: calls.append(limits))
    assert raise_descriptor_limit() == MAX_DESCRIPTORS
    assert calls == [(MAX_DESCRIPTORS, hard)]


@pytest.mark.parametrize("soft", [10**6, -1])
def test_a_higher_limit_is_left(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, -1))
    monkeypatch.setattr("resource.setrlimit", lambda *_: pytest.fail("set"))
    assert raise_descriptor_limit() == MAX_DESCRIPTORS


def test_peers_take_no_more_than_half_of_the_descriptors() -> None:
    assert max_peers(1024) == 512
    assert max_peers(MAX_DESCRIPTORS) == MAX_PEERS
