"""The fault matrix: a rank fails in any phase of ``pretrain_gpt.py``; do all others end, and say who it was?

    python -m tests.faults.matrix [--only PHASE FAULT RANK] [--store-in-rank-0] [--parallel N]

Each kind of fault in each phase where it can happen, on each of four ranks. A case runs the script itself, in four
processes that are forked from one that has imported everything, with two data readers per rank; no process ends the
others when one has failed, as if each ran on a host of its own. Its kind says what has to hold after the fault
(:class:`FaultKind`). No case may leave a process of the run, or a file that the next start does not clear away.

What happens to jobs of agents follows, unless the store is in rank 0 (:mod:`.elastic_matrix`). There RANK is what is
lost with it.
"""

import argparse
import ctypes
import dataclasses
import functools
import itertools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from megatron.pretrain.error_file import _SECONDS_TO_REPORT
from tests.faults.elastic_matrix import ElasticCase, run_elastic_cases, runnable_cases
from tests.helpers.forked_launch import run_script, say_into_files
from tests.helpers.ports import free_ports
from tests.helpers.rank_pool import fork_server
from tests.helpers.refusing_file_system import refuse_links

WORLD_SIZE = 4
_FIRST_STEPS, _NUM_STEPS = 2, 6
"""Of a run: those that it starts from, and those that it would come to."""

VICTIMS = {"first": 0, "middle": 1, "last": 2, "idle": 3}
SLACK_S = 8.0
"""For processes to end, on two cores that run several cases."""

_PR_SET_CHILD_SUBREAPER = 36
_GIVE_UP_S = 90.0
_LEAST_MINUTES = 0.5
"""That ``--distributed-timeout-minutes`` takes."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the ranks of a run wait for one another, in seconds; roll call and beat are by default as shipped."""

    heartbeat_s: float = 10.0
    arrive_s: float = 30.0
    roll_call_s: float = 5.0
    beat_s: float = 1.0

    @property
    def limit_s(self) -> float:
        """What the run promises after a loss: silence, the roll call, and the main thread's time to end by itself."""
        return self.heartbeat_s + self._roll_call_limit_s

    @property
    def still_limit_s(self) -> float:
        """What the run promises after a rank has stopped moving: the wait for it, the roll call, and the end."""
        return 60 * self.timeout_minutes + self._roll_call_limit_s

    @property
    def timeout_minutes(self) -> float:
        """The value of ``--distributed-timeout-minutes``."""
        return max(_LEAST_MINUTES, self.arrive_s / 60)

    @property
    def _roll_call_limit_s(self) -> float:
        return 2 * self.roll_call_s + 3 * self.beat_s


@dataclass(frozen=True, slots=True)
class Phase:
    """Where the fault comes: at call ``number`` of a function, as it is looked up in its module.

    module: ``None`` before the first line of the script.
    arrives: the rank has said a word to the others before.
    """

    module: str | None
    function: str = ""
    number: int = 1
    arrives: bool = True


