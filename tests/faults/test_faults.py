"""Every phase of the fault matrix once, faults and ranks in turn; ``python -m tests.faults.matrix`` runs all of it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.distributed.failure_detector import FailureDetectorOptions
from hetero.serialization import save
from tests.faults.matrix import CUT, FAULTS, NO_LINKS, PHASES, SIGNALLED, VICTIMS, Case, Outcome, Patience, run_all
from tests.helpers.commands import WORLD_SIZE, command_line, good_plan, launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]


SHORT = Patience(heartbeat_s=6.0, arrive_s=20.0, roll_call_s=3.0, beat_s=0.5)
"""About half of what the matrix takes: the promises are sums of these, and hold for any."""

LOSSES = ("kill", "stop", "exit 1", "out of memory")
STILL = "stand still"

AS_SHIPPED = "evaluation"
"""Where a rank falls silent, so that patience counts."""


def _sample() -> list[Case]:
    """Every phase, and every loss in three of them, each time of another rank; one case as patient as shipped.

    And a rank that stands still in four phases with waits of their own kinds, each time another rank, one that is
    signalled with its readers in each phase where it may be, one whose data is cut, and one whose file system refuses
    hard links.
    """
    faults, victims = cycle(LOSSES), cycle(VICTIMS)
    cases = []
    for phase in FAULTS["kill"].phases:
        patience = Patience() if phase == AS_SHIPPED else SHORT
        cases.append(Case(phase, next(faults), next(victims), patience=patience))
        if len(cases) % len(LOSSES) == 0:
            next(victims)
    still = [
        Case(phase, STILL, victim, patience=SHORT)
        for phase, victim in (("step", "middle"), ("sum", "last"), ("save", "idle"), ("dataset", "first"))
    ]
    without_torchrun = [
        Case("import", "kill", "first", store_in_rank_0=True, patience=SHORT),
        Case("join", "kill", "middle", store_in_rank_0=True, patience=SHORT),
        Case("dataset", "kill", "first", store_in_rank_0=True, patience=SHORT),
        Case("save", "stop", "first", store_in_rank_0=True, patience=SHORT),
    ]
    signalled = [
        Case(phase, SIGNALLED, victim, patience=SHORT)
        for phase, victim in zip(FAULTS[SIGNALLED].phases, ("last", "first", "middle"), strict=True)
    ]
    data = [Case("dataset", NO_LINKS, "first", patience=SHORT), Case("step", CUT, "idle", patience=SHORT)]
    return cases + still + signalled + data + without_torchrun


CASES = _sample()


def test_the_sample_has_every_fault_in_several_phases_and_at_several_ranks() -> None:
    assert {case.phase for case in CASES} == set(PHASES)
    assert {case.fault for case in CASES} == set(FAULTS)
    for fault in (*LOSSES, STILL, SIGNALLED):
        cases = [case for case in CASES if case.fault == fault and not case.store_in_rank_0]
        number = 4 if fault == STILL else 3
        assert len({case.phase for case in cases}) == len({case.victim for case in cases}) == number
    (as_shipped,) = (case for case in CASES if case.patience != SHORT)
    assert (as_shipped.fault, as_shipped.victim) == ("stop", "idle")
    options = FailureDetectorOptions()
    assert (as_shipped.patience.roll_call_s, as_shipped.patience.beat_s) == (options.roll_call_s, options.beat_s)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Mapping[Case, Outcome]:
    """Of the cases whose turn it is; several run beside one another, as they mostly wait."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    chosen: list[Any] = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]
    return dict(zip(chosen, run_all(chosen, parallel=4), strict=True))


def _in_turns() -> Iterator[Any]:
    """Half of the kinds in one run, the others in the next, with one case where rank 0 has the store."""
    for case in CASES:
        row = "store in rank 0" if case.store_in_rank_0 else case.fault
        turn = 1 if case.store_in_rank_0 else list(FAULTS).index(case.fault) % 2
        yield pytest.param(case, id=str(case), marks=pytest.mark.rotates(row, every=2, turn=turn))


@pytest.mark.parametrize("case", list(_in_turns()))
def test_a_fault_ends_all_ranks_soon_and_by_name(case: Case, outcomes: Mapping[Case, Outcome]) -> None:
    """What is promised has to hold on a busy machine, too: other tests run beside it."""
    assert outcomes[case].problems() == []


@pytest.mark.rotates(every=6, turn=0)
def test_a_killed_rank_leaves_nothing_behind_under_torchrun(tmp_path: Path) -> None:
    """Its data readers do not end at the signals of a launcher."""
    save(good_plan(), tmp_path / "plan.json")
    argv = command_line(hetero_plan=str(tmp_path / "plan.json"), num_workers="2", train_iters="100000")
    launcher = launch(WORLD_SIZE, argv)
    try:
        assert launcher.stdout is not None
        lines = iter(launcher.stdout.readline, "")
        assert next((line for line in lines if line.startswith("step ")), None), "it ended before the first step"
        family = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [each for each in psutil.Process(launcher.pid).children() if "pretrain_gpt.py" in each.cmdline()]
        # Ranks 0, 2 and 3 are first or last stages, with two readers each.
        assert len(family) >= WORLD_SIZE + 6
        os.kill(ranks[-1].pid, signal.SIGKILL)
        _, stderr = launcher.communicate(timeout=60)
    finally:
        _end(launcher)
    assert launcher.returncode != 0
    assert "did not answer and must have died" in stderr or "Signal 9" in stderr
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def _end(launcher: "subprocess.Popen[str]") -> None:
    """torchrun ends its ranks when it is told to."""
    if launcher.poll() is None:
        launcher.terminate()
        deadline = time.monotonic() + 40
        while launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
