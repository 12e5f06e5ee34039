"""A campaign of real faults against elastic training: real agents, ranks in double precision, and a real etcd.

    python -m tests.faults.elastic_campaign --faults 1000 --first-seed 0 --keep FOLDER   # the same again goes on
    python -m tests.faults.elastic_campaign --seed 17                     # one run again, with what all said

A seed says which nodes there are, how they train, and which faults come when (:mod:`.elastic_scenarios`). Every run
ends with the losses and weights of one uninterrupted process to 1e-9, or with an end of the table below. After such an
end nodes have their copies, and all agents are started again: that run has to come to the right end. An agent of a job
that has ended well is refused. Afterwards no process, folder of copies, namespace or mount is left. A kept folder has
each run's result as ``seed_N.json``. As root on a Linux that allows it, nodes are network namespaces with links that
are cut, and their memory and their logs are small file systems that get full.
"""

import argparse
import contextlib
import itertools
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from hetero.elastic.records import Outcome
from hetero.errors import ConfigError, HeteroError
from hetero.serialization import load, save
from tests.faults.elastic_injector import COPIES_MIB, EventTail, Injector
from tests.faults.elastic_scenarios import Fault, FaultKind, Scenario, scenario
from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.elastic_training import elastic_words, saved_state, uninterrupted
from tests.helpers.etcd import EtcdServer
from tests.helpers.network_namespaces import Host, Switch, can_make_namespaces, switched_hosts
from tests.helpers.small_file_system import small_file_system

STEPS = 64
PER_RUN = 16

LOST_COPIES = "no step is whole among"

DOCUMENTED_ENDS: dict[str, tuple[int, str]] = {
    LOST_COPIES: (1, "copies of two failure domains were lost between two commits"),
    "epochs in a row broke with all their nodes there": (1, "ranks failed again and again, and nothing new was copied"),
    "are asked for": (1, "too few nodes were there for too long"),
}
"""Ends of a job other than success: by what its message contains, the exit code of all agents and what had happened.

docs/elastic.md has the same table."""

_PATIENCE_S = 300.0
"""For the next step, or the end; a busy machine takes a quarter of it."""

_MOMENT_WITHIN_S = 6.0
_POLL_S = 0.02
"""For a moment of a recovery, which may last as long."""

_LOOK_S = 0.1
"""For what takes seconds; a look asks etcd."""

_ETCD_QUOTA_BYTES = 32 << 20
_LOGS_MIB = 32
"""Much more than what a run needs."""

_DISRUPTIVE = frozenset[FaultKind]({"kill rank", "kill node", "flip byte"})


@dataclass(slots=True)
class Run:
    """What happened to a scenario.

    told: one line per fault.
    recoveries_s: seconds from a fault to the end of the first step of the next epoch, with the kind of the fault.
    problem: what is wrong, empty if nothing is.
    """

    scenario: Scenario
    told: list[str] = field(default_factory=list)
    kinds: list[FaultKind] = field(default_factory=list)
    recoveries_s: list[tuple[FaultKind, float]] = field(default_factory=list)
    end: str = ""
    problem: str = ""
    seconds: float = 0.0


def run_all(scenarios: Iterable[Scenario], root: Path, *, parallel: int, faults: float = math.inf) -> Iterator[Run]:
    """Run so many at a time, each in a folder of its own under ``root``, until as many faults have come; as they end.

    Those that ``root`` already has the results of are not run again, and count. Whoever ends this early waits for those
    that run, whose results are kept too.
    """

    def run_and_keep(what: Scenario) -> Run:
        run = run_scenario(what, root / f"seed_{what.seed}", oracle)
        save(run, _result_path(root, what))
        return run

    shutil.rmtree(oracle := root / "oracle", ignore_errors=True)
    oracle.mkdir()
    uninterrupted(oracle, steps=STEPS)
    done, running = 0, dict[Future[Run], Scenario]()
    source = iter(scenarios)
    with ThreadPoolExecutor(parallel) as threads:
        while True:
            while len(running) < parallel and done + sum(len(each.faults) for each in running.values()) < faults:
                if (what := next(source, None)) is None:
                    break
                if (kept := _result_path(root, what)).exists():
                    done += len((run := _kept_run(kept, what)).kinds)
                    yield run
                else:
                    running[threads.submit(run_and_keep, what)] = what
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                run = future.result()
                done += len(run.kinds)
                yield run


