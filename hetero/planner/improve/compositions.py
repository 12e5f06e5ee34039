"""Draws compositions: what the replicas of a cluster are made of, before anything is said of their stages.

A **composition** says so many copies of a pipeline of so many nodes, halves or parts of nodes of each type, and what it
leaves of a node type in pipelines of that type alone, all in pieces as even as can be.
"""

import random
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from hetero.planner.problem import PlannerNodeType, Problem

MIXED_SHARE, ALL_TOGETHER_SHARE, IDLE_SHARE = 0.8, 0.4, 0.15
"""So often types are together in pipelines; so often all of them; and so often idles what is left of a type then.
Heuristics."""

KEPT_SHARE = 0.75
"""So often only node types are drawn from that a good plan keeps, if they are several. A heuristic: on a single type
covers of templates are good already, and what it leaves idle may be of use."""


class NodeParts(NamedTuple):
    """What a copy has of one node type.

    devices: in each of its ``parts`` of nodes.
    """

    node_type: int
    devices: int
    parts: int


class EqualPipelines(NamedTuple):
    """So many pipelines of these pieces."""

    number: int
    pieces: tuple[NodeParts, ...]


Composition = tuple[EqualPipelines, ...]


class RanksOfCopies(NamedTuple):
    """The copies of one pipeline of a composition, with the ranks that they have.

    number: of the copies.
    pieces: devices of a part of a node, by node type.
    firsts: of each copy that was asked for, by node type its first rank.
    others: of each replica of the composition's other pipelines the ranks of one part of a node.
    """

    number: int
    pieces: dict[int, int]
    firsts: tuple[dict[int, int], ...]
    others: tuple[int, ...]


def placed(composition: Composition, problem: Problem, *, most: int | None = None) -> list[RanksOfCopies]:
    """Hand out the ranks. Where a node has too few devices for another part, the rest of it idles.

    most: copies of each pipeline that get some; all by default.
    """
    free = {each.index: each.first_rank for each in problem.node_types}
    every = []
    for copies in composition:
        firsts = []
        for _ in range(copies.number if most is None else min(copies.number, most)):
            first = {}
            for piece in copies.pieces:
                node_type = problem.node_types[piece.node_type]
                used = (free[piece.node_type] - node_type.first_rank) % node_type.gpus_per_node
                if used + piece.devices > node_type.gpus_per_node:
                    free[piece.node_type] += node_type.gpus_per_node - used
                first[piece.node_type] = free[piece.node_type]
                free[piece.node_type] += piece.devices * piece.parts
            firsts.append(first)
        every.append(tuple(firsts))
    return [
        RanksOfCopies(
            copies.number,
            {piece.node_type: piece.devices for piece in copies.pieces},
            own,
            tuple(
                rank
                for other, firsts in zip(composition, every, strict=True)
                if firsts is not own
                for rank in _first_parts(other, firsts)
            ),
        )
        for copies, own in zip(composition, every, strict=True)
    ]


def _first_parts(copies: EqualPipelines, firsts: Sequence[dict[int, int]]) -> Iterator[int]:
    """Of each copy the ranks of its first part of a node."""
    node_type, devices, _ = copies.pieces[0]
    for first in firsts:
        yield from range(first[node_type], first[node_type] + devices)


def drawn_composition(problem: Problem, dice: random.Random, kept: AbstractSet[int] = frozenset()) -> Composition:
    """A composition: some types together in copies, what is left of each type alone or idle.

    kept: node types that a good plan does not leave idle; none if nothing is known of that.
    """
    node_types = problem.node_types
    left = {each.index: each.count for each in problem.usable_node_types}
    if len(kept) > 1 and left.keys() - kept and dice.random() < KEPT_SHARE:
        left = {t: nodes for t, nodes in left.items() if t in kept}
    made: list[EqualPipelines] = []
    if len(left) > 1 and dice.random() < MIXED_SHARE:
        number = len(left) if dice.random() < ALL_TOGETHER_SHARE else dice.randint(2, len(left))
        mixed = _mixed([node_types[t] for t in sorted(dice.sample(sorted(left), number))], left, dice)
        made += [mixed] if mixed is not None else []
        for t in left:
            if made and dice.random() < IDLE_SHARE:
                left[t] = 0
    for t, nodes in left.items():
        made += _alone(node_types[t], nodes, dice)
    return tuple(sorted(made))


def _mixed(types: Sequence[PlannerNodeType], left: dict[int, int], dice: random.Random) -> EqualPipelines | None:
    """Equal pipelines that have something of each of these types; what they take is no longer ``left``."""
    leader = dice.choice(types)
    number = _number(leader, left[leader.index], dice)
    pieces = []
    for each in types:
        nodes, per_node = left[each.index], 1
        devices, count = each.gpus_per_node, nodes // number
        if count == 0:
            per_node = -(-number // nodes)
            devices, count = each.gpus_per_node // per_node, 1
        elif count > 1 and dice.random() < 0.2:
            count = dice.randint(1, count - 1)
        if devices == 0:
            return None
        pieces.append(NodeParts(each.index, devices, count))
        left[each.index] -= -(-number // per_node) if per_node > 1 else number * count
    return EqualPipelines(number, tuple(pieces))


def _number(leader: PlannerNodeType, nodes: int, dice: random.Random) -> int:
    """Among how many pipelines nodes of one type are dealt: so many whole nodes each, or parts of them."""
    wholes = dict.fromkeys(nodes // each for each in range(1, nodes + 1))
    parts = dict.fromkeys(leader.gpus_per_node // each for each in range(1, leader.gpus_per_node))
    return dice.choice([*wholes, *(nodes * each for each in parts if each > 1)])


def _alone(node_type: PlannerNodeType, nodes: int, dice: random.Random) -> Iterator[EqualPipelines]:
    """Equal pipelines on nodes of one type; nodes that are left over make some of them longer, if they are few."""
    if not nodes:
        return
    number = _number(node_type, nodes, dice)
    if number > nodes:
        yield EqualPipelines(number, (NodeParts(node_type.index, node_type.gpus_per_node * nodes // number, 1),))
        return
    count, longer = divmod(nodes, number)
    if longer:
        yield EqualPipelines(longer, (NodeParts(node_type.index, node_type.gpus_per_node, count + 1),))
    yield EqualPipelines(number - longer, (NodeParts(node_type.index, node_type.gpus_per_node, count),))
