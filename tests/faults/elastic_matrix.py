"""The elastic part of the fault matrix: what etcd, disks and operators do to a job; does it keep what it has?

    python -m tests.faults.matrix --only - "etcd rewound" leader     # these cases alone; '-' for any

Each case is a job of three nodes: real agents, ranks in double precision, and a real etcd. Its kind
(:class:`ElasticKind`) says what happens and with which exit codes the agents may end. For all kinds alike:

* The agents end in bounded time, and leave no process behind.
* A node has its copies after the end unless its agent ended with exit code 0.
* After another code than 0, what the fault had broken is put right and all agents are started again under the same
  name. They end with exit code 0.
* Losses, and weights and moments in ``--save``, are those of one process.
"""

import contextlib
import functools
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hetero.checkpoint.folder import published_steps
from hetero.errors import HeteroError
from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.elastic_training import elastic_words, saved_state, uninterrupted
from tests.helpers.etcd import EtcdServer
from tests.helpers.etcd_proxy import EtcdProxy
from tests.helpers.network_namespaces import can_make_namespaces
from tests.helpers.small_file_system import fill, free, make_read_only, make_writable, small_file_system

STEPS = 12
_NAMES = ("a", "b", "c")
_LEASE_S = 3
_WAIT_FOR_ETCD_S = 6
_WAIT_FOR_NODES_S = 15
"""Where it is to be over. It has to be enough for the first plan, which a busy machine takes seconds for."""
_LIMIT_S = 60.0
"""For agents to end after the fault: the sum of all waits that a job has, with as much again for a busy machine."""
_NOTICED_S = 12.0
"""After which ranks may go on to the last step if the fault has not ended the agents: the job may still end well."""
_READ_WITHIN_S = 3.0
"""An agent has read all of etcd's keys, whether they have changed or not."""
_COPIED_WITHIN_S = 1.5
_SLOW_WRITE_S = 2.5
"""Of a write, as on a disk that takes as long to sync: more than an agent waits for an answer."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ElasticCase:
    """One fault at one point of a job, and what is lost with it."""

    phase: str
    fault: str
    victim: str

    def __str__(self) -> str:
        return f"{self.phase} / {self.fault} / {self.victim}"


@dataclass(frozen=True, slots=True)
class Ends:
    """Exit codes that agents may end with in one phase of a kind, whatever is lost with it."""

    codes: tuple[int, ...]
    victims: tuple[str, ...] = ("nothing",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticKind:
    """What happens to a job, and how it may end.

    happen: does it.
    phases: where, with the ends of each.
    says: words that each agent says which ends with another code than 0.
    undo: puts right what is broken, before the agents are started again.
    flags: of training, ``None`` for one that is left out.
    options: of agents.
    mib: sizes of small file systems in MiB, by the name of their folder. They need root.
    behind_proxy: agents reach etcd through a proxy.
    is_logged: what ranks print is kept to the last line.
    """

    happen: "Callable[[Job, ElasticCase], None]"
    phases: Mapping[str, Ends]
    says: str = ""
    undo: "Callable[[Job], None]" = lambda job: None
    flags: Mapping[str, str | None] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    mib: Mapping[str, int] = field(default_factory=dict)
    behind_proxy: bool = False
    is_logged: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticOutcome:
    """How a case went.

    codes: exit codes by node; ``None`` for an agent that did not end.
    ended_s: seconds from the fault until the last agent had ended.
    problems: what is wrong, in words.
    told: the end of what all agents said, for a failed case.
    """

    case: ElasticCase
    codes: Mapping[str, int | None]
    ended_s: float
    problems: tuple[str, ...]
    told: str


class Job:
    """The job of a case.

    Attributes:
        saved_steps: that have to be in ``--save`` at the end. The newest is the last that is trained.
        problems: what is wrong with this case beyond what is checked in all, in words.
        replaced: values of etcd that were written over, by key.
    """

    def __init__(self, case: ElasticCase, folder: Path, made: ExitStack) -> None:
        kind = ELASTIC_FAULTS[case.fault]
        for name, mib in kind.mib.items():
            made.enter_context(small_file_system(folder / name, mib=mib))
        self.folder, self.saved, self.logs = folder, folder / "saved", folder / "logs"
        self.etcd = EtcdServer(folder / "etcd", quota_bytes=24 * _MIB)
        self.etcd.start()
        made.callback(self.etcd.stop)
        self.proxy = made.enter_context(EtcdProxy(self.etcd.url))
        options: dict[str, object] = {
            **{"lease": _LEASE_S, "dwell": 0, "min-nodes": 2, "wait-for-nodes": 40, "wait-for-etcd": _WAIT_FOR_ETCD_S},
            "logs": self.logs,
            **({"etcd": self.proxy.url} if kind.behind_proxy else {}),
            **kind.options,
        }
        flags: dict[str, Any] = {"hetero_heartbeat_timeout": "10", **kind.flags}
        self.nodes = made.enter_context(
            ElasticCluster(
                folder,
                self.etcd,
                "matrix",
                types=dict.fromkeys(_NAMES, "box"),
                words=elastic_words(folder, steps=STEPS, **flags),
                options=options,
            )
        )
        self.saved_steps = {STEPS}
        self.problems: list[str] = []
        self.replaced: dict[str, bytes] = {}
        self._ranks: dict[int, psutil.Process] = {}
        self._leader = ""

    def train_to(self, step: int) -> None:
        """Train all nodes up to a step, and hold them there."""
        self.nodes.allow(step)
        if not self.nodes.is_started(_NAMES[-1]):
            self.nodes.start(*(name for name in _NAMES if not self.nodes.is_started(name)))
        self.nodes.wait_until(lambda state: state.epoch is not None and len(state.epoch.nodes) == len(_NAMES))
        self.nodes.wait_for_step(step)
        # Once etcd is away, no test can ask it.
        self._ranks, self._leader = self.nodes.processes_of_ranks(), self.nodes.leader()

    def go_on(self) -> None:
        """Let ranks train to the end."""
        self.nodes.allow(STEPS)

    def lose(self, victim: str) -> None:
        """Kill a rank, or a node with its memory: the one that leads, or another."""
        if victim == "rank":
            # The fault may have ended it already.
            with contextlib.suppress(psutil.NoSuchProcess):
                self._ranks[1].kill()
        elif victim in ("node", "leader"):
            self.lose_node(self._leader if victim == "leader" else self.followers()[0])

    def lose_node(self, name: str, *, with_memory: bool = True) -> None:
        """Kill a node, as a host that dies, or one whose memory stays."""
        self.nodes.kill_node(name)
        if with_memory:
            shutil.rmtree(self.nodes.folder_of_copies(name), ignore_errors=True)

    def followers(self) -> list[str]:
        """Nodes that do not lead."""
        return [name for name in _NAMES if name != self._leader]

    def has_ended(self) -> bool:
        """Whether all agents have."""
        return all(self.nodes.exit_code(name) is not None for name in _NAMES if self.nodes.is_started(name))

    def wait(self, condition: Callable[[], bool], *, seconds: float = _LIMIT_S) -> bool:
        """Wait until it is so, or all agents have ended; whether it is."""
        deadline = time.monotonic() + seconds
        while not (is_so := condition()) and not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        return is_so

    def codes(self) -> dict[str, int | None]:
        """Exit codes of all agents that were not killed."""
        return {
            name: self.nodes.exit_code(name)
            for name in _NAMES
            if self.nodes.is_started(name) and not self.nodes.is_killed(name)
        }


# ---- what happens


def _rewind(job: Job, case: ElasticCase) -> None:
    kept = job.folder / "kept"
    if case.phase == "before the first epoch":
        job.nodes.start("a")
        job.nodes.wait_until(lambda state: "a" in state.nodes)
        job.etcd.keep_data(kept)
    job.train_to(3)
    if case.phase != "before the first epoch":
        job.etcd.keep_data(kept)
    if case.phase == "epochs made since":
        for step in (5, 7):
            epoch = job.nodes.state().epoch
            assert epoch is not None
            job.lose("rank")
            job.nodes.allow(step)
            job.nodes.wait_for_epoch(epoch.number + 1)
            job.train_to(step)
    job.train_to(8)
    # Others than this job use an etcd, too: the revisions of one that went back are not reached again at once.
    for number in range(20):
        job.etcd.put(f"/other/{number}", b"")
    time.sleep(_READ_WITHIN_S)
    job.etcd.stop()
    job.etcd.put_back(kept)
    job.lose(case.victim)
    job.etcd.start()
    job.wait(job.has_ended, seconds=_NOTICED_S)
    job.go_on()


def _refuse_writes(job: Job, case: ElasticCase) -> None:
    _without_writes(job, case, job.etcd.fill)


def _slow_writes(job: Job, case: ElasticCase) -> None:
    def slow_down() -> None:
        job.proxy.write_delay_s = _SLOW_WRITE_S

    _without_writes(job, case, slow_down)


def _write_fast_again(job: Job) -> None:
    job.proxy.write_delay_s = 0.0


def _without_writes(job: Job, case: ElasticCase, begin: Callable[[], None]) -> None:
    if case.phase == "start":
        begin()
        job.nodes.allow(STEPS)
        job.nodes.start()
        return
    job.train_to(STEPS - 2 if case.phase == "end" else 6)
    begin()
    job.lose(case.victim)
    job.go_on()


def _lose_while(job: Job, case: ElasticCase) -> None:
    step = 8 if case.phase in ("save of --exit-interval", "save of --save-interval") else STEPS
    job.saved_steps = {step} if case.phase == "save of --exit-interval" else {step, STEPS}
    job.train_to(step - 2)
    job.nodes.hold("evaluation" if case.phase == "last evaluation" else "save")
    job.go_on()
    job.nodes.wait_until_held()
    # Copies of the step are whole by then, so that it is restored and not trained again.
    time.sleep(_COPIED_WITHIN_S)
    job.lose(case.victim)
    # Others that wait there are ended before they can go on.
    job.wait(lambda: len(job.nodes.events("detected")) >= len(job.codes()))
    job.nodes.hold("")


def _fill_save(job: Job, case: ElasticCase) -> None:
    job.train_to(STEPS - 2)
    fill(job.saved)
    job.go_on()
    if case.phase == "last save, once":
        job.wait(lambda: bool(job.nodes.events("detected")))
        free(job.saved)


def _protect_save(job: Job, case: ElasticCase) -> None:
    job.train_to(STEPS - 2)
    make_read_only(job.saved)
    job.go_on()


def _fill_logs(job: Job, case: ElasticCase) -> None:
    job.train_to(STEPS - 2 if case.phase == "end" else 6)
    fill(job.logs)
    job.lose(case.victim)
    job.go_on()


def _write_junk(job: Job, case: ElasticCase) -> None:
    job.train_to(4)
    name, value = JUNK[case.phase]
    key = f"/hetero/{job.nodes.job}/{name}"
    if (old := job.etcd.get(key)) is not None:
        job.replaced[key] = old
    job.etcd.put(key, value)
    time.sleep(_READ_WITHIN_S)
    job.lose(case.victim)
    job.go_on()
    job.wait(job.has_ended)
    if name in _NAMED_JUNK and not any(name in job.nodes.output(node) for node in _NAMES):
        job.problems.append(f"no agent named {key}")


def _put_junk_right(job: Job) -> None:
    for key, value in job.replaced.items():
        job.etcd.put(key, value)


def _make_unavailable(job: Job, case: ElasticCase) -> None:
    job.train_to(6)
    job.proxy.own_answer = (503, "no server is available")
    job.nodes.allow(9)
    job.lose(case.victim)
    # Longer than a lease, and shorter than what an agent waits for that needs etcd.
    time.sleep(_LEASE_S + 1)
    job.proxy.own_answer = None
    job.go_on()


def _lose_a_node(job: Job, case: ElasticCase) -> None:
    job.train_to(6)
    job.lose(case.victim)
    job.go_on()


def _lose_two_for_a_while(job: Job, case: ElasticCase) -> None:
    job.train_to(6)
    away = job.followers()
    for name in away:
        job.lose_node(name, with_memory=False)
    job.go_on()
    if case.phase == "back in time":
        time.sleep(_LEASE_S + 2)
        job.nodes.start(*away)


def _leave_all(job: Job, case: ElasticCase) -> None:
    job.train_to(6)
    for name in _NAMES:
        if case.victim == "SIGTERM":
            job.nodes.signal_node(name, signal.SIGTERM)
        else:
            job.nodes.leave(name)
    job.wait(job.has_ended)
    if job.saved.is_dir():
        # The step in hand, whichever that was.
        job.saved_steps = {max(published_steps(job.saved), default=STEPS)}


def _leave_too_late(job: Job, case: ElasticCase) -> None:
    job.train_to(6)
    job.nodes.hold("evaluation")
    job.nodes.allow(7)
    job.nodes.wait_until_held()
    leaving = job.followers()[0]
    job.nodes.signal_node(leaving, signal.SIGTERM)
    if job.wait(lambda: job.nodes.exit_code(leaving) is not None) and job.nodes.exit_code(leaving) != 1:
        job.problems.append(f"{leaving}, which could not be waited for, ended with {job.nodes.exit_code(leaving)}")
    job.nodes.hold("")
    job.go_on()


def _interrupt_all(job: Job, case: ElasticCase) -> None:
    job.train_to(6)
    for name in _NAMES:
        job.nodes.signal_node(name, signal.SIGINT)
    job.go_on()


def _lose_etcd(job: Job, case: ElasticCase) -> None:
    job.train_to(STEPS - 2 if case.phase == "end" else 6)
    job.etcd.stop()
    job.lose(case.victim)
    job.go_on()


JUNK: dict[str, tuple[str, bytes]] = {
    **{
        f"bytes in {name}": (key, b"\xff\xfe{")
        for name, key in {
            "the token": "token",
            "the settings": "settings",
            "a node": "nodes/zz",
            "a node of the job": "nodes/a",
            "the leader": "leader",
            "the epoch": "epoch",
            "a broken epoch": "broken/1",
            "a stop": "stop/1",
            "a report": "reports/a",
            "committed": "committed",
            "a notice": "notices/zz",
            "the stored step": "stored",
            "a bad copy": "bad/zz",
            "the end": "finished",
            "no key of ours": "zz/zz",
        }.items()
    },
    "a field in a notice": ("notices/zz", b'{"node": "zz", "reason": "r", "seconds": null, "newer": 1}'),
    "a field in a report": ("reports/zz", b'{"node": "zz", "newer": 1}'),
    "a field in the end": ("finished", b'{"exit_code": 0, "newer": 1}'),
    "words in committed": ("committed", b"many"),
}
"""By phase: a key of the job, and a value that no agent has written."""

_NAMED_JUNK = ("nodes/zz", "epoch", "committed", "stored", "finished")
"""Keys that agents have to name: nobody writes them again at once, and they are not texts for people."""

_LOSSES = ("rank", "node", "leader")

ELASTIC_FAULTS: dict[str, ElasticKind] = {
    "etcd rewound": ElasticKind(
        happen=_rewind,
        phases=dict.fromkeys(
            ("before the first epoch", "epochs made since", "same epoch"), Ends((2,), ("nothing", *_LOSSES))
        ),
        says="snapshot",
    ),
    "etcd is full": ElasticKind(
        happen=_refuse_writes,
        phases={"start": Ends((2,)), "end": Ends((0,)), "training": Ends((1,), _LOSSES)},
        says="database space exceeded",
        undo=lambda job: job.etcd.free(),
    ),
    "etcd writes slowly": ElasticKind(
        happen=_slow_writes,
        # What is answered too late has been done all the same.
        phases={"start": Ends((0, 2)), "end": Ends((0,)), "training": Ends((0, 1), ("rank", "node"))},
        undo=_write_fast_again,
        behind_proxy=True,
    ),
    "etcd answers 503": ElasticKind(
        happen=_make_unavailable, phases={"training": Ends((0,), ("nothing", *_LOSSES))}, behind_proxy=True
    ),
    "etcd is gone": ElasticKind(
        happen=_lose_etcd,
        phases={"end": Ends((0,)), "training": Ends((1,), _LOSSES)},
        says="does not answer",
        undo=lambda job: job.etcd.start(),
    ),
    "junk in etcd": ElasticKind(
        happen=_write_junk,
        phases={phase: Ends((0, 2) if "token" in phase else (0,), ("rank",)) for phase in JUNK},
        undo=_put_junk_right,
    ),
    "a loss": ElasticKind(
        happen=_lose_while,
        phases={"last save": Ends((0,), _LOSSES), "last evaluation": Ends((0,), ("rank", "node"))},
        flags={"eval_iters": "1", "eval_interval": "1000"},
    ),
    "a loss, then the exit": ElasticKind(
        happen=_lose_while, phases={"save of --exit-interval": Ends((0,), _LOSSES)}, flags={"exit_interval": "8"}
    ),
    "a loss on the way": ElasticKind(
        happen=_lose_while,
        phases={"save of --save-interval": Ends((0,), ("rank", "node"))},
        flags={"save_interval": "4"},
    ),
    "--save is full": ElasticKind(
        happen=_fill_save,
        phases={"last save, once": Ends((0,)), "last save": Ends((1,))},
        says="No space left",
        undo=lambda job: free(job.saved),
        mib={"saved": 8},
    ),
    "--save is read-only": ElasticKind(
        happen=_protect_save,
        phases={"last save": Ends((1, 2))},
        says="Read-only file system",
        undo=lambda job: make_writable(job.saved),
        mib={"saved": 8},
    ),
    "logs are full": ElasticKind(
        happen=_fill_logs,
        phases={"end": Ends((0,)), "training": Ends((0,), _LOSSES)},
        mib={"logs": 8},
        is_logged=False,
    ),
    "too few nodes": ElasticKind(
        happen=_lose_a_node,
        phases={"training": Ends((1,), ("node", "leader"))},
        says="are asked for",
        options={"min-nodes": 3, "wait-for-nodes": _WAIT_FOR_NODES_S},
    ),
    "two nodes away": ElasticKind(
        happen=_lose_two_for_a_while,
        phases={"back in time": Ends((0,)), "back too late": Ends((1,))},
        says="no step is whole among",
        options={"min-nodes": 1, "wait-for-nodes": _WAIT_FOR_NODES_S},
    ),
    "all nodes leave": ElasticKind(happen=_leave_all, phases={"training": Ends((0,), ("notices", "SIGTERM"))}),
    "all nodes leave, no --save": ElasticKind(
        happen=_leave_all,
        phases={"training": Ends((1,), ("notices", "SIGTERM"))},
        says="--job",
        flags={"save": None, "save_interval": None},
    ),
    "a leave too late": ElasticKind(
        happen=_leave_too_late,
        phases={"evaluation": Ends((0, 1))},
        flags={"eval_iters": "1", "eval_interval": "7"},
        options={"leave-within": 2},
    ),
    "SIGINT": ElasticKind(happen=_interrupt_all, phases={"training": Ends((130,))}),
}


ELASTIC_CASES = tuple(
    ElasticCase(phase, fault, victim)
    for fault, kind in ELASTIC_FAULTS.items()
    for phase, ends in kind.phases.items()
    for victim in ends.victims
)


@functools.cache
def runnable_cases() -> tuple[ElasticCase, ...]:
    """List the cases that this user may run."""
    is_root = can_make_namespaces()
    return tuple(case for case in ELASTIC_CASES if is_root or not ELASTIC_FAULTS[case.fault].mib)


# ---- one case, and all of them


def run_elastic_case(case: ElasticCase, folder: Path, oracle: Path) -> ElasticOutcome:
    """Run ``case`` in a new folder; ``oracle`` is where the run of one process is, with every step saved."""
    folder.mkdir()
    problems: list[str] = []
    codes: Mapping[str, int | None] = {}
    ended_s, told = 0.0, ""
    try:
        with ExitStack() as made:
            job = Job(case, folder, made)
            try:
                ELASTIC_FAULTS[case.fault].happen(job, case)
                began_s = time.monotonic()
                job.wait(job.has_ended)
                ended_s, codes = time.monotonic() - began_s, job.codes()
                problems += _end_problems(job, case, codes)
                if not {0, None} & set(codes.values()):
                    problems += _second_run_problems(job, case)
                if job.has_ended():
                    problems += _result_problems(job, case, oracle)
                problems += job.problems
            finally:
                told = job.nodes.told()
    except (AssertionError, HeteroError, OSError, psutil.Error, subprocess.SubprocessError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    return ElasticOutcome(case=case, codes=codes, ended_s=ended_s, problems=tuple(problems), told=told)


def _end_problems(job: Job, case: ElasticCase, codes: Mapping[str, int | None]) -> list[str]:
    """Check that all agents ended as they may, and which of them kept their copies."""
    kind = ELASTIC_FAULTS[case.fault]
    allowed = kind.phases[case.phase].codes
    problems = []
    for name, code in codes.items():
        has_copies = any(job.nodes.folder_of_copies(name).glob("epoch_*"))
        if code is None:
            problems.append(f"{name} did not end within {_LIMIT_S:g} s")
        elif code not in allowed:
            problems.append(f"{name} ended with {code}, may with {allowed}: {_last_line(job, name)}")
        if code == 0 and job.nodes.folder_of_copies(name).exists():
            problems.append(f"{name} ended with 0 and left its copies")
        if code not in (0, None) and case.phase != "start":
            if not has_copies:
                problems.append(f"{name} ended with {code} and has no copies left: {_last_line(job, name)}")
            if kind.says not in job.nodes.output(name):
                problems.append(f"{name} ended with {code} and did not say {kind.says!r}: {_last_line(job, name)}")
    return problems


def _second_run_problems(job: Job, case: ElasticCase) -> list[str]:
    """Put right what was broken, start all agents again under the same name, and check that they end with 0."""
    ELASTIC_FAULTS[case.fault].undo(job)
    job.go_on()
    job.nodes.start()
    job.wait(job.has_ended)
    return [
        f"started again, {name} {'did not end' if code is None else f'ended with {code}'}: {_last_line(job, name)}"
        for name, code in job.codes().items()
        if code != 0
    ]


def _result_problems(job: Job, case: ElasticCase, oracle: Path) -> list[str]:
    """Check losses, and what was saved, against one process."""
    kind = ELASTIC_FAULTS[case.fault]
    expected, _ = uninterrupted(oracle, steps=STEPS, save_interval=1)
    losses = job.nodes.losses()
    problems = [
        f"step {step}: loss {loss}, not {expected[step]}" for step, loss in losses.items() if loss != expected[step]
    ]
    missing = [step for step in range(1, max(job.saved_steps) + 1) if step not in losses]
    if missing and kind.is_logged:
        problems.append(f"no loss of steps {missing} was printed")
    if "save" in kind.flags:
        return problems
    published = published_steps(job.saved) if job.saved.is_dir() else []
    for step in sorted(job.saved_steps):
        if step not in published:
            problems.append(f"--save has no step {step}")
            continue
        saved, state = saved_state(job.saved, step=step), saved_state(oracle / "saved", step=step)
        unlike = [n for n in state if n not in saved or not np.allclose(saved[n], state[n], rtol=1e-9, atol=1e-9)]
        problems += [f"{name} in step {step} is not that of one process" for name in unlike]
    return problems


def _last_line(job: Job, name: str) -> str:
    return job.nodes.output(name).rstrip().rpartition("\n")[2]


def run_elastic_cases(cases: Sequence[ElasticCase], root: Path, *, parallel: int) -> Iterator[ElasticOutcome]:
    """Run ``parallel`` cases at a time, in folders of their own under ``root``; yield them in their order."""
    (oracle := root / "oracle").mkdir()
    uninterrupted(oracle, steps=STEPS, save_interval=1)
    with ThreadPoolExecutor(parallel) as pool:
        yield from pool.map(
            lambda numbered: run_elastic_case(numbered[1], root / f"case_{numbered[0]}", oracle), enumerate(cases)
        )
