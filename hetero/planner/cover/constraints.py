"""The constraints of the master problem, one per function, each with its formula.

t          a column: a template
x[t]       copies of it;  u[t] whether there is one;  y[t] microbatches of all copies
b[t]       samples per microbatch;  m[t] microbatches that a copy finishes in time
d[t, k]    devices of node type k that a copy takes
g          a range of layers: positions of the model that no cut divides
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ortools.sat.python import cp_model

from hetero.planner.cover.layer_ranges import gradient_bytes, layer_ranges, nodes_holding, tier_steps, unlike
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.cover.variables import ColumnVars, LayerRangeVars, MasterVars
from hetero.planner.problem import Problem
from hetero.planner.replica.templates import NodeLayers, Template, milli_price
from hetero.units import US_PER_S

NEVER_US = 10**10
"""Stands for a sum of gradients over a link that does not exist."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the constraints of one question have in common.

    sync_s: seconds that the sums of gradients on any node may take beyond what is hidden; ``None`` for no limit.
    """

    problem: Problem
    sync_tiers: SyncTiers
    sync_s: float | None


Microseconds = cp_model.LinearExpr | int

Constraint = Callable[[cp_model.CpModel, MasterVars, Limits], None]


def devices_are_there(model: cp_model.CpModel, master: MasterVars, limits: Limits) -> None:
    """No more devices are taken than there are: sum_t d[t, k] x[t] <= devices of node type k. Devices without a replica
    idle."""
    for node_type in limits.problem.node_types:
        taken = [(c.template.devices[node_type.index], c.replicas) for c in master.columns]
        model.add(sum(devices * replicas for devices, replicas in taken if devices) <= node_type.num_devices)


def used_means_at_least_one(model: cp_model.CpModel, master: MasterVars, limits: Limits) -> None:
    """A template is used if it has a copy: u[t] <=> x[t] >= 1."""
    for column in master.columns:
        model.add(column.replicas >= 1).only_enforce_if(column.used)
        model.add(column.replicas == 0).only_enforce_if(column.used.negated())


def replicas_finish_in_time(model: cp_model.CpModel, master: MasterVars, limits: Limits) -> None:
    """Every copy has a microbatch, and none more than it finishes in time: x[t] <= y[t] <= m[t] x[t]."""
    for column in master.columns:
        model.add(column.microbatches >= column.replicas)
        model.add(column.microbatches <= column.column.most_microbatches * column.replicas)


def samples_add_up(model: cp_model.CpModel, master: MasterVars, limits: Limits) -> None:
    """All microbatches together are the global batch: sum_t b[t] y[t] = global batch."""
    samples = [column.template.samples * column.microbatches for column in master.columns]
    model.add(sum(samples) == limits.problem.global_batch_size)


def budget_is_kept(model: cp_model.CpModel, master: MasterVars, limits: Limits) -> None:
    """The nodes in use cost no more than the budget: sum_t price[t] x[t] <= budget per hour, in thousandths, rounded
    against the plan."""
    budget = limits.problem.milli_budget
    if budget < math.inf:
        prices = [milli_price(column.template, limits.problem) * column.replicas for column in master.columns]
        model.add(sum(prices) <= int(budget))


def holders_are_present(model: cp_model.CpModel, master: MasterVars, limits: Limits) -> None:
    """Which node types hold a range of layers follows from the templates in use: u[t] => present[g, k], if a copy of t
    holds g on node type k.

    sum_t nodes[t, g, k] x[t] <= 1, unless several[g, k]: two nodes of one node type that hold g.
    """
    for range_vars in master.layer_ranges:
        for k, present in range_vars.present.items():
            counts = [(nodes_holding(c.template, range_vars.layer_range, k, limits.problem), c) for c in master.columns]
            for count, column in counts:
                if count:
                    model.add_implication(column.used, present)
            if k in range_vars.several:
                nodes = sum(count * column.replicas for count, column in counts if count)
                model.add(nodes <= 1).only_enforce_if(range_vars.several[k].negated())


def layers_sync_at_their_slowest_link(model: cp_model.CpModel, master: MasterVars, limits: Limits) -> None:
    """The gradients of a range of layers are summed at the speed of the slowest link between its holders: present[g, k]
    and present[g, k'] => slower[g, tier(k, k')]; several[g, k] => slower[g, tier(k, k)]; slower[g, j] => slower[g,
    j - 1]."""
    for range_vars in master.layer_ranges:
        for a, b in combinations(range_vars.present, 2):
            tier = limits.sync_tiers.tier_between(a, b)
            assert tier is not None, "different node types have a tier"
            model.add_bool_or(range_vars.present[a].negated(), range_vars.present[b].negated(), range_vars.slower[tier])
        for k, several in range_vars.several.items():
            tier = limits.sync_tiers.tier_between(k, k)
            assert tier is not None, "a node type with several nodes has a tier"
            model.add_implication(several, range_vars.slower[tier])
        for faster, slower in zip(range_vars.slower, range_vars.slower[1:], strict=False):
            model.add_implication(slower, faster)


def sync_stays_within_its_limit(model: cp_model.CpModel, master: MasterVars, limits: Limits) -> None:
    """Gradient sums end in time on each node that a template in use has: u[t] => sum_{g on a node} bytes[g] x
    (inside[k] + sum_j step[k, j] slower[g, j]) <= limit + hidden.

    step[k, j] is what tier j costs beyond tier j - 1, on a node whose inside costs inside[k]. Nodes with the same
    layers share one constraint, and all nodes of a node type one running sum over the ranges.
    """
    if limits.sync_s is None or not master.layer_ranges:
        return
    limit_us = int(limits.sync_s * US_PER_S)
    users: dict[NodeLayers, list[ColumnVars]] = {}
    for column in master.columns:
        for node_layers in unlike(column.template.node_layers):
            users.setdefault(replace(node_layers, node=0), []).append(column)
    sums: dict[tuple[int, bool], dict[int, Microseconds]] = {}
    for number, (node_layers, columns) in enumerate(users.items()):
        key = node_layers.node_type, node_layers.inside
        if key not in sums:
            sums[key] = _running_sums(model, master, node_layers, limits)
        seconds = sum(sums[key][end] - sums[key][first] for first, end in node_layers.runs)
        seconds -= _counted_twice(master, node_layers, limits)
        anyone = model.new_bool_var(f"held_{number}")
        for column in columns:
            model.add_implication(column.used, anyone)
        model.add(seconds <= limit_us + int(node_layers.hidden_s * US_PER_S)).only_enforce_if(anyone)


def _running_sums(
    model: cp_model.CpModel, master: MasterVars, node_layers: NodeLayers, limits: Limits
) -> dict[int, Microseconds]:
    """Variables for the microseconds of all layers before a position, by position, on nodes like that of
    ``node_layers``."""
    steps = tier_steps(node_layers, limits.sync_tiers)
    inside = limits.sync_tiers.inside_s_per_byte[node_layers.node_type] * node_layers.inside
    sums: dict[int, Microseconds] = {-1: 0}
    most = 0
    for range_vars in master.layer_ranges:
        num_bytes = limits.sync_tiers.bytes_of(range_vars.layer_range.first, range_vars.layer_range.end)
        costs = [_us(num_bytes, step) for step in steps]
        most += _us(num_bytes, inside) + sum(costs)
        total = model.new_int_var(
            0, most, f"sum_{node_layers.node_type}_{node_layers.inside}_{range_vars.layer_range.end}"
        )
        terms = sum(cost * slower for cost, slower in zip(costs, range_vars.slower, strict=True))
        model.add(total == sums[range_vars.layer_range.first] + _us(num_bytes, inside) + terms)
        sums[range_vars.layer_range.end] = total
    return sums


def _counted_twice(master: MasterVars, node_layers: NodeLayers, limits: Limits) -> Microseconds:
    """Microseconds that a tied head beside its embedding does not take: the two have one gradient."""
    head = master.layer_ranges[-1]
    first, end = head.layer_range.first, head.layer_range.end
    num_bytes = limits.sync_tiers.bytes_of(first, end)
    num_bytes -= gradient_bytes(head.layer_range, node_layers, limits.problem, limits.sync_tiers)
    if not num_bytes or not node_layers.holds(first):
        return 0
    inside_us = _us(num_bytes, limits.sync_tiers.inside_s_per_byte[node_layers.node_type] * node_layers.inside)
    steps = tier_steps(node_layers, limits.sync_tiers)
    return inside_us + sum(_us(num_bytes, step) * slower for step, slower in zip(steps, head.slower, strict=True))


CONSTRAINTS: tuple[Constraint, ...] = (
    devices_are_there,
    used_means_at_least_one,
    replicas_finish_in_time,
    samples_add_up,
    budget_is_kept,
    holders_are_present,
    layers_sync_at_their_slowest_link,
    sync_stays_within_its_limit,
)


def _us(num_bytes: int, s_per_byte: float) -> int:
    """Whole microseconds for so many bytes."""
    seconds = num_bytes * s_per_byte
    return NEVER_US if seconds == math.inf else min(NEVER_US, round(seconds * US_PER_S))


def layer_range_variables(
    model: cp_model.CpModel, templates: Sequence[Template], problem: Problem, sync_tiers: SyncTiers
) -> tuple[LayerRangeVars, ...]:
    """Make the variables of every range of layers, for the node types that any template uses; none if no gradient
    leaves a node."""
    if not sync_tiers.tiers:
        return ()
    used = [node_type for node_type in problem.node_types if any(t.devices[node_type.index] for t in templates)]
    several = [node_type.index for node_type in used if node_type.count > 1]
    return tuple(
        LayerRangeVars(model, each, [node_type.index for node_type in used], several, len(sync_tiers.tiers))
        for each in layer_ranges(templates, problem)
    )
