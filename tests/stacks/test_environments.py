"""What an environment is pinned to: what this project pins, without what varies and what that decides."""

from collections.abc import Iterable

from packaging.requirements import Requirement

from tests.helpers.sources import ROOT
from tests.stacks.environments import Stack, _constraints


def test_a_stack_has_its_own_versions_and_the_other_pins() -> None:
    names = [
        Requirement(line).name for line in _pins((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    ]
    pins = {Requirement(line).name: line for line in _pins(_constraints(Stack("3.12", "2.11.0", "0.17.1")))}
    assert pins["torch"] == "torch==2.11.0"
    assert pins["megatron-core"] == "megatron-core==0.17.1"
    assert "setuptools" not in pins, "torch 2.11 does not accept the pinned one"
    assert set(names) == {*pins, "setuptools"}


def _pins(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if line.strip() and not line.startswith("#")]
