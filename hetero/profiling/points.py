"""Lists what a profiler measures of a model's layers, the most telling first."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hetero.plan.ir import Recompute
from hetero.spec.profile import ModuleKind, Profile

What = Literal["passes", "selective", "full", "split", "update"]
"""``passes``: forward and backward. ``selective``, ``full``: the same of a block that recomputes. ``split``: a block's
backward in two. ``update``: the optimizer's."""

NUM_ESSENTIAL = 2
"""Points that no plan can do without, the first of :func:`points`: seconds of a block, and of its update."""

RECOMPUTED: tuple[What, ...] = ("selective", "full")

_SERIES: tuple[tuple[What, ModuleKind, int, int], ...] = (
    ("passes", "block", 0, 1),
    ("update", "block", 0, 3),
    ("passes", "head", 0, 3),
    ("passes", "embedding", 0, 4),
    ("split", "block", 2, 3),
    ("full", "block", 2, 3),
    ("selective", "block", 2, 4),
    ("passes", "attention", 3, 4),
    ("passes", "mlp", 3, 4),
    ("update", "head", 4, 4),
    ("update", "embedding", 4, 4),
)
"""What is measured of which layer, in which round its middle is due, and how many rounds go by to its next point.

A heuristic: almost all of a step is blocks, and each size of theirs that is measured saves an estimate. The rest is
read as a proportion of a block, so that one point of it tells most of what it has to tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePoint:
    """Names one measurement of a layer. An update does not depend on the microbatch, whose size is 1 there."""

    what: What
    kind: ModuleKind
    tp: int
    micro_batch_size: int

    def __str__(self) -> str:
        size = "" if self.what == "update" else f", microbatch {self.micro_batch_size}"
        return f"{self.sort}, tp {self.tp}{size}"

    @property
    def sort(self) -> str:
        """What is measured of which layer, in words."""
        names = {
            "passes": self.kind,
            "selective": f"{self.kind}, selective recomputation",
            "full": f"{self.kind}, full recomputation",
            "split": f"{self.kind}, split backward",
            "update": f"update of {self.kind}",
        }
        return names[self.what]

    @property
    def part(self) -> "PartOfModel":
        """What has to be built for it; many points have one in common."""
        return PartOfModel(
            kind=self.kind,
            tp=self.tp,
            recompute=self.what if self.what in ("selective", "full") else "none",
            splits_backward=self.what == "split",
        )

    @property
    def relative_cost(self) -> float:
        """What it takes, beside others of the same layer and sort."""
        return self.micro_batch_size / self.tp

    def is_in(self, profile: Profile) -> bool:
        """Whether ``profile`` has it already."""
        size = self.micro_batch_size
        match self.what:
            case "passes":
                return any(each.micro_batch_size == size for each in profile.times_of(self.kind, tp=self.tp))
            case "split":
                return any(each.micro_batch_size == size for each in profile.split_backwards_of(tp=self.tp))
            case "update":
                return any((each.kind, each.tp) == (self.kind, self.tp) for each in profile.updates)
            case recompute:
                return any(each.micro_batch_size == size for each in profile.recomputed_of(recompute, tp=self.tp))


class PartOfModel(NamedTuple):
    """A module on one of ``tp`` ranks, in the way in which its passes run."""

    kind: ModuleKind
    tp: int
    recompute: Recompute
    splits_backward: bool


def points(tps: Sequence[int], micro_batch_sizes: Sequence[int], *, recomputes: Sequence[str]) -> list[ProfilePoint]:
    """All points, the most telling first: the middle of everything, then what is farthest from what was measured.

    Args:
        tps: tensor-parallel degrees, ascending.
        micro_batch_sizes: ascending.
        recomputes: of ``selective`` and ``full`` those that are wanted.
    """
    due: list[tuple[int, int, ProfilePoint]] = []
    for rank, (what, kind, first, stride) in enumerate(_SERIES):
        if what in RECOMPUTED and what not in recomputes:
            continue
        sizes = (1,) if what == "update" else micro_batch_sizes
        for number, (tp, size) in enumerate(farthest_first(tps, sizes)):
            due.append(
                (first + number * stride, rank, ProfilePoint(what=what, kind=kind, tp=tp, micro_batch_size=size))
            )
    return [point for _, _, point in sorted(due, key=lambda each: each[:2])]


def described(chosen: Iterable[ProfilePoint]) -> str:
    """Name points in one line: ``head (tp 1: microbatch 2, 4); update of head (tp 1, tp 2)``."""
    sorts: dict[str, dict[int, list[int]]] = {}
    for point in chosen:
        sizes = sorts.setdefault(point.sort, {}).setdefault(point.tp, [])
        sizes += [] if point.what == "update" else [point.micro_batch_size]
    return "; ".join(f"{sort} ({_tps_and_sizes(tps)})" for sort, tps in sorts.items())


def _tps_and_sizes(sizes_of: dict[int, list[int]]) -> str:
    if not any(sizes_of.values()):
        return ", ".join(f"tp {tp}" for tp in sorted(sizes_of))
    return "; ".join(
        f"tp {tp}: microbatch {', '.join(map(str, sorted(sizes)))}" for tp, sizes in sorted(sizes_of.items())
    )


def farthest_first(tps: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pairs of both in an order in which each lies farthest from those before it, beginning in the middle.

    Distances are those of logarithms, as times grow with the ratio of sizes. Of equally far ones the cheapest.
    """
    left = list(itertools.product(tps, sizes))
    chosen = [(tps[(len(tps) - 1) // 2], sizes[(len(sizes) - 1) // 2])]
    left.remove(chosen[0])
    yield chosen[0]
    while left:
        farthest = max(left, key=lambda pair: (min(_distance(pair, other) for other in chosen), -pair[1] / pair[0]))
        left.remove(farthest)
        chosen.append(farthest)
        yield farthest


def _distance(a: tuple[int, int], b: tuple[int, int]) -> float:
    # Rounded: equal distances are to be equal on every machine.
    return round(math.hypot(math.log2(a[0] / b[0]), math.log2(a[1] / b[1])), 6)
