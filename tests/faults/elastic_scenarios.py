"""What a seed of the campaign of real faults stands for: nodes, options, and a sequence of faults and their moments."""

import random
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "kill rank",
    "kill node",
    "kill node and another",
    "stop rank shortly",
    "stop rank for long",
    "stop node shortly",
    "stop node for long",
    "cut link shortly",
    "cut link for long",
    "notice",
    "leave",
    "join",
    "restart etcd",
    "etcd away",
    "flip byte",
    "full memory",
    "store fails",
    "store truncates",
    "etcd rewound",
    "writes refused",
    "full logs",
    "broken save",
]

_WEIGHTS: dict[FaultKind, int] = {
    "kill rank": 5,
    "kill node": 4,
    "kill node and another": 3,
    "stop rank shortly": 2,
    "stop rank for long": 1,
    "stop node shortly": 2,
    "stop node for long": 2,
    "cut link shortly": 2,
    "cut link for long": 2,
    "notice": 2,
    "leave": 2,
    "restart etcd": 2,
    "etcd away": 2,
    "flip byte": 3,
    "full memory": 1,
    "store fails": 2,
    "store truncates": 2,
    "etcd rewound": 2,
    "writes refused": 2,
    "full logs": 2,
}
"""How often each is drawn; a join follows where a node is away, and a broken save comes at the end."""

NEEDS_ROOT: dict[FaultKind, FaultKind] = {
    "cut link shortly": "stop node shortly",
    "cut link for long": "stop node for long",
    "full memory": "kill rank",
    "full logs": "kill rank",
}
"""What needs namespaces or mounts, and what is done instead where nobody may make them."""

NEEDS_STORE: frozenset[FaultKind] = frozenset({"store fails", "store truncates"})

TAKES_A_NODE: frozenset[FaultKind] = frozenset({"kill node", "kill node and another", "notice", "leave"})
"""After these it is away until a join."""

LOSES_COPIES: frozenset[FaultKind] = frozenset(
    {"kill node", "kill node and another", "stop node for long", "cut link for long"}
)
"""After a second one of these before a commit the last upload counts, and without one the run is over."""

Moment = Literal["step", "detected", "forked", "joined", "built", "restored", "stop_requested"]
"""``step``: once the run has gone on; the others: when a node next says so of what the fault before has caused."""

_RECOVERY: tuple[Moment, ...] = ("detected", "forked", "joined", "built", "restored")
_CHANGE: tuple[Moment, ...] = ("stop_requested", *_RECOVERY[1:])
_DURING: dict[FaultKind, tuple[Moment, ...]] = {
    "kill rank": _RECOVERY,
    "kill node": _RECOVERY,
    "kill node and another": _RECOVERY,
    "flip byte": _RECOVERY,
    "notice": _CHANGE,
    "leave": _CHANGE,
    "join": _CHANGE,
}
"""What follows a fault, by its kind, so that another may come right then."""

_SHARE_DURING = 0.4
_SHARE_BROKEN_SAVES = 0.5
"""Of runs, whose last fault comes while the last step is saved."""


@dataclass(frozen=True, slots=True)
class Fault:
    """victim: counts among the ranks or nodes that are there then. delay_s: after the moment."""

    kind: FaultKind
    moment: Moment
    victim: int
    delay_s: float
    seconds: float

    def __str__(self) -> str:
        when = f"{self.moment} + {self.delay_s * 1000:.0f} ms"
        return f"{self.kind} ({self.victim}) at {when}, {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Scenario:
    """types: node type by name. is_root: nodes are network namespaces, with small file systems for their copies."""

    seed: int
    types: dict[str, str]
    distributed_optimizer: bool
    store: bool
    is_root: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        options = "distributed optimizer, " * self.distributed_optimizer + "with" + "out" * (not self.store) + " store"
        return f"seed {self.seed}: {', '.join(self.types.values())}; {options}; {len(self.faults)} faults"


def scenario(seed: int, *, num_faults: int, is_root: bool = True, nodes: tuple[int, int] = (2, 4)) -> Scenario:
    """The scenario of a seed; the same everywhere, but for what needs root."""
    draw = random.Random(seed)
    types = {name: draw.choices(["box", "twin"], [4, 1])[0] for name in "abcd"[: draw.randint(*nodes)]}
    while list(types.values()).count("twin") > 1:
        types[next(name for name, each in types.items() if each == "twin")] = "box"
    distributed_optimizer, store = draw.random() < 0.5, draw.random() < 0.5
    faults: list[Fault] = []
    num_away, lost_copies = 0, False
    while len(faults) < num_faults:
        is_last = len(faults) == num_faults - 1
        moment: Moment = "step"
        if faults and faults[-1].moment == "step" and draw.random() < _SHARE_DURING:
            moment = draw.choice(_DURING.get(faults[-1].kind, ("step",)))
        kind = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if num_away and draw.random() < 0.5:
            kind = "join"
        if is_last and draw.random() < _SHARE_BROKEN_SAVES:
            kind, moment = "broken save", "step"
        takes = 2 if kind == "kill node and another" else int(kind in TAKES_A_NODE)
        fault = Fault(
            kind=kind if is_root else NEEDS_ROOT.get(kind, kind),
            moment=moment,
            victim=draw.randrange(8),
            delay_s=draw.random() * 0.15,
            seconds=_seconds(kind, draw.random()),
        )
        too_few = len(types) - num_away - takes < (1 if takes else 0)
        is_second_loss = kind in LOSES_COPIES and moment != "step" and lost_copies and not store
        is_double_loss = kind == "kill node and another" and not store
        if too_few or (kind in NEEDS_STORE and not store) or ((is_second_loss or is_double_loss) and not is_last):
            continue
        num_away += takes - (kind == "join")
        lost_copies = kind in LOSES_COPIES
        faults.append(fault)
    return Scenario(seed, types, distributed_optimizer, store, is_root, tuple(faults))


def _seconds(kind: FaultKind, chance: float) -> float:
    """How long what is not for good lasts; the lease is of three seconds."""
    if kind.endswith("for long"):
        return 4.0 + 2.0 * chance
    return 0.2 + 1.0 * chance if kind.endswith("shortly") else 0.5 + 3.0 * chance
