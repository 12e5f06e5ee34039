"""Damages files in all ways, and reads them: each has to be refused by name, or read as what it says.

    python -m tests.fuzz.mutated_files --count 1000 --seed 0

Cases run in a process of their own, one after the other. A case is a fault if it ends in anything but an error of the
project's that names the file, if what was read is not what the file says, if it takes more than ten seconds, or if the
process grows by more than 1 GiB, or dies. The same seed makes the same cases.
"""

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from hetero.distributed.helper_processes import end_with_parent
from hetero.errors import HeteroError
from hetero.units import GIB, MIB
from tests.fuzz.mutations import JSON, MUTATIONS, TEXT, DoesNotApply, in_header
from tests.fuzz.subjects import SUBJECTS, Subject

LIMIT_S = 10.0
LIMIT_BYTES = GIB

ADDRESS_BYTES = 8 * GIB
"""Beyond what is mapped once everything is imported: an allocation of more fails, whether it is used or not."""

STARTUP_S = 120.0

Verdict = Literal["refused", "read", "fault"]


@dataclass(frozen=True)
class Case:
    """One damaged file. ``number`` tells cases of one subject and mutation apart."""

    subject: str
    mutation: str
    number: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.seed}:{self.subject}:{self.mutation}:{self.number}"


@dataclass(frozen=True)
class Outcome:
    """``said``: the refusal, or what is wrong."""

    case: Case
    verdict: Verdict
    said: str
    seconds: float
    grown_bytes: int


