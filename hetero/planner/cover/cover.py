"""A cover, that is copies of templates which share the cluster and the batch, and its price by the planner's formula.

    step = max_t T_t(M_t) + max over nodes of ( sums of gradients - hidden ), at least 0

T_t(M) is the template's time for M microbatches, update included. Later stages sum their gradients while earlier ones
still compute; ``hidden`` is that time. What a replica hides that ends before the others is left to the simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.planner.cover.layer_ranges import (
    LayerRange,
    gradient_bytes,
    layer_ranges,
    nodes_holding,
    tier_steps,
    unlike,
)
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.problem import Goal, Problem
from hetero.planner.replica.templates import NodeLayers, Template, milli_price

SHARES_TOLERANCE = 1e-4
"""Relative: to so much of the last one's end a batch is divided. A heuristic."""


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
class CoverScore:
    """What a cover takes by the formula: seconds of a step, and the price per hour of what it uses in thousandths."""

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

    def goal_order(self, goal: Goal) -> tuple[float, float]:
        """Return what covers are sorted by: the goal, then the seconds, as many covers may cost nothing."""
        return (self.money if goal == "money" else self.step_s), self.step_s


Cover = tuple[Copies, ...]


def score_cover(cover: Sequence[Copies], problem: Problem, sync_tiers: SyncTiers) -> CoverScore:
    """Price ``cover`` by the formula at the head of this file."""
    return CoverScore(
        compute_s=max(copies.template.seconds(max(copies.shares)) for copies in cover),
        sync_s=sync_s(cover, problem, sync_tiers),
        milli_price=sum(copies.replicas * milli_price(copies.template, problem) for copies in cover),
    )


def sync_s(cover: Sequence[Copies], problem: Problem, sync_tiers: SyncTiers) -> float:
    """Seconds of the sums of gradients that are not hidden, on the node that has most of them."""
    templates = [copies.template for copies in cover]
    tiers = {
        layers: _slowest_tier(layers, cover, problem, sync_tiers)
        for layers in (layer_ranges(templates, problem) if sync_tiers.tiers else [])
    }

    def seconds(node_layers: NodeLayers) -> float:
        steps = tier_steps(node_layers, sync_tiers)
        inside = sync_tiers.inside_s_per_byte[node_layers.node_type] * node_layers.inside
        if not tiers:
            return sum(sync_tiers.bytes_of(*run) for run in node_layers.runs) * inside - node_layers.hidden_s
        return -node_layers.hidden_s + sum(
            gradient_bytes(layers, node_layers, problem, sync_tiers) * (inside + sum(steps[: tier + 1]))
            for layers, tier in tiers.items()
            if node_layers.holds(layers.first)
        )

    return max(0.0, *(seconds(node_layers) for template in templates for node_layers in unlike(template.node_layers)))


def _slowest_tier(layers: LayerRange, cover: Sequence[Copies], problem: Problem, sync_tiers: SyncTiers) -> int:
    """The tier of the slowest link over which the gradients of ``layers`` are summed, -1 if that stays on one node."""
    nodes = {
        node_type.index: sum(
            copies.replicas * nodes_holding(copies.template, layers, node_type.index, problem) for copies in cover
        )
        for node_type in problem.node_types
    }
    holding = [k for k, count in nodes.items() if count]
    found = [sync_tiers.tier_between(a, b) for i, a in enumerate(holding) for b in holding[i + 1 :]]
    found += [sync_tiers.tier_between(k, k) for k in holding if nodes[k] > 1]
    return max((tier for tier in found if tier is not None), default=-1)


def divide_batch(copies: Sequence[tuple[Template, int]], batch: int, within_s: float) -> Cover | None:
    """Divide ``batch`` samples among (template, copies) so that the last ends as early as a bisection finds.

    Returns:
        ``None`` if that is not before ``within_s``, or if whole microbatches cannot add up to the batch.
    """
    if within_s == float("inf") or sum(_samples(t, n, within_s) for t, n in copies) < batch:
        return None
    low_s, high_s = 0.0, within_s
    while high_s - low_s > SHARES_TOLERANCE * high_s:
        middle_s = (low_s + high_s) / 2
        if sum(_samples(t, n, middle_s) for t, n in copies) < batch:
            low_s = middle_s
        else:
            high_s = middle_s
    microbatches = [n * t.most_microbatches(high_s) for t, n in copies]
    if 0 in microbatches:
        return None
    surplus = sum(t.samples * m for (t, _), m in zip(copies, microbatches, strict=True)) - batch
    for i in sorted(range(len(copies)), key=lambda i: -copies[i][0].samples):
        template, number = copies[i]
        taken = min(surplus // template.samples, microbatches[i] - number)
        microbatches[i] -= taken
        surplus -= taken * template.samples
    if surplus:
        return None
    return tuple(Copies(t, n, m) for (t, n), m in zip(copies, microbatches, strict=True))


def _samples(template: Template, copies: int, seconds: float) -> int:
    """Samples that the copies finish within ``seconds``."""
    return copies * template.samples * template.most_microbatches(seconds)
