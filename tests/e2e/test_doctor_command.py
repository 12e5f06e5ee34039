"""``hetero doctor`` as a user types it, on a machine without a GPU."""

import json

import pytest
import torch

from hetero.cli import main


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_the_checklist_of_this_host(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    said = capfd.readouterr().out
    assert code == int("PROBLEM" in said), said
    for line in ("operating system", "torch", "megatron-core", "/dev/shm", "network"):
        assert line in said
    assert said.rstrip().splitlines()[-1].split()[1].startswith(("ok", "warning", "problem"))


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_the_facts_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    (facts,) = json.loads(capfd.readouterr().out)["hosts"]
    assert facts["torch"]["version"] == torch.__version__


def test_a_plan_needs_its_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "plan.json"]) == 2
    assert capfd.readouterr().err.startswith("hetero: --plan has no effect in one process")
