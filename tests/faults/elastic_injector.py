"""Does to an elastic job on this machine what a :class:`~tests.faults.elastic_scenarios.Fault` says, and undoes it."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from hetero.elastic.events import ElasticEvent
from hetero.elastic.records import Epoch, Outcome
from hetero.errors import MembershipStoreError
from hetero.serialization import from_json
from tests.faults.elastic_scenarios import Fault, FaultKind
from tests.helpers.elastic_cluster import ElasticCluster, read_log
from tests.helpers.etcd import EtcdServer
from tests.helpers.network_namespaces import Host, Switch

COPIES_MIB = 32
"""Room that a node has for copies where full memory is injected; they take less than half of it."""

_POLL_S = 0.02
_MEMBERS_WITHIN_S = 40.0


class EventTail:
    """The events of all nodes as they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.events: list[ElasticEvent] = []

    def update(self) -> list[ElasticEvent]:
        for path in self._folder.glob("*.events.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read().split(b"\n")[:-1]
            self._read[path] = self._read.get(path, 0) + sum(len(line) + 1 for line in lines)
            self.events += [from_json(ElasticEvent, line.decode(), source=str(path)) for line in lines]
        return self.events


def last_step(folder: Path) -> int:
    """The last that a rank has printed, in whatever epoch."""
    steps = (
        int(step)
        for path in folder.glob("*/epoch_*/*.log")
        for step in re.findall(r"^step +(\d+)/", read_log(path), re.MULTILINE)
    )
    return max(steps, default=0)


@contextlib.contextmanager
def small_memory(folder: Path, *, is_root: bool) -> Iterator[Path]:
    """A folder that holds so much and no more, if this user may mount."""
    folder.mkdir(parents=True)
    if not is_root:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={COPIES_MIB}m", "tmpfs", str(folder)], check=True, timeout=20)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


class Injector:
    """Attributes:
    outcome: how the job has ended, ``None`` while it goes on.
    acted_s: Unix time of the last fault, after what it had to wait for.
    """

    def __init__(
        self,
        nodes: ElasticCluster,
        tail: EventTail,
        etcd: EtcdServer,
        *,
        folder: Path,
        switch: Switch | None,
        hosts: dict[str, Host],
    ) -> None:
        self.outcome: Outcome | None = None
        self.acted_s = 0.0
        self._nodes = nodes
        self._tail = tail
        self._etcd = etcd
        self._folder = folder
        self._switch = switch
        self._hosts = hosts

    def inject(self, fault: Fault, names: list[str]) -> str:
        """Do it, and undo what is not for good; says what was done, and to whom.

        Args:
            names: of all nodes.
        """
        acts: dict[FaultKind, Callable[[Fault, list[str]], str]] = {
            "kill rank": self._kill_rank,
            "kill node": self._kill_nodes,
            "kill node and another": self._kill_nodes,
            "stop rank shortly": self._stop_rank,
            "stop rank for long": self._stop_rank,
            "stop node shortly": self._stop_node,
            "stop node for long": self._stop_node,
            "cut link shortly": self._cut_link,
            "cut link for long": self._cut_link,
            "notice": self._notice,
            "leave": self._leave,
            "join": self._join,
            "restart etcd": self._restart_etcd,
            "etcd away": self._restart_etcd,
            "flip byte": self._flip_byte,
            "full memory": self._fill_memory,
            "store fails": self._break_store,
            "store truncates": self._truncate_in_store,
        }
        self.acted_s = time.time()
        return acts[fault.kind](fault, names)

    def look(self) -> Epoch | None:
        """The newest epoch, ``None`` while there is none or etcd is away; takes note of the outcome."""
        try:
            state = self._nodes.state()
        except MembershipStoreError:
            return None
        self.outcome = self.outcome or state.outcome
        return state.epoch

    def alive(self, names: list[str]) -> list[str]:
        """Nodes whose agents live."""
        return [name for name in names if self._nodes.is_started(name) and self._nodes.exit_code(name) is None]

    def members(self) -> list[str]:
        """The nodes of the newest epoch whose agents live, in the order of ranks."""
        epoch = self.look()
        return [] if epoch is None else self.alive([each.node.name for each in epoch.nodes])

    def _safe_victims(self, fault: Fault, count: int) -> list[str]:
        """Members of an epoch that has ``count`` more, and has a copy of them; nobody if that never comes."""
        deadline = time.monotonic() + _MEMBERS_WITHIN_S
        while self.outcome is None and time.monotonic() < deadline:
            members, epoch = self.members(), self.look()
            committed = {e.epoch for e in self._tail.update() if e.kind == "committed"}
            is_committed = epoch is not None and epoch.number in committed
            if len(members) > count and (fault.moment != "step" or is_committed):
                return (members * 2)[fault.victim % len(members) :][:count]
            if epoch is not None and not is_committed:
                # Copies are voted on in steps.
                self._nodes.allow(last_step(self._folder) + 1)
            time.sleep(_POLL_S)
        return []

    def _a_rank(self, fault: Fault) -> tuple[int, psutil.Process] | None:
        with contextlib.suppress(MembershipStoreError, AssertionError):
            if ranks := sorted(self._nodes.processes_of_ranks().items()):
                return ranks[fault.victim % len(ranks)]
        return None

    def _kill_rank(self, fault: Fault, names: list[str]) -> str:
        found = self._a_rank(fault)
        if found is None:
            return "no rank is there"
        self.acted_s = time.time()
        with contextlib.suppress(psutil.NoSuchProcess):
            found[1].kill()
        return f"rank {found[0]}"

    def _kill_nodes(self, fault: Fault, names: list[str]) -> str:
        victims = self._safe_victims(fault, 2 if fault.kind == "kill node and another" else 1)
        self.acted_s = time.time()
        for name in victims:
            self._nodes.kill_node(name)
        return " ".join(victims) or "nobody can be spared"

    def _stop_rank(self, fault: Fault, names: list[str]) -> str:
        found = self._a_rank(fault)
        if found is None:
            return "no rank is there"
        with contextlib.suppress(psutil.NoSuchProcess):
            found[1].suspend()
            time.sleep(fault.seconds * (3 if fault.kind == "stop rank for long" else 1))
            found[1].resume()
        return f"rank {found[0]}"

    def _stop_node(self, fault: Fault, names: list[str]) -> str:
        alive = self.alive(names)
        if not alive:
            return "no node is there"
        victim = alive[fault.victim % len(alive)]
        try:
            self._nodes.freeze_node(victim)
        except psutil.NoSuchProcess:
            return f"{victim}, which had just ended"
        time.sleep(fault.seconds)
        self._nodes.thaw_node(victim)
        return victim

    def _cut_link(self, fault: Fault, names: list[str]) -> str:
        assert self._switch is not None, "drawn only with namespaces"
        victim = names[fault.victim % len(names)]
        self._switch.cut(self._hosts[victim])
        time.sleep(fault.seconds)
        self._switch.heal(self._hosts[victim])
        return victim

    def _notice(self, fault: Fault, names: list[str]) -> str:
        victims = self._safe_victims(fault, 1)
        for name in victims:
            self._nodes.signal_node(name, signal.SIGTERM)
        return " ".join(victims) or "nobody can be spared"

    def _leave(self, fault: Fault, names: list[str]) -> str:
        victims = self._safe_victims(fault, 1)
        for name in victims:
            with contextlib.suppress(MembershipStoreError):
                self._nodes.leave(name)
        return " ".join(victims) or "nobody can be spared"

    def _join(self, fault: Fault, names: list[str]) -> str:
        away = [name for name in names if name not in self.alive(names)]
        if not away:
            return "all nodes are there"
        victim = away[fault.victim % len(away)]
        self.start(victim)
        return victim

    def start(self, name: str) -> None:
        """Start a node, again if need be."""
        self._nodes.start_as(name, copies=self._folder / "memory" / name / "copies")

    def _restart_etcd(self, fault: Fault, names: list[str]) -> str:
        self._etcd.stop()
        if fault.kind == "etcd away":
            time.sleep(fault.seconds)
        self._etcd.start()
        return "etcd"

    def _flip_byte(self, fault: Fault, names: list[str]) -> str:
        """In a copy of a node, which a rank is then killed to have read."""
        alive = self.alive(names)
        draw = random.Random(fault.victim)
        files = sorted(
            path for name in alive for path in self._nodes.folder_of_copies(name).glob("epoch_*/slot_*/*.safetensors")
        )
        if not files:
            return "no copy is there"
        path = files[fault.victim * 7919 % len(files)]
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            at = draw.randrange(max(os.fstat(file.fileno()).st_size, 1))
            file.seek(at)
            old = file.read(1)
            if old:
                file.seek(at)
                file.write(bytes([old[0] ^ 1 << draw.randrange(8)]))
        return f"{path.relative_to(self._folder)}, then {self._kill_rank(fault, names)}"

    def _fill_memory(self, fault: Fault, names: list[str]) -> str:
        """While a rank is replaced the folder of copies of a node is full."""
        alive = self.alive(names)
        if not alive:
            return "no node is there"
        victim = alive[fault.victim % len(alive)]
        ballast = self._folder / "memory" / victim / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        done = self._kill_rank(fault, names)
        time.sleep(fault.seconds)
        ballast.unlink()
        return f"{victim}, and {done}"

    def _break_store(self, fault: Fault, names: list[str]) -> str:
        store, aside = self._folder / "store", self._folder / "store.aside"
        store.rename(aside)
        store.write_text("no folder")
        time.sleep(fault.seconds)
        store.unlink()
        aside.rename(store)
        return "its folder is none for a while"

    def _truncate_in_store(self, fault: Fault, names: list[str]) -> str:
        files = sorted((self._folder / "store").rglob("*.safetensors"))
        if not files:
            return "nothing is there"
        path = files[-1 - fault.victim % len(files)]
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, path.stat().st_size // 2)
        return str(path.relative_to(self._folder))