def cases(count: int, *, seed: int) -> list[Case]:
    """The first ``count`` cases of ``seed``: all subjects and mutations in turn."""
    pairs = [
        (subject, mutation)
        for mutation, functions in MUTATIONS.items()
        for subject, its in SUBJECTS.items()
        if not its.is_binary or set(functions) - TEXT - JSON
    ]
    return [Case(*pair, number=i // len(pairs), seed=seed) for i, pair in enumerate(islice(cycle(pairs), count))]


def run_cases(wanted: Sequence[Case], subjects: Mapping[str, Subject] = SUBJECTS) -> Iterator[Outcome]:
    """Every case in turn; after one that hangs or kills its process, in a new one."""
    worker = _Worker(subjects)
    try:
        for case in wanted:
            if worker.is_dead:
                worker.close()
                worker = _Worker(subjects)
            yield worker.run(case)
    finally:
        worker.close()


class _Worker:
    """A process that reads damaged files."""

    def __init__(self, subjects: Mapping[str, Subject]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        # No daemon, which may have no children: indices are built in a process of their own.
        self._process = context.Process(target=_serve, args=(os.getpid(), theirs, subjects))
        self._process.start()
        theirs.close()
        assert self._pipe.poll(STARTUP_S), "the process that reads files did not start"
        self._pipe.recv()
        self.is_dead = False

    def run(self, case: Case) -> Outcome:
        self._pipe.send(case)
        start_s = time.monotonic()
        # More than the limit, so that a case just beyond it tells where it was.
        try:
            if self._pipe.poll(2 * LIMIT_S):
                outcome: Outcome = self._pipe.recv()
                return outcome
            said = f"took more than {2 * LIMIT_S} s"
        except EOFError:
            said = "killed its process"
        self.is_dead = True
        return Outcome(case, "fault", said, time.monotonic() - start_s, 0)

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _serve(parent: int, pipe: Connection, subjects: Mapping[str, Subject]) -> None:
    """Reads damaged files until the pipe ends."""
    end_with_parent(parent)
    with tempfile.TemporaryDirectory() as name:
        sound = Path(name) / "sound"
        for number, subject in enumerate(subjects.values()):
            folder = sound / str(number)
            folder.mkdir(parents=True)
            subject.make(folder)
            # What a first reading loads and keeps is no cost of a damaged file. It also must succeed.
            shutil.copytree(folder, Path(name) / "warm" / str(number))
            subject.read(Path(name) / "warm" / str(number))
        # The tokenizers library prints where it panics.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        mapped_bytes = _status_bytes("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + ADDRESS_BYTES, resource.RLIM_INFINITY))
        pipe.send("ready")
        while True:
            try:
                case: Case = pipe.recv()
            except EOFError:
                return
            folder = Path(name) / "damaged"
            shutil.copytree(sound / str(list(subjects).index(case.subject)), folder)
            try:
                pipe.send(_outcome(case, subjects[case.subject], folder))
            finally:
                shutil.rmtree(folder)


def _outcome(case: Case, subject: Subject, folder: Path) -> Outcome:
    _damage(case, subject, folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before_bytes, start_s = _status_bytes("VmRSS"), time.monotonic()
    verdict, said = _read(subject, folder)
    # That of its children counts, too; of all that there were, the largest.
    peak_bytes = max(_status_bytes("VmHWM"), 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    seconds, grown_bytes = time.monotonic() - start_s, peak_bytes - before_bytes
    if seconds > LIMIT_S:
        verdict, said = "fault", f"took {seconds:.1f} s; {said}"
    if grown_bytes > LIMIT_BYTES:
        verdict, said = "fault", f"took {grown_bytes / GIB:.1f} GiB; {said}"
    return Outcome(case, verdict, said, seconds, grown_bytes)


def _read(subject: Subject, folder: Path) -> tuple[Verdict, str]:
    try:
        subject.read(folder)
    except HeteroError as error:
        if str(folder) not in str(error):
            return "fault", f"names no file: {error}"
        # A failed allocation, whoever caught it: the address space is limited, and not that of users.
        return ("fault" if "allocate" in str(error) else "refused"), str(error)
    except BaseException:  # noqa: BLE001  (Rust's panics are no Exception)
        return "fault", traceback.format_exc()
    return "read", ""


def _damage(case: Case, subject: Subject, folder: Path) -> None:
    draw = random.Random(case.name)
    files = sorted(path for pattern in subject.files for path in folder.glob(pattern))
    while True:
        path = draw.choice(files)
        mutation = draw.choice(MUTATIONS[case.mutation])
        if path.suffix == ".safetensors" and mutation in TEXT | JSON:
            mutation = in_header(mutation)
        try:
            sound = path.read_bytes()
            damaged = mutation(sound, draw)
        except DoesNotApply:
            continue
        if damaged != sound:
            path.write_bytes(damaged)
            break
    if subject.trusts is not None:
        subject.trusts(folder)


def _status_bytes(name: str) -> int:
    """A figure of ``/proc/self/status``, which is in kibibytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def table(outcomes: Sequence[Outcome]) -> Table:
    """Kind of file by mutation: refused / read / faults."""
    counts = Counter((outcome.case.subject, outcome.case.mutation, outcome.verdict) for outcome in outcomes)
    shown = Table("kind of file", *MUTATIONS, "cases", title="refused by name / read as what it says / faults")

    def cell(subjects: Sequence[str], mutations: Sequence[str]) -> str:
        verdicts: tuple[Verdict, ...] = ("refused", "read", "fault")
        return " / ".join(str(sum(counts[s, m, verdict] for s in subjects for m in mutations)) for verdict in verdicts)

    for subject in SUBJECTS:
        num_cases = sum(outcome.case.subject == subject for outcome in outcomes)
        shown.add_row(subject, *(cell([subject], [mutation]) for mutation in MUTATIONS), str(num_cases))
    shown.add_section()
    shown.add_row("all", *(cell(list(SUBJECTS), [mutation]) for mutation in MUTATIONS), str(len(outcomes)))
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there is no fault, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutated_files", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides all cases (default: %(default)s)")
    parser.add_argument("--case", help="run this one alone, as a fault names it, and print what it said")
    args = parser.parse_args(argv)
    wanted = cases(args.count, seed=args.seed)
    if args.case is not None:
        seed, subject, mutation, number = args.case.split(":")
        wanted = [Case(subject, mutation, int(number), int(seed))]
    outcomes = []
    for outcome in run_cases(wanted):
        outcomes.append(outcome)
        if outcome.verdict == "fault" or args.case is not None:
            print(f"{outcome.case.name}: {outcome.verdict}: {outcome.said}\n", flush=True)
    console = Console(width=200)
    console.print(table(outcomes))
    faults = sum(outcome.verdict == "fault" for outcome in outcomes)
    console.print(
        f"{len(outcomes)} cases, {faults} faults; the slowest took {max(o.seconds for o in outcomes):.1f} s, the "
        f"largest grew by {max(o.grown_bytes for o in outcomes) / MIB:.0f} MiB"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
