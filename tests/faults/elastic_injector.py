"""Does to an elastic job on this machine what a :class:`~tests.faults.elastic_scenarios.Fault` says, and undoes it."""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
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
from tests.helpers.small_file_system import fill, free

COPIES_MIB = 32
"""Room that a node has for copies where full memory is injected; they take less than half of it."""

_POLL_S = 0.02
_ALL_STEPS = 1_000_000
_READ_WITHIN_S = 3.0
_OTHER_WRITES = 30
"""Of others than the job, which agents have read after :data:`_READ_WITHIN_S`, so that the revisions of an etcd that
went back are not reached again at once."""
_MEMBERS_WITHIN_S = 40.0
_NOTICED_WITHIN_S = 60.0
"""For agents to end after etcd has gone back, and for ranks to come to the last save."""


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
        self._logs = folder / "logs"
        self._kept = folder / "kept"
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
            "etcd rewound": self._rewind_etcd,
            "writes refused": self._refuse_writes,
            "full logs": self._fill_logs,
            "broken save": self._break_save,
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

    def last_step(self) -> int:
        """The newest that a rank has printed, or reported where logs cannot be written."""
        steps = [last_step(self._logs)]
        with contextlib.suppress(MembershipStoreError):
            steps += [rank.step for report in self._nodes.state().reports.values() for rank in report.ranks]
        return max(steps)

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
                self._nodes.allow(self.last_step() + 1)
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
        if fault.kind == "etcd away":
            self._etcd.stop()
            time.sleep(fault.seconds)
            self._etcd.start()
        else:
            self._etcd.keep_data(self._kept)
        return "etcd"

    def _rewind_etcd(self, fault: Fault, names: list[str]) -> str:
        """Bring etcd back with older data: those of its last restart, or of some steps ago.

        Its agents have to end with exit code 2 and their copies kept; they are started again.
        """
        if not self._kept.exists():
            self._etcd.keep_data(self._kept)
            step = self.last_step()
            self._nodes.allow(step + 2)
            self._wait(lambda: self.last_step() > step, "the next step")
        self.look()
        if self.outcome is not None:
            return "the job is over"
        for number in range(_OTHER_WRITES):
            self._etcd.put(f"/other/{number}", b"")
        time.sleep(_READ_WITHIN_S)
        self._etcd.stop()
        self._etcd.put_back(self._kept)
        alive = self.alive(names)
        self._etcd.start()
        self._wait(lambda: not self.alive(alive), "the end of all agents")
        codes = {name: self._nodes.exit_code(name) for name in alive}
        # One may just have left.
        assert set(codes.values()) <= {0, 2}, f"etcd went back, and agents ended with {codes}\n{self._nodes.told()}"
        lost = [name for name, code in codes.items() if code and not self._nodes.folder_of_copies(name).exists()]
        assert not lost, f"etcd went back, and the copies of {lost} were deleted\n{self._nodes.told()}"
        for name in alive:
            self.start(name)
        return f"{', '.join(alive)} ended, and are started again"

    def _refuse_writes(self, fault: Fault, names: list[str]) -> str:
        """While a rank is replaced etcd has no room."""
        self._etcd.fill()
        done = self._kill_rank(fault, names)
        time.sleep(fault.seconds)
        self._etcd.free()
        return f"etcd, and {done}"

    def _fill_logs(self, fault: Fault, names: list[str]) -> str:
        """While a rank is replaced no log can be written."""
        fill(self._logs)
        done = self._kill_rank(fault, names)
        time.sleep(fault.seconds)
        free(self._logs)
        return f"all logs, and {done}"

    def _break_save(self, fault: Fault, names: list[str]) -> str:
        """Kill a rank, or a node that can be spared, while ranks save the last step."""
        self._nodes.hold("save")
        self._nodes.allow(_ALL_STEPS)
        if not self._wait(self._nodes.is_held, "the last save"):
            return "the job is over"
        members = self.members()
        if fault.victim % 2 and len(members) > 1:
            self.acted_s = time.time()
            done = members[fault.victim % len(members)]
            self._nodes.kill_node(done)
        else:
            done = self._kill_rank(fault, names)
        since_s = self.acted_s
        self._wait(lambda: any(e.kind == "detected" and e.time_s > since_s for e in self._tail.update()), "its end")
        self._nodes.hold("")
        return f"{done}, in the last save"

    def _wait(self, condition: Callable[[], bool], what: str) -> bool:
        """Wait until it is so, or the job is over; whether it is so."""
        deadline = time.monotonic() + _NOTICED_WITHIN_S
        while not condition():
            self.look()
            if self.outcome is not None:
                return False
            assert time.monotonic() < deadline, f"{what} never came\n{self._nodes.told()}"
            time.sleep(_POLL_S)
        return True

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
        memory = self._folder / "memory" / victim
        fill(memory)
        done = self._kill_rank(fault, names)
        time.sleep(fault.seconds)
        free(memory)
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
