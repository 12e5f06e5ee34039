"""The rules of a cover of the cluster by templates, one per function, each with its formula.

t          a column: a template
x[t]       copies of it;  u[t] whether there is one;  y[t] microbatches of all copies
b[t]       samples per microbatch;  m[t] microbatches that a copy finishes in time
d[t, k]    devices of kind k that a copy takes
g          a segment: positions of the model that no cut divides
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from ortools.sat.python import cp_model

from hetero.planner.problem import Problem
from hetero.planner.rings import Rings
from hetero.planner.templates import Held, Template
from hetero.planner.variables import ColumnVars, Master, RingVars, Segment
from hetero.units import US_PER_S

NEVER_US = 10**10
"""Stands for a ring over a link that does not exist."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a cover must keep to.

    sync_s: seconds that the sums of gradients on any node may take beyond what is hidden; ``None`` for no limit.
    """

    problem: Problem
    rings: Rings
    sync_s: float | None


Microseconds = cp_model.LinearExpr | int

Constraint = Callable[[cp_model.CpModel, Master, Limits], None]


def devices_are_there(model: cp_model.CpModel, master: Master, limits: Limits) -> None:
    """sum_t d[t, k] x[t] <= devices of kind k. Devices without a replica idle."""
    for kind in limits.problem.kinds:
        taken = [(c.template.devices[kind.index], c.replicas) for c in master.columns]
        model.add(sum(devices * replicas for devices, replicas in taken if devices) <= kind.num_devices)


def used_means_at_least_one(model: cp_model.CpModel, master: Master, limits: Limits) -> None:
    """u[t] <=> x[t] >= 1."""
    for column in master.columns:
        model.add(column.replicas >= 1).only_enforce_if(column.used)
        model.add(column.replicas == 0).only_enforce_if(column.used.negated())


def replicas_finish_in_time(model: cp_model.CpModel, master: Master, limits: Limits) -> None:
    """x[t] <= y[t] <= m[t] x[t]: every copy has a microbatch, none more than it finishes in time."""
    for column in master.columns:
        model.add(column.microbatches >= column.replicas)
        model.add(column.microbatches <= column.column.most_microbatches * column.replicas)


def samples_add_up(model: cp_model.CpModel, master: Master, limits: Limits) -> None:
    """sum_t b[t] y[t] = global batch."""
    samples = [column.template.samples * column.microbatches for column in master.columns]
    model.add(sum(samples) == limits.problem.global_batch_size)


def budget_is_kept(model: cp_model.CpModel, master: Master, limits: Limits) -> None:
    """sum_t price[t] x[t] <= budget per hour, in thousandths, rounded against the plan."""
    budget = limits.problem.budget_per_hour
    if budget is not None:
        prices = [milli_price(column.template, limits.problem) * column.replicas for column in master.columns]
        model.add(sum(prices) <= int(budget * 1000))


def holders_are_present(model: cp_model.CpModel, master: Master, limits: Limits) -> None:
    """u[t] => present[g, k], if a copy of t holds g on kind k.

    sum_t nodes[t, g, k] x[t] <= 1, unless several[g, k]: two nodes of one kind that hold g.
    """
    for ring in master.rings:
        for k, present in ring.present.items():
            counts = [(nodes_holding(c.template, ring.segment, k, limits.problem), c) for c in master.columns]
            for count, column in counts:
                if count:
                    model.add_implication(column.used, present)
            if k in ring.several:
                nodes = sum(count * column.replicas for count, column in counts if count)
                model.add(nodes <= 1).only_enforce_if(ring.several[k].negated())


def rings_are_as_slow_as_their_slowest_link(model: cp_model.CpModel, master: Master, limits: Limits) -> None:
    """present[g, k] and present[g, k'] => slower[g, level(k, k')];  several[g, k] => slower[g, level(k, k)];
    slower[g, j] => slower[g, j - 1]."""
    for ring in master.rings:
        for a, b in combinations(ring.present, 2):
            level = limits.rings.level_between(a, b)
            assert level is not None, "different kinds have a level"
            model.add_bool_or(ring.present[a].negated(), ring.present[b].negated(), ring.slower[level])
        for k, several in ring.several.items():
            level = limits.rings.level_between(k, k)
            assert level is not None, "a kind with several nodes has a level"
            model.add_implication(several, ring.slower[level])
        for faster, slower in zip(ring.slower, ring.slower[1:], strict=False):
            model.add_implication(slower, faster)


def sync_stays_within_its_limit(model: cp_model.CpModel, master: Master, limits: Limits) -> None:
    """u[t] => sum_{g on a node} bytes[g] x (inside[k] + sum_j step[k, j] slower[g, j]) <= limit + hidden, each node.

    step[k, j] is what level j costs beyond level j - 1, on a node whose inside costs inside[k]. Nodes with the same
    layers share one constraint, and all nodes of a kind one running sum over the segments.
    """
    if limits.sync_s is None or not master.rings:
        return
    limit_us = int(limits.sync_s * US_PER_S)
    users: dict[Held, list[ColumnVars]] = {}
    for column in master.columns:
        for held in unlike(column.template.held):
            users.setdefault(replace(held, node=0), []).append(column)
    sums: dict[tuple[int, bool], dict[int, Microseconds]] = {}
    for number, (held, columns) in enumerate(users.items()):
        key = held.kind, held.inside
        if key not in sums:
            sums[key] = _running_sums(model, master, held, limits)
        seconds = sum(sums[key][end] - sums[key][first] for first, end in held.runs)
        seconds -= _counted_twice(master, held, limits)
        anyone = model.new_bool_var(f"held_{number}")
        for column in columns:
            model.add_implication(column.used, anyone)
        model.add(seconds <= limit_us + int(held.hidden_s * US_PER_S)).only_enforce_if(anyone)


def _running_sums(model: cp_model.CpModel, master: Master, held: Held, limits: Limits) -> dict[int, Microseconds]:
    """Microseconds of all segments before a position, on a node of ``held``'s kind, by position."""
    steps = level_steps(held, limits.rings)
    inside = limits.rings.inside_s_per_byte[held.kind] * held.inside
    sums: dict[int, Microseconds] = {-1: 0}
    most = 0
    for ring in master.rings:
        num_bytes = limits.rings.bytes_of(ring.segment.first, ring.segment.end)
        costs = [_us(num_bytes, step) for step in steps]
        most += _us(num_bytes, inside) + sum(costs)
        total = model.new_int_var(0, most, f"sum_{held.kind}_{held.inside}_{ring.segment.end}")
        terms = sum(cost * slower for cost, slower in zip(costs, ring.slower, strict=True))
        model.add(total == sums[ring.segment.first] + _us(num_bytes, inside) + terms)
        sums[ring.segment.end] = total
    return sums