def _result_path(root: Path, what: Scenario) -> Path:
    return root / f"seed_{what.seed}.json"


def _kept_run(path: Path, what: Scenario) -> Run:
    run = load(Run, path)
    if run.scenario != what:
        raise ConfigError(f"{path} is of {run.scenario}, and this is {what}: name another folder to --keep")
    return run


def run_scenario(what: Scenario, folder: Path, oracle: Path) -> Run:
    """Run it in a new folder; ``oracle`` is where the run of one process is."""
    run, began_s = Run(what), time.monotonic()
    if folder.exists():  # Of a campaign that was ended.
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        with _job(what, folder) as (nodes, injector, tail):
            _Driver(what, run, nodes, injector, tail, folder).drive(oracle)
        mounts = Path("/proc/mounts").read_text()
        assert str(folder) not in mounts, f"left: a mount under {folder}"
    except (AssertionError, HeteroError, OSError, psutil.Error, subprocess.SubprocessError) as error:
        run.problem = f"{type(error).__name__}: {error}"
    run.seconds = time.monotonic() - began_s
    return run


@contextlib.contextmanager
def _job(what: Scenario, folder: Path) -> Iterator[tuple[ElasticCluster, Injector, EventTail]]:
    """Hosts, etcd and nodes, not yet started."""
    switch: Switch | None = None
    hosts: dict[str, Host] = {}
    options: dict[str, object] = {"lease": 3, "dwell": 0, "min-nodes": 1, "wait-for-nodes": 60}
    with ExitStack() as made:
        host = "127.0.0.1"
        if what.is_root:
            switch = made.enter_context(switched_hosts(1 + len(what.types)))
            hosts = dict(zip(what.types, switch.hosts[1:], strict=True))
            made.enter_context(switch.hosts[0].entered())
            host = switch.hosts[0].address
        etcd = EtcdServer(folder / "etcd", host=host, quota_bytes=_ETCD_QUOTA_BYTES)
        etcd.start()
        made.callback(etcd.stop)
        if what.store:
            (folder / "store").mkdir()
            options |= {"object-store": f"file://{folder / 'store'}", "upload-every": 3}
        for name in what.types:
            made.enter_context(_small_folder(folder / "memory" / name, what, mib=COPIES_MIB))
        made.enter_context(_small_folder(folder / "logs", what, mib=_LOGS_MIB))
        options["logs"] = folder / "logs"
        words = elastic_words(
            folder,
            steps=STEPS,
            hetero_heartbeat_timeout="5",
            switches=("--use-distributed-optimizer",) * what.distributed_optimizer,
        )
        nodes = ElasticCluster(
            folder, etcd, f"seed{what.seed}", types=what.types, words=words, options=options, hosts=hosts
        )
        tail = EventTail(folder / "logs")
        injector = Injector(nodes, tail, etcd, folder=folder, switch=switch, hosts=hosts)
        with nodes:
            yield nodes, injector, tail


def _small_folder(folder: Path, what: Scenario, *, mib: int) -> contextlib.AbstractContextManager[object]:
    """Make a folder, which holds no more than so much if this user may mount."""
    if what.is_root:
        return small_file_system(folder, mib=mib)
    folder.mkdir(parents=True)
    return contextlib.nullcontext()


