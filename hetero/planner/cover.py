"""A cover of the cluster by copies of templates, and what it costs by the planner's own formula.

    step = max_t T_t(M_t) + max over nodes of ( sums of gradients - hidden ), at least 0

T_t(M) is the template's time for M microbatches, update included. Later stages sum their gradients while earlier ones
still compute; ``hidden`` is that time. What a replica hides that ends before the others is left to the simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.planner.constraints import (
    Limits,
    level_steps,
    milli_price,
    nodes_holding,
    segment_bytes,
    segments,
    unlike,
)
from hetero.planner.problem import Problem
from hetero.planner.rings import Rings
from hetero.planner.templates import Held, Template
from hetero.planner.variables import Segment


@dataclass(frozen=True, slots=True)
class Copies:
    """``replicas`` copies of a template and the microbatches of all of them together, shared evenly."""

    template: Template
    replicas: int
    microbatches: int

    @property
    def shares(self) -> tuple[int, ...]:
        """Microbatches of each copy: they differ by one at most."""
        each, more = divmod(self.microbatches, self.replicas)
        return (each + 1,) * more + (each,) * (self.replicas - more)


@dataclass(frozen=True, slots=True)
class Score:
    """Seconds of a step, and the price per hour of what it uses, in thousandths."""

    compute_s: float
    sync_s: float
    milli_price: int

    @property
    def step_s(self) -> float:
        return self.compute_s + self.sync_s

    @property
    def money(self) -> float:
        """Price of one step, in the cluster's currency."""
        return self.milli_price / 1000 * self.step_s / 3600


Cover = tuple[Copies, ...]


def score(cover: Sequence[Copies], problem: Problem, rings: Rings) -> Score:
    """The formula at the head of this file."""
    return Score(
        compute_s=max(copies.template.seconds(max(copies.shares)) for copies in cover),
        sync_s=sync_s(cover, problem, rings),
        milli_price=sum(copies.replicas * milli_price(copies.template, problem) for copies in cover),
    )


def sync_s(cover: Sequence[Copies], problem: Problem, rings: Rings) -> float:
    """Seconds of the sums of gradients that are not hidden, on the node that has most of them."""
    templates = [copies.template for copies in cover]
    limits = Limits(problem=problem, rings=rings, sync_s=None)
    levels = {
        segment: _slowest_level(segment, cover, problem, rings)
        for segment in (segments(templates, problem) if rings.levels else [])
    }

    def seconds(held: Held) -> float:
        steps = level_steps(held, rings)
        inside = rings.inside_s_per_byte[held.kind] * held.inside
        if not levels:
            return sum(rings.bytes_of(*run) for run in held.runs) * inside - held.hidden_s
        return -held.hidden_s + sum(
            segment_bytes(segment, held, limits) * (inside + sum(steps[: level + 1]))
            for segment, level in levels.items()
            if held.holds(segment.first)
        )

    return max(0.0, *(seconds(held) for template in templates for held in unlike(template.held)))


def _slowest_level(segment: Segment, cover: Sequence[Copies], problem: Problem, rings: Rings) -> int:
    """The level of the slowest link in the segment's ring, -1 if it stays on one node."""
    nodes = {
        kind.index: sum(
            copies.replicas * nodes_holding(copies.template, segment, kind.index, problem) for copies in cover
        )
        for kind in problem.kinds
    }
    holding = [k for k, count in nodes.items() if count]
    found = [rings.level_between(a, b) for i, a in enumerate(holding) for b in holding[i + 1 :]]
    found += [rings.level_between(k, k) for k in holding if nodes[k] > 1]
    return max((level for level in found if level is not None), default=-1)