def _counted_twice(master: Master, held: Held, limits: Limits) -> Microseconds:
    """Microseconds of a tied head beside its embedding, which have one gradient together."""
    model = limits.problem.model
    if not (model.tied_embeddings and held.holds(-1) and held.holds(model.num_layers)):
        return 0
    head = next(ring for ring in master.rings if ring.segment.first == model.num_layers)
    num_bytes = limits.rings.word_embedding_bytes
    inside_us = _us(num_bytes, limits.rings.inside_s_per_byte[held.kind] * held.inside)
    steps = level_steps(held, limits.rings)
    return inside_us + sum(_us(num_bytes, step) * slower for step, slower in zip(steps, head.slower, strict=True))


CONSTRAINTS: tuple[Constraint, ...] = (
    devices_are_there,
    used_means_at_least_one,
    replicas_finish_in_time,
    samples_add_up,
    budget_is_kept,
    holders_are_present,
    rings_are_as_slow_as_their_slowest_link,
    sync_stays_within_its_limit,
)


def milli_price(template: Template, problem: Problem) -> int:
    """Thousandths of the currency per hour of the nodes, or parts of nodes, that a copy takes; rounded up."""
    price = sum(
        devices / kind.gpus_per_node * (kind.price_per_hour or 0.0)
        for devices, kind in zip(template.devices, problem.kinds, strict=True)
    )
    return int(-(-price * 1000 // 1))


def segments(templates: Sequence[Template], problem: Problem) -> tuple[Segment, ...]:
    """The model's positions, divided where any template has a cut between nodes, and at embedding and head."""
    num_layers = problem.model.num_layers
    cuts = {-1, 0, num_layers, num_layers + 1}
    for template in templates:
        for held in template.held:
            cuts |= {position for run in held.runs for position in run}
    ordered = sorted(cuts)
    return tuple(Segment(first, end) for first, end in pairwise(ordered))


def nodes_holding(template: Template, segment: Segment, kind: int, problem: Problem) -> int:
    """Nodes of ``kind`` on which a copy of ``template`` holds ``segment``; of tied embeddings, either end counts."""
    return len({held.node for held in template.held if held.kind == kind and _holds(held, segment, problem)})


def _holds(held: Held, segment: Segment, problem: Problem) -> bool:
    if is_tied_end(segment, problem):
        return held.holds(-1) or held.holds(problem.model.num_layers)
    return held.holds(segment.first)


def is_tied_end(segment: Segment, problem: Problem) -> bool:
    """Whether the segment is the embedding or a head that shares the embedding's weights."""
    return problem.model.tied_embeddings and segment.first in (-1, problem.model.num_layers)


def segment_bytes(segment: Segment, held: Held, limits: Limits) -> int:
    """Gradient bytes of ``segment``; a tied head beside its embedding has none of its own but the final norm's."""
    num_bytes = limits.rings.bytes_of(segment.first, segment.end)
    is_head = segment.first == limits.problem.model.num_layers
    if is_head and held.holds(-1) and is_tied_end(segment, limits.problem):
        num_bytes -= limits.rings.word_embedding_bytes
    return num_bytes


def level_steps(held: Held, rings: Rings) -> tuple[float, ...]:
    """Seconds per byte that each level costs beyond the one before, the first beyond the ring inside the node."""
    inside = rings.inside_s_per_byte[held.kind] * held.inside
    paces = [max(inside, level) for level in rings.levels]
    return tuple(pace - before for before, pace in zip([inside, *paces], paces, strict=False))


def unlike(held: Sequence[Held]) -> Iterator[Held]:
    """One of those that differ in their number only."""
    seen = set()
    for each in held:
        key = replace(each, node=0)
        if key not in seen:
            seen.add(key)
            yield each


def _us(num_bytes: int, s_per_byte: float) -> int:
    seconds = num_bytes * s_per_byte
    return NEVER_US if seconds == float("inf") else min(NEVER_US, round(seconds * US_PER_S))


def ring_vars(
    model: cp_model.CpModel, templates: Sequence[Template], problem: Problem, rings: Rings
) -> tuple[RingVars, ...]:
    """Ring variables of every segment, for the kinds that any template uses; none if no gradient leaves a node."""
    if not rings.levels:
        return ()
    used = [kind for kind in problem.kinds if any(t.devices[kind.index] for t in templates)]
    several = [kind.index for kind in used if kind.count > 1]
    return tuple(
        RingVars(model, segment, [kind.index for kind in used], several, len(rings.levels))
        for segment in segments(templates, problem)
    )
