"""Nodes of an elastic job on this machine: agents that a test starts, kills, stops and asks to leave."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from hetero.elastic.events import ElasticEvent, EventKind, read_events
from hetero.elastic.folder_claim import SHARED_MEMORY
from hetero.elastic.job_store import JobState, JobStore
from hetero.elastic.records import Notice
from tests.helpers.etcd import EtcdServer
from tests.helpers.forked_agent import ForkedAgent
from tests.helpers.network_namespaces import Host

STEPS_FILE = "HETERO_TEST_STEPS_FILE"
"""Names the file of steps that :mod:`tests.helpers.fp64_program` may train."""

SLOWNESS_FILE = "HETERO_TEST_SLOWNESS_FILE"
"""Names the file that says how much longer the forwards of its nodes take."""

HOLD_FILE = "HETERO_TEST_HOLD_FILE"
"""Names the file that says where ranks of :mod:`tests.helpers.fp64_program` are held."""

_GONE_WITHIN_S = 10.0

PATIENCE_S = 120.0
"""The machine may be busy with others."""


class ElasticCluster:
    """The nodes of one job; as a context it ends all of them, and checks that nothing of them is left.

    Args:
        folder: for what agents print, and for logs if no option names another one for these.
        types: node type by name of each node that may be started.
        words: program and flags.
        options: of every agent, such as ``{"dwell": 1}``.
        hosts: by name of the nodes that are network namespaces.
    """

    def __init__(
        self,
        folder: Path,
        etcd: EtcdServer,
        job: str,
        *,
        types: Mapping[str, str],
        words: Sequence[str],
        options: Mapping[str, object] | None = None,
        hosts: Mapping[str, Host] | None = None,
    ) -> None:
        self.job = f"{job}-{uuid.uuid4().hex[:8]}"
        self._folder = folder
        self._logs = Path(str((options or {}).get("logs", folder)))
        self._etcd = etcd
        self._types = types
        self._words = words
        self._options = {"lease": 3, "min-nodes": len(types), "wait-for-nodes": PATIENCE_S, **(options or {})}
        self._hosts = hosts or {}
        self._agents: dict[str, ForkedAgent] = {}
        self._sessions: list[int] = []
        self._killed: set[str] = set()
        self._frozen: dict[str, list[psutil.Process]] = {}
        self._copies: dict[str, Path] = {}
        self._allowed = folder / "steps"
        self._allowed.write_text("1000000")
        self._slowness = folder / "slowness.json"
        self.slow_down({})
        self._hold = folder / "hold"
        self.hold("")
        self.store = JobStore(etcd.address, self.job)

    def __enter__(self) -> "ElasticCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, *names: str) -> None:
        """Start the agents of some nodes, of all if none is named."""
        for name in names or self._types:
            self.start_as(name)

    def start_as(self, name: str, *, words: Sequence[str] | None = None, **options: object) -> None:
        """Start an agent with another program or other options than all."""
        address = self._etcd.address
        files = {"etcd-ca": address.ca, "etcd-cert": address.certificate, "etcd-key": address.key}
        given = {
            "job": self.job,
            "etcd": self._etcd.url,
            **{option: path for option, path in files.items() if path is not None},
            "node-name": name,
            "node-type": self._types.get(name, next(iter(self._types.values()))),
            "logs": self._logs,
            **({"host": self._hosts[name].address} if name in self._hosts else {}),
            **self._options,
            **{key.replace("_", "-"): value for key, value in options.items()},
        }
        flags = [f"--{option}={value}" for option, value in given.items()]
        self._copies[name] = Path(str(given.get("copies", SHARED_MEMORY / f"hetero-{self.job}-{name}")))
        self._agents[name] = ForkedAgent(
            ["elastic", "agent", *flags, "--", *(words or self._words)],
            output=self._folder / f"{name}.out",
            variables={
                **os.environ,
                STEPS_FILE: str(self._allowed),
                SLOWNESS_FILE: str(self._slowness),
                HOLD_FILE: str(self._hold),
                **({"GLOO_SOCKET_IFNAME": "eth0"} if name in self._hosts else {}),
            },
            host=self._hosts.get(name),
        )
        self._sessions.append(self._agents[name].pid)
        self._killed.discard(name)

    def kill_node(self, name: str) -> None:
        """Its agent dies without a word, and with it its ranks."""
        self._killed.add(name)
        self._agents[name].kill()
        self._agents[name].wait()

    def agent_pid(self, name: str) -> int:
        """Of the process that a node's agent is."""
        return self._agents[name].pid

    def signal_node(self, name: str, number: signal.Signals) -> None:
        self._agents[name].send_signal(number)

    def signal_whole_node(self, name: str, number: signal.Signals) -> None:
        """Signal its agent and all that it has started, as a supervisor of services does it."""
        agent = psutil.Process(self._agents[name].pid)
        for process in [agent, *_descendants(agent.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def freeze_node(self, name: str) -> None:
        """Stop its agent and all that it has started, as a host that stands still."""
        agent = psutil.Process(self._agents[name].pid)
        agent.suspend()
        frozen = self._frozen[name] = [agent]
        # An agent or a rank may end meanwhile, as it was told to.
        for process in _descendants(agent.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                frozen.append(process)

    def thaw_node(self, name: str) -> None:
        for process in reversed(self._frozen.pop(name)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def kill_rank(self, rank: int) -> None:
        """Of the newest epoch."""
        self.processes_of_ranks()[rank].kill()

    def processes_of_ranks(self) -> dict[int, psutil.Process]:
        """By rank of the newest epoch; known by the files that they print into."""
        epoch = self.state().epoch
        assert epoch is not None
        found = {}
        for agent in self._agents.values():
            for process in _descendants(agent.pid):
                with contextlib.suppress(OSError, psutil.Error):
                    output = Path(f"/proc/{process.pid}/fd/1").readlink()
                    if output.parent.name == f"epoch_{epoch.number:08d}":
                        found[int(output.stem.removeprefix("rank_"))] = process
        return found

    def leader(self) -> str:
        """The node that leads."""
        state = self.wait_until(lambda s: s.leader in {node.incarnation for node in s.nodes.values()})
        return next(name for name, node in state.nodes.items() if node.incarnation == state.leader)

    def leave(self, name: str) -> None:
        self.store.put_notice(Notice(node=name, reason="test"))

    def state(self) -> JobState:
        return self.store.read()

    def wait_until(self, condition: Callable[[JobState], bool], *, seconds: float = PATIENCE_S) -> JobState:
        """Wait until the state of the job is so; it is told with what agents said if that never comes."""
        deadline = time.monotonic() + seconds
        while not condition(state := self.state()):
            ended = {name: each.poll() for name, each in self._agents.items() if each.poll() is not None}
            early = {name: code for name, code in ended.items() if name not in self._killed and code != 0}
            assert not early, f"agents ended early: {early}\n{self.told()}"
            assert time.monotonic() < deadline, f"never came\n{state}\n{self.told()}"
            time.sleep(0.02)
        return state

    def allow(self, step: int) -> None:
        """Let ranks of ``tests/helpers/fp64_program.py`` train up to this step, and wait before the next."""
        _replace(self._allowed, str(step))

    def slow_down(self, seconds: Mapping[str, float]) -> None:
        """Let forwards of ``tests/helpers/fp64_program.py`` take longer, by node for each sample and layer."""
        _replace(self._slowness, json.dumps(dict(seconds)))

    def hold(self, where: str) -> None:
        """Let ranks of ``tests/helpers/fp64_program.py`` wait before its function of this name, or go on ("")."""
        (self._folder / "held").unlink(missing_ok=True)
        _replace(self._hold, where)

    def is_held(self) -> bool:
        """Whether a rank waits where :meth:`hold` says."""
        return (self._folder / "held").exists()

    def wait_until_held(self, *, seconds: float = PATIENCE_S) -> None:
        """Wait until a rank waits where :meth:`hold` says."""
        deadline = time.monotonic() + seconds
        while not self.is_held():
            assert time.monotonic() < deadline, f"no rank came to {self._hold.read_text()}\n{self.told()}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, *, seconds: float = PATIENCE_S) -> JobState:
        """Wait until all ranks of the newest epoch have done ``step``."""

        def is_done(state: JobState) -> bool:
            if state.epoch is None:
                return False
            ranks = [r for report in state.reports.values() for r in report.ranks if r.epoch == state.epoch.number]
            return len(ranks) == sum(len(e.ranks) for e in state.epoch.nodes) and all(r.step >= step for r in ranks)

        return self.wait_until(is_done, seconds=seconds)

    def losses(self) -> dict[int, str]:
        """By step, the last loss that a rank has printed for it, as it was printed."""
        found: dict[int, str] = {}
        # The names of epochs' folders come in their order.
        for path in sorted(self._logs.glob("*/epoch_*/*.log"), key=lambda each: each.parent.name):
            for step, loss in re.findall(r"^step +(\d+)/\d+ \| loss (\d+\.\d+)", read_log(path), re.MULTILINE):
                found[int(step)] = loss
        return found

    def wait_for_commit(self, step: int, *, epoch: int = 1, seconds: float = PATIENCE_S) -> JobState:
        """Wait until a rank knows that ``step`` is committed, in this epoch or a later one."""
        return self.wait_until(
            lambda state: state.epoch is not None and state.epoch.number >= epoch and _committed(state) >= step,
            seconds=seconds,
        )

    def wait_for_epoch(self, number: int, *, seconds: float = PATIENCE_S) -> JobState:
        """Wait until this epoch, or a later one, has done a step."""
        return self.wait_until(
            lambda state: (
                state.epoch is not None
                and state.epoch.number >= number
                and any(
                    rank.epoch == state.epoch.number and rank.phase in ("step", "finished")
                    for report in state.reports.values()
                    for rank in report.ranks
                )
            ),
            seconds=seconds,
        )

    def wait_for_end(self, *, seconds: float = PATIENCE_S) -> dict[str, int]:
        """Wait until all agents have ended; their exit codes by name."""
        deadline = time.monotonic() + seconds
        while any(agent.poll() is None for agent in self._agents.values()):
            assert time.monotonic() < deadline, f"agents did not end\n{self.told()}"
            time.sleep(0.02)
        return {name: agent.wait() for name, agent in self._agents.items()}

    def is_started(self, name: str) -> bool:
        return name in self._agents

    def exit_code(self, name: str) -> int | None:
        """``None`` while its agent lives."""
        return self._agents[name].poll()

    def is_killed(self, name: str) -> bool:
        """Whether it was the test that ended its agent."""
        return name in self._killed

    def folder_of_copies(self, name: str) -> Path:
        return self._copies[name]

    def wait_for_end_of(self, name: str, *, seconds: float = PATIENCE_S) -> int:
        """Wait until one agent has ended; its exit code."""
        try:
            return self._agents[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end\n{self.told()}") from None

    def output(self, name: str) -> str:
        """What an agent has printed, its ranks' output included."""
        path = self._folder / f"{name}.out"
        return read_log(path) if path.exists() else ""

    def wait_for_output(self, name: str, pattern: str, *, seconds: float = PATIENCE_S) -> None:
        """Wait until an agent has printed a line that matches."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.output(name), re.MULTILINE):
            assert time.monotonic() < deadline, f"{name} never printed {pattern}\n{self.told()}"
            time.sleep(0.02)

    def told(self) -> str:
        """The end of what all have said, for a failed test."""
        said = "".join(f"--- {name}\n{self.output(name)[-3000:]}\n" for name in self._types)
        lines = (f"{e.node} {e.time_s % 1000:.2f} {e.kind} {e.epoch} {e.step} {e.detail}" for e in self.events())
        return said + "\n".join(lines)

    def events(self, *kinds: EventKind) -> list[ElasticEvent]:
        """Of all nodes in the order of time, of some kinds or of all."""
        found = [event for path in self._logs.glob("*.events.jsonl") for event in read_events(path)]
        return sorted((e for e in found if not kinds or e.kind in kinds), key=lambda each: each.time_s)

    def wait_for_events(self, kind: EventKind, count: int, *, seconds: float = PATIENCE_S) -> None:
        """Wait until the nodes have noted an event so often in all."""
        deadline = time.monotonic() + seconds
        while len(self.events(kind)) < count:
            assert time.monotonic() < deadline, f"{kind} never came\n{self.told()}"
            time.sleep(0.02)

    def close(self) -> None:
        """End all, and check that nothing is left but what killed nodes could not take along."""
        for name, agent in self._agents.items():
            if agent.poll() is None:
                agent.kill()
                self._killed.add(name)
            agent.wait()
        self.store.close()
        deadline = time.monotonic() + _GONE_WITHIN_S
        while (left := list(self._left_processes())) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            process.kill()
        for name, folder in self._copies.items():
            if name in self._killed or self._agents[name].returncode != 0:
                shutil.rmtree(folder, ignore_errors=True)
        remaining = [name for name, folder in self._copies.items() if folder.exists()]
        for name in remaining:
            shutil.rmtree(self._copies[name])
        remaining += [path.name for path in Path("/dev/shm").glob(f"*{self.job}*")]
        assert not left, f"left: {left}"
        assert not remaining, f"folders of copies left by {remaining}"

    def _left_processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) in self._sessions and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def read_log(path: Path) -> str:
    """What a process has printed that still prints: its last character may be there in part."""
    return path.read_text(errors="replace")


def _replace(path: Path, text: str) -> None:
    """Whoever reads it finds the old text or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _committed(state: JobState) -> int:
    return max((rank.committed for report in state.reports.values() for rank in report.ranks), default=0)