PHASES: dict[str, Phase] = {
    "import": Phase(None, arrives=False),
    "join": Phase("hetero.distributed.failure_detector", "FailureDetector.wait_for_all", arrives=False),
    "process group": Phase("torch.distributed", "init_process_group"),
    "plan": Phase("megatron.pretrain.training", "agree_on_plan"),
    "dataset": Phase("megatron.pretrain.data", "_build"),
    "groups": Phase("torch.distributed", "new_group", number=3),
    "model": Phase("megatron.pretrain.training", "Trainer"),
    "load": Phase("megatron.pretrain.checkpointing", "load_checkpoint"),
    "step": Phase("hetero.runtime.stage_runner", "StageRunner.backward", number=8),
    "evaluation": Phase("megatron.pretrain.evaluation", "Evaluation.loss"),
    "sum": Phase("hetero.runtime.grad_sync", "GradientSync.finish", number=2),
    "save": Phase("hetero.checkpoint.writer", "write_shard"),
    "leaving": Phase("torch.distributed", "destroy_process_group"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """``store_in_rank_0``: without torchrun the store is rank 0's."""

    phase: str
    fault: str
    victim: str
    store_in_rank_0: bool = False
    patience: Patience = Patience()

    @property
    def rank(self) -> int:
        return VICTIMS[self.victim]

    def __str__(self) -> str:
        return f"{self.phase} / {self.fault} / {self.victim}{' / store in rank 0' * self.store_in_rank_0}"


def all_cases(*, store_in_rank_0: bool = False) -> list[Case]:
    return [
        Case(phase, fault, victim, store_in_rank_0)
        for phase, (fault, kind) in itertools.product(PHASES, FAULTS.items())
        if phase in kind.phases
        for victim in kind.victims
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """exit_codes: by rank, ``None`` for one that had to be killed in the end.

    last_end_s: seconds from the fault until the last survivor had ended.
    orphans: command lines of processes of the run that were left.
    left_behind: what a next start would not have cleared from the folder of checkpoints.
    saved_step: the last one that was saved there, 0 for none.
    """

    case: Case
    exit_codes: tuple[int | None, ...]
    stderr: tuple[str, ...]
    happened: bool
    last_end_s: float
    orphans: tuple[str, ...]
    left_behind: tuple[str, ...]
    saved_step: int

    def problems(self) -> list[str]:
        """What is wrong, in words."""
        if not self.happened:
            return [f"the fault never came: {self.stderr}"]
        return [
            *FAULTS[self.case.fault].problems(self),
            *(f"left alive: {line}" for line in self.orphans),
            *(f"left on disk: {name}" for name in self.left_behind),
        ]


# ---- kinds of faults: what happens to a rank, and what has to hold then


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKind:
    """What happens to a rank, and what its run promises.

    happen: called in the rank, in the thread that has come to the phase.
    phases: where it can happen.
    problems: what is wrong with the outcome of a case, in words.
    limit_s: after the fault all ranks that can end have ended; without the slack of a busy machine.
    victims: which ranks it comes to.
    victim_ends: the rank comes to its end too.
    has_idle_rank: a rank idles where another one is the victim; in the world's group it waits for every other rank.
    reads_data: the run reads a corpus, whose indices it caches, and not mock data.
    """

    happen: Callable[[], None]
    phases: Collection[str]
    problems: Callable[[Outcome], list[str]]
    limit_s: Callable[[Patience], float] = lambda patience: patience.limit_s
    victims: Collection[str] = tuple(VICTIMS)
    victim_ends: bool = True
    has_idle_rank: bool = True
    reads_data: bool = False


def _lost_rank_problems(outcome: Outcome) -> list[str]:
    """Check that all others end in time with exit code 3, and that each of them names the lost rank."""
    case = outcome.case
    names = [f"rank {case.rank} "]
    if not PHASES[case.phase].arrives:
        names.append(f"of {WORLD_SIZE} ranks, {case.rank} did not arrive")
    if case.store_in_rank_0 and case.rank == 0:
        # It took along what the others would have had to ask.
        names += ["lost the rendezvous store, and with it the other ranks", "no rendezvous store answers there"]
    problems = _late_end(outcome)
    for rank in set(VICTIMS.values()) - {case.rank}:
        # Who is through with everything has no rank to wait for.
        if not (case.phase == "leaving" and outcome.exit_codes[rank] == 0):
            problems += _end_problems(outcome, rank, lambda line: any(name in line for name in names))
    return problems


def _still_rank_problems(outcome: Outcome) -> list[str]:
    """Check that all ranks, the one that stood still included, end in time with exit code 3 and name that one."""
    name = re.compile(rf"\brank {outcome.case.rank} \([^)]*\) stood still: ")

    def names_it(line: str) -> bool:
        return name.search(line) is not None

    ends = [problem for rank in range(WORLD_SIZE) for problem in _end_problems(outcome, rank, names_it)]
    return [*_late_end(outcome), *ends]


def _unfinished_run_problems(outcome: Outcome) -> list[str]:
    """Check that the run met the refusal, and went on to its end all the same."""
    problems = [] if _LINK_REFUSED in outcome.stderr[outcome.case.rank] else ["no hard link was asked for"]
    if set(outcome.exit_codes) != {0}:
        problems.append(f"the run ended with {outcome.exit_codes}: {outcome.stderr}")
    return problems


def _stopped_run_problems(outcome: Outcome) -> list[str]:
    """Check that all ranks ended with success before the last step, and that the step they ended with was saved."""
    problems = _late_end(outcome)
    if set(outcome.exit_codes) != {0}:
        problems.append(f"the run ended with {outcome.exit_codes}: {outcome.stderr}")
    if not _FIRST_STEPS < outcome.saved_step < _NUM_STEPS:
        problems.append(f"the last checkpoint is of step {outcome.saved_step}")
    return problems


def _cut_data_problems(outcome: Outcome) -> list[str]:
    """Check that the ranks end alike, and name the file: rank 0 for all after a step, each in an evaluation."""
    names_it = "corpus.bin: 4096 bytes now, its index counts"
    problems = _late_end(outcome)
    if set(outcome.exit_codes) not in ({2}, {3}):
        problems.append(f"the run ended with {outcome.exit_codes}: {outcome.stderr}")
    for rank in range(WORLD_SIZE) if 3 in outcome.exit_codes else (0,):
        lines = [line for line in outcome.stderr[rank].splitlines() if line.startswith("hetero: ")]
        if len(lines) != 1 or names_it not in lines[0]:
            problems.append(f"rank {rank} did not name the file: {' | '.join(lines) or outcome.stderr[rank][-300:]!r}")
    return problems


def _late_end(outcome: Outcome) -> list[str]:
    case = outcome.case
    limit_s = FAULTS[case.fault].limit_s(case.patience) + SLACK_S
    if not PHASES[case.phase].arrives:
        limit_s += case.patience.arrive_s
    if outcome.last_end_s <= limit_s:
        return []
    return [f"a rank ended after {outcome.last_end_s:.0f} s, the limit is {limit_s:.0f} s"]


def _end_problems(outcome: Outcome, rank: int, names_victim: Callable[[str], bool]) -> list[str]:
    """Check that ``rank`` ended with exit code 3 and one line, which names the rank that the fault came to."""
    code, stderr = outcome.exit_codes[rank], outcome.stderr[rank]
    problems = []
    if code is None:
        problems.append(f"rank {rank} hung")
    elif code != 3:
        problems.append(f"rank {rank} ended with {code}")
    own = f"hetero: rank {rank}: "
    lines = [line.removeprefix(own) for line in stderr.splitlines() if line.startswith(own)]
    if len(lines) != 1 or not names_victim(lines[0]):
        problems.append(f"rank {rank} did not name rank {outcome.case.rank}: {' | '.join(lines) or stderr[-300:]!r}")
    return problems


def _run_out_of_memory() -> None:
    import torch  # noqa: PLC0415

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _stand_still() -> None:
    """Stop this thread alone: the process lives, and its other threads go on."""
    while True:
        time.sleep(3600)


def _signal_readers() -> None:
    """Signal this rank and its readers, as a supervisor does that signals every process."""
    for process in [*psutil.Process().children(), psutil.Process()]:
        process.terminate()


def _cut_data() -> None:
    os.truncate(sys.argv[sys.argv.index("--data-path") + 1] + ".bin", 4096)


def _refuse_links() -> None:
    refuse_links(pytest.MonkeyPatch(), on_refusal=lambda: sys.stderr.write(_LINK_REFUSED))


_LINK_REFUSED = "a hard link was refused\n"

NO_LINKS, SIGNALLED, CUT = "hard links refused", "readers signalled", "truncated data"

_LOSSES = tuple(phase for phase in PHASES if phase != "sum")
_STANDSTILLS = tuple(name for name, phase in PHASES.items() if phase.arrives and name != "leaving")
"""Where others wait for a rank that has arrived."""

FAULTS: dict[str, FaultKind] = {
    "kill": FaultKind(
        happen=lambda: os.kill(os.getpid(), signal.SIGKILL), phases=_LOSSES, problems=_lost_rank_problems
    ),
    "stop": FaultKind(
        happen=lambda: os.kill(os.getpid(), signal.SIGSTOP),
        phases=_LOSSES,
        problems=_lost_rank_problems,
        victim_ends=False,
    ),
    "exit 1": FaultKind(happen=lambda: sys.exit(1), phases=_LOSSES, problems=_lost_rank_problems),
    "out of memory": FaultKind(happen=_run_out_of_memory, phases=_LOSSES, problems=_lost_rank_problems),
    "stand still": FaultKind(
        happen=_stand_still,
        phases=_STANDSTILLS,
        problems=_still_rank_problems,
        limit_s=lambda patience: patience.still_limit_s,
        has_idle_rank=False,
    ),
    NO_LINKS: FaultKind(
        happen=_refuse_links,
        phases=("dataset",),
        problems=_unfinished_run_problems,
        # It writes the indices.
        victims=("first",),
        reads_data=True,
    ),
    SIGNALLED: FaultKind(happen=_signal_readers, phases=("step", "evaluation", "save"), problems=_stopped_run_problems),
    CUT: FaultKind(
        happen=_cut_data,
        phases=("step",),
        problems=_cut_data_problems,
        # Ranks leave it to rank 0 to say so, and wait for a launcher that ends them.
        limit_s=lambda patience: patience.limit_s + _SECONDS_TO_REPORT,
        reads_data=True,
    ),
}


# ---- one case: a launcher that only looks on, and its ranks


def run_case(case: Case, base: Path) -> Outcome:
    """Run ``case``; ``base`` is the folder of a checkpoint to start from, see :func:`make_base`."""
    context = fork_server()
    receive, send = context.Pipe(duplex=False)
    launcher = context.Process(target=_launcher_main, args=(case, base, send))
    launcher.start()
    send.close()
    try:
        outcome: Outcome = receive.recv()
        return outcome
    finally:
        launcher.join(timeout=10)
        if launcher.is_alive():
            launcher.kill()
            launcher.join()


def make_base(folder: Path) -> Path:
    """Make the plans of the cases, and two steps under the first of them, saved; returns the folder of checkpoints."""
    from hetero.serialization import save  # noqa: PLC0415
    from tests.helpers.commands import model_of  # noqa: PLC0415
    from tests.helpers.plans import plan, replica, stage  # noqa: PLC0415

    stages = [stage(layers=(i, i + 1), ranks=(i,)) for i in range(WORLD_SIZE - 1)]
    last = stage(layers=(2, 3), ranks=(2, 3), tp=2)
    model = model_of([*_model_flags(micro_batch_size="1"), "--train-iters", "6"])
    idling = plan(model, [replica(*stages, num_samples=6)], idle_ranks=(WORLD_SIZE - 1,))
    save(idling, _plan_of(folder, has_idle_rank=True))
    save(plan(model, [replica(*stages[:2], last, num_samples=6)]), _plan_of(folder, has_idle_rank=False))
    outcome = run_case(Case("none", "kill", "first", patience=Patience(heartbeat_s=60.0, arrive_s=90.0)), folder)
    assert set(outcome.exit_codes) == {0}, outcome
    return folder


def _launcher_main(case: Case, base: Path, answer: Connection) -> None:
    # Processes whose parent has died become children of this one, where they can be counted.
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if FAULTS[case.fault].reads_data:
            _write_corpus(folder)
        ranks = [context.Process(target=_rank_main, args=(rank, case, base, folder)) for rank in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        store = None if case.store_in_rank_0 else _serve_store(folder)
        if case.store_in_rank_0:
            (port,) = free_ports(1)
            _publish_port(folder, port)
        ended_at = _wait(ranks, case)
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        time.sleep(0.5)
        orphans = psutil.Process().children(recursive=True)
        names = tuple(" ".join(each.cmdline())[:80] for each in orphans if each.status() != psutil.STATUS_ZOMBIE)
        for each in orphans:
            each.kill()
        happened = folder / "happened"
        at_s = float(happened.read_text()) if happened.exists() else time.monotonic()
        waited_for = _ranks_that_end(case)
        lasts_s = max(ended_at[rank] for rank in waited_for) - at_s if waited_for <= set(ended_at) else _GIVE_UP_S
        answer.send(
            Outcome(
                case=case,
                exit_codes=tuple(p.exitcode if rank in ended_at else None for rank, p in enumerate(ranks)),
                stderr=tuple((folder / f"stderr-{rank}").read_text() for rank in range(WORLD_SIZE)),
                happened=happened.exists(),
                last_end_s=lasts_s,
                orphans=names,
                left_behind=_left_behind(folder / "saved"),
                saved_step=_last_saved(folder / "saved"),
            )
        )
        del store


def _serve_store(folder: Path) -> Any:
    import torch.distributed as dist  # noqa: PLC0415

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _publish_port(folder, store.port)
    return store


def _publish_port(folder: Path, port: int) -> None:
    partial = folder / "port.partial"
    partial.write_text(str(port))
    partial.replace(folder / "port")


def _wait(ranks: list[Any], case: Case) -> dict[int, float]:
    """Return when each rank ended, of those that did; only ranks that can end are waited for."""
    ended_at: dict[int, float] = {}
    deadline = time.monotonic() + _GIVE_UP_S
    while time.monotonic() < deadline:
        for rank, process in enumerate(ranks):
            if rank not in ended_at and not process.is_alive():
                ended_at[rank] = time.monotonic()
        if _ranks_that_end(case) <= set(ended_at):
            break
        time.sleep(0.05)
    return ended_at


def _ranks_that_end(case: Case) -> set[int]:
    can_end = case.phase == "none" or FAULTS[case.fault].victim_ends
    return set(range(WORLD_SIZE)) - (set() if can_end else {case.rank})


def _left_behind(folder: Path) -> tuple[str, ...]:
    from hetero.checkpoint.folder import latest_step, prepare  # noqa: PLC0415

    if not folder.is_dir():
        return ()
    prepare(folder, start_step=latest_step(folder) or 0)
    return tuple(path.name for path in folder.iterdir() if not path.name.startswith("step_"))


def _last_saved(folder: Path) -> int:
    from hetero.checkpoint.folder import published_steps  # noqa: PLC0415

    return max(published_steps(folder), default=0) if folder.is_dir() else 0


def _rank_main(rank: int, case: Case, base: Path, folder: Path) -> None:
    """The script, with a fault in the rank that is the victim."""
    say_into_files(folder, rank)
    port = folder / "port"
    while not port.exists():
        time.sleep(0.02)
    _wait_for_others_as(case.patience)
    if case.phase in PHASES and rank == case.rank:
        fail = functools.partial(_fail, FAULTS[case.fault], folder / "happened")
        phase = PHASES[case.phase]
        if phase.module is None:
            fail()
        elif case.phase in ("step", "sum") and case.victim == "idle":
            # It has neither a backward nor gradients.
            _interrupt("hetero.runtime.trainer", "Trainer.compute_gradients", 2, fail)
        else:
            _interrupt(phase.module, phase.function, phase.number, fail)
    run_script(
        "pretrain_gpt.py",
        _flags(case, base, folder),
        rank=rank,
        world_size=WORLD_SIZE,
        port=int(port.read_text()),
        store_in_rank_0=case.store_in_rank_0,
    )


def _wait_for_others_as(patience: Patience) -> None:
    """Beside what flags say: what none does, and less time to arrive than they allow, which are for busy hosts."""
    from hetero.distributed.failure_detector import FailureDetectorOptions  # noqa: PLC0415
    from megatron.pretrain import launch  # noqa: PLC0415

    def options(**given: float) -> FailureDetectorOptions:
        unsaid = {
            "arrive_within_s": patience.arrive_s,
            "roll_call_s": patience.roll_call_s,
            "beat_s": patience.beat_s,
        }
        return FailureDetectorOptions(**{**given, **unsaid})

    mock.patch.object(launch, "FailureDetectorOptions", options).start()


def _flags(case: Case, base: Path, folder: Path) -> list[str]:
    begins = case.phase == "none"
    has_idle_rank = begins or FAULTS[case.fault].has_idle_rank or case.victim == "idle"
    model = _model_flags(hetero_plan=str(_plan_of(base, has_idle_rank=has_idle_rank)))
    if FAULTS[case.fault].reads_data:
        model.remove("--mock-data")
        model += ["--data-path", str(folder / "corpus"), "--data-cache-path", str(folder / "cache")]
    return [
        *model,
        *("--num-workers", "2", "--train-iters", str(_NUM_STEPS), "--save-interval", "2", "--eval-iters", "1"),
        *("--eval-interval", "2", "--save", str(base if begins else folder / "saved")),
        *(("--exit-interval", str(_FIRST_STEPS)) if begins else ("--load", str(base))),
        *("--hetero-heartbeat-timeout", str(case.patience.heartbeat_s)),
        *("--distributed-timeout-minutes", str(case.patience.timeout_minutes)),
    ]


def _write_corpus(folder: Path) -> None:
    """Write documents, whose indices are cached: those of training are there when evaluation asks for its own."""
    from tests.unit.pretrain.corpora import write_corpus  # noqa: PLC0415

    write_corpus(folder / "corpus", [[token % 60 for token in range(200)] for _ in range(50)])


def _model_flags(**changes: str) -> list[str]:
    from tests.helpers.commands import command_line  # noqa: PLC0415

    return command_line(num_layers="3", num_workers=None, train_iters=None, **changes)


def _plan_of(base: Path, *, has_idle_rank: bool) -> Path:
    return base.with_name("idling.json" if has_idle_rank else "working.json")


def _interrupt(module: str, function: str, number: int, fail: Callable[[], None]) -> None:
    """Call ``fail`` before call ``number`` of a function."""
    owner: Any = __import__(module, fromlist=["_"])
    *parents, name = function.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(original)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            fail()
        return original(*args, **kwargs)

    setattr(owner, name, interrupted)


def _fail(kind: FaultKind, happened: Path) -> None:
    happened.write_text(str(time.monotonic()))
    kind.happen()


# ---- all of them


def run_all(cases: list[Case], *, parallel: int) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(parallel) as pool:
        base = make_base(Path(folder) / "base")
        yield from pool.map(lambda case: run_case(case, base), cases)


def main() -> int:
    """Return exit code 0 if every case ended as its kind promises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs=3, metavar=("PHASE", "FAULT", "RANK"), help="one case; '-' for any")
    parser.add_argument("--store-in-rank-0", action="store_true", help="as without torchrun")
    parser.add_argument("--parallel", type=int, default=4, help="cases at a time (default 4): they mostly wait")
    args = parser.parse_args()
    # So that cases under way end what they have started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    wanted = args.only or ("-", "-", "-")

    def is_wanted(case: Case | ElasticCase) -> bool:
        return all(want in ("-", is_) for want, is_ in zip(wanted, dataclasses.astuple(case), strict=False))

    cases = [case for case in all_cases(store_in_rank_0=args.store_in_rank_0) if is_wanted(case)]
    of_agents = [] if args.store_in_rank_0 else [case for case in runnable_cases() if is_wanted(case)]
    failed = _run_ranks(cases, parallel=args.parallel) if cases else 0
    # Each has three agents with a rank of their own.
    failed += _run_agents(of_agents, parallel=(args.parallel + 1) // 2) if of_agents else 0
    return min(failed, 1)


def _run_ranks(cases: list[Case], *, parallel: int) -> int:
    """Run cases of ranks, and print how each ended; returns how many failed."""
    failed, longest_s = 0, dict.fromkeys(("lost", "never arrived", "stood still"), 0.0)
    for outcome in run_all(cases, parallel=parallel):
        problems = outcome.problems()
        failed += bool(problems)
        case = outcome.case
        end = (
            "stood still" if case.fault == "stand still" else "lost" if PHASES[case.phase].arrives else "never arrived"
        )
        if case.fault not in (NO_LINKS, SIGNALLED, CUT):
            longest_s[end] = max(longest_s[end], outcome.last_end_s)
        codes = " ".join("hung" if code is None else str(code) for code in outcome.exit_codes)
        verdict = "; ".join(problems) or "ok"
        print(f"{case!s:36} last end {outcome.last_end_s:5.1f} s, exit codes {codes:12} {verdict}", flush=True)
    patience = Patience()
    promised_s = {
        "lost": patience.limit_s,
        "never arrived": patience.limit_s + patience.arrive_s,
        "stood still": patience.still_limit_s,
    }
    print(f"{len(cases)} cases, {failed} failed. The last rank ended, in seconds after the fault:")
    for end, seconds in longest_s.items():
        if seconds:
            print(f"  {end}: {seconds:.1f}, promised are {promised_s[end]:g}")
    return failed


def _run_agents(cases: list[ElasticCase], *, parallel: int) -> int:
    """Run cases of agents, and print how each ended; returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for outcome in run_elastic_cases(cases, Path(folder), parallel=parallel):
            failed += bool(outcome.problems)
            codes = " ".join(f"{name}: {'hung' if code is None else code}" for name, code in outcome.codes.items())
            verdict = "; ".join(outcome.problems) or "ok"
            print(f"{outcome.case!s:60} ended after {outcome.ended_s:4.1f} s, {codes:20} {verdict}", flush=True)
            if outcome.problems:
                print(outcome.told, flush=True)
    print(f"{len(cases)} cases of agents, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