class _Driver:
    """Brings a job through its faults to its end."""

    def __init__(
        self, what: Scenario, run: Run, nodes: ElasticCluster, injector: Injector, tail: EventTail, folder: Path
    ) -> None:
        self._scenario = what
        self._run = run
        self._nodes = nodes
        self._injector = injector
        self._tail = tail
        self._folder = folder
        self._last_fault_s = 0.0
        self._went_on = False

    def drive(self, oracle: Path) -> None:
        names = list(self._scenario.types)
        self._nodes.allow(0)
        for name in names:
            self._injector.start(name)
        self._wait(lambda: (epoch := self._injector.look()) is not None and len(epoch.nodes) == len(names), "all nodes")
        times: list[tuple[Fault, float]] = []
        for fault in self._scenario.faults:
            if fault.kind != "broken save" and self._injector.last_step() > STEPS - 8:
                continue
            self._reach(fault)
            if self._injector.outcome is not None:
                break
            done = self._injector.inject(fault, names)
            self._last_fault_s = self._injector.acted_s
            times.append((fault, self._last_fault_s))
            self._run.kinds.append(fault.kind)
            self._run.told.append(f"step {self._injector.last_step()}, {fault}: {done}")
        self._end(names)
        self._note_recoveries(times)
        if self._check_end(names):
            self._check_result(oracle)
            self._check_refusal(names)

    def _reach(self, fault: Fault) -> None:
        """Wait for its moment."""
        if fault.moment == "step":
            step = self._injector.last_step()
            self._nodes.allow(step + 4)
            # Three faults in a row without a commit between them would be an end by themselves.
            self._wait(lambda: self._injector.last_step() > step + 1, f"two steps after {step}")
        else:
            deadline = time.monotonic() + _MOMENT_WITHIN_S
            while time.monotonic() < deadline and not any(
                event.kind == fault.moment and event.time_s > self._last_fault_s for event in self._tail.update()
            ):
                time.sleep(_POLL_S)
        time.sleep(fault.delay_s)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition() and self._injector.outcome is None:
            self._injector.look()
            self._revive()
            assert time.monotonic() < deadline, f"{what} never came\n{self._nodes.told()}"
            time.sleep(_LOOK_S)

    def _revive(self) -> None:
        """Start all nodes again if none is left, as a job that is requeued."""
        names = list(self._scenario.types)
        if self._injector.outcome is None and not self._injector.alive(names):
            for name in names:
                self._injector.start(name)

    def _end(self, names: list[str]) -> None:
        self._nodes.allow(10 * STEPS)
        self._wait(lambda: False, "the end of the job")
        deadline = time.monotonic() + _PATIENCE_S
        while self._injector.alive(names):
            assert time.monotonic() < deadline, f"agents did not end\n{self._nodes.told()}"
            time.sleep(_POLL_S)

    def _note_recoveries(self, times: list[tuple[Fault, float]]) -> None:
        events = self._tail.update()
        for index, (fault, at_s) in enumerate(times):
            until_s = times[index + 1][1] if index + 1 < len(times) else float("inf")
            made = next((e for e in events if e.kind == "epoch_made" and at_s < e.time_s), None)
            if fault.kind not in _DISRUPTIVE or made is None:
                continue
            firsts = [e.time_s for e in events if e.kind == "first_step" and e.epoch == made.epoch]
            if len(firsts) == len(made.nodes) and max(firsts) < until_s:
                self._run.recoveries_s.append((fault.kind, max(firsts) - at_s))

    def _check_end(self, names: list[str]) -> bool:
        """Check how all agents ended, and go on after a documented end; whether all steps are done."""
        outcome = self._injector.outcome
        assert outcome is not None
        self._run.end = self._run.end or outcome.reason
        codes = {name: self._nodes.exit_code(name) for name in names if self._nodes.is_started(name)}
        # Those that have left have ended well before.
        ended = {name: code for name, code in codes.items() if code not in (outcome.exit_code, 0)}
        odd = {n: code for n, code in ended.items() if not self._nodes.is_killed(n) and not self._was_refused(n, code)}
        assert not odd, f"exit codes {odd}, and the job ended with {outcome}\n{self._nodes.told()}"
        if outcome.exit_code == 0:
            return True
        known = [code for text, (code, _) in DOCUMENTED_ENDS.items() if text in outcome.reason]
        assert known == [outcome.exit_code], f"no documented end: {outcome}\n{self._nodes.told()}"
        lost = [n for n, code in codes.items() if code == known[0] and not self._nodes.folder_of_copies(n).exists()]
        assert not lost, f"the job ended with {outcome}, and the copies of {lost} were deleted\n{self._nodes.told()}"
        if self._went_on and LOST_COPIES in outcome.reason and "flip byte" in self._run.kinds:
            # Nodes came back with all that they had; what was damaged there had been deleted.
            return False
        assert not self._went_on, f"started again, the job ended with {outcome}\n{self._nodes.told()}"
        self._went_on, self._injector.outcome = True, None
        for name in names:
            self._injector.start(name)
        self._wait_for_new_outcome(outcome)
        self._end(names)
        return self._check_end(names)

    def _wait_for_new_outcome(self, old: Outcome) -> None:
        """Wait until etcd does not have the old one any more."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._nodes.state().outcome == old:
            is_waiting = self._injector.alive(list(self._scenario.types)) and time.monotonic() < deadline
            assert is_waiting, f"a job that ended with {old} does not go on\n{self._nodes.told()}"
            time.sleep(_LOOK_S)

    def _check_result(self, oracle: Path) -> None:
        losses, state = uninterrupted(oracle, steps=STEPS)
        found = self._nodes.losses()
        # A rank that dies between a step and its line has said nothing of it, and it may be the one that is restored.
        starts = {event.step for event in self._tail.update() if event.kind == "epoch_made"}
        unlike = {s: (loss, found.get(s)) for s, loss in losses.items() if found.get(s) != loss}
        if "full logs" in self._run.kinds:
            # What could not be written is not there.
            unlike = {step: each for step, each in unlike.items() if each[1] is not None}
        unlike = {step: each for step, each in unlike.items() if each[1] is not None or step not in starts}
        assert not unlike, f"losses: {unlike}\n{self._nodes.told()}"
        saved = saved_state(self._folder / "saved", step=STEPS)
        assert saved.keys() == state.keys()
        for name, tensor in state.items():
            np.testing.assert_allclose(saved[name], tensor, rtol=1e-9, atol=1e-9, err_msg=name)

    def _check_refusal(self, names: list[str]) -> None:
        """Check that an agent which comes to a job that has ended well is refused."""
        self._injector.start(names[0])
        code = self._nodes.wait_for_end_of(names[0])
        assert code == 2, f"the job has ended well, and another agent of it with {code}\n{self._nodes.told()}"

    def _was_refused(self, name: str, code: int | None) -> bool:
        """Whether its agent came when the job had just ended."""
        return code == 2 and " is over already: " in self._nodes.output(name).rstrip().rpartition("\n")[2]


def report(runs: list[Run]) -> str:
    """Counts of all runs."""
    kinds = Counter(kind for run in runs for kind in run.kinds)
    seconds: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for kind, each in run.recoveries_s:
            seconds[kind].append(each)
    ends = Counter(re.sub(r"\d+", "N", run.end.partition(":")[0]) for run in runs)
    lines = [f"{sum(kinds.values())} faults in {len(runs)} runs, {sum(bool(run.problem) for run in runs)} failed"]
    lines += [f"  {count:5d} {kind}" for kind, count in kinds.most_common()]
    lines += [f"  {count:5d} ended: {end}" for end, count in ends.most_common()]
    lines += [
        f"  {kind} to next step: median {statistics.median(each):.2f} s, worst {max(each):.2f} s, of {len(each)}"
        for kind, each in seconds.items()
    ]
    return "\n".join(lines)


def tell(run: Run) -> str:
    """What a person wants to know of a run."""
    lines = [str(run.scenario), *(f"  {line}" for line in run.told)]
    lines += [f"  {kind} to next step: {seconds:.2f} s" for kind, seconds in run.recoveries_s]
    lines.append(f"  {run.seconds:.0f} s, {'FAILED' if run.problem else 'ended'}: {run.problem or run.end}")
    if run.problem:
        lines.append(f"  again: python -m tests.faults.elastic_campaign --seed {run.scenario.seed}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, help="in all (default: %(default)s)")
    parser.add_argument("--per-run", type=int, default=PER_RUN, help="faults of a run (default: %(default)s)")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--keep", type=Path, help="keep logs and results in this folder, and go on from those there")
    args = parser.parse_args(argv)
    # So that nothing is left behind either way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    is_root = can_make_namespaces()
    first = args.first_seed if args.seed is None else args.seed
    seeds = itertools.count(first) if args.seed is None else [first]
    scenarios = (scenario(seed, num_faults=args.per_run, is_root=is_root) for seed in seeds)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="elastic-faults-") as temporary:
        root = args.keep or Path(temporary)
        root.mkdir(exist_ok=True)
        for run in run_all(scenarios, root, parallel=args.parallel, faults=args.faults):
            runs.append(run)
            print(tell(run), flush=True)
    print(report(runs))
    return int(any(run.problem for run in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
