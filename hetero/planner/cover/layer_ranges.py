"""Prices the gradient sums of ranges of layers that no cut divides: who holds a range, its bytes, the steps from tier
to tier.

The formula of a cover (:mod:`hetero.planner.cover.cover`) and the constraints of the master problem
(:mod:`hetero.planner.cover.constraints`) both go by these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.problem import Problem
from hetero.planner.replica.templates import NodeLayers, Template


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Positions ``[first, end)`` of the model between two neighbouring cuts of any template, all with the same holders;
    -1 is the embedding, and as many as there are layers the head."""

    first: int
    end: int


def layer_ranges(templates: Sequence[Template], problem: Problem) -> tuple[LayerRange, ...]:
    """Divide the model's positions where any template has a cut between nodes, and at embedding and head."""
    num_layers = problem.model.num_layers
    cuts = {-1, 0, num_layers, num_layers + 1}
    for template in templates:
        for node_layers in template.node_layers:
            cuts |= {position for run in node_layers.runs for position in run}
    return tuple(LayerRange(first, end) for first, end in pairwise(sorted(cuts)))


def nodes_holding(template: Template, layers: LayerRange, node_type: int, problem: Problem) -> int:
    """Count the nodes of ``node_type`` on which a copy of ``template`` holds ``layers``; of tied embeddings, either end
    counts."""
    if not template.devices[node_type]:
        return 0
    return len(
        {
            node_layers.node
            for node_layers in template.node_layers
            if node_layers.node_type == node_type and _holds(node_layers, layers, problem)
        }
    )


def _holds(node_layers: NodeLayers, layers: LayerRange, problem: Problem) -> bool:
    if _is_tied_end(layers, problem):
        return node_layers.holds(-1) or node_layers.holds(problem.model.num_layers)
    return node_layers.holds(layers.first)


def _is_tied_end(layers: LayerRange, problem: Problem) -> bool:
    """Whether the range is the embedding or a head that shares the embedding's weights."""
    return problem.model.tied_embeddings and layers.first in (-1, problem.model.num_layers)


def gradient_bytes(layers: LayerRange, node_layers: NodeLayers, problem: Problem, sync_tiers: SyncTiers) -> int:
    """Gradient bytes of ``layers`` on a node that holds them; a tied head beside its embedding has none of its own but
    the final norm's."""
    num_bytes = sync_tiers.bytes_of(layers.first, layers.end)
    is_head = layers.first == problem.model.num_layers
    if is_head and node_layers.holds(-1) and _is_tied_end(layers, problem):
        num_bytes -= sync_tiers.word_embedding_bytes
    return num_bytes


def tier_steps(node_layers: NodeLayers, sync_tiers: SyncTiers) -> tuple[float, ...]:
    """Seconds per byte that each tier costs beyond the one before, the first beyond the ring inside the node."""
    inside = sync_tiers.inside_s_per_byte[node_layers.node_type] * node_layers.inside
    s_per_byte = [max(inside, tier) for tier in sync_tiers.tiers]
    return tuple(here - before for before, here in pairwise([inside, *s_per_byte]))


def unlike(node_layers: Sequence[NodeLayers]) -> Iterator[NodeLayers]:
    """One of each set of nodes that hold the same."""
    seen = set()
    for each in node_layers:
        key = replace(each, node=0)
        if key not in seen:
            seen.add(key)
            yield each
