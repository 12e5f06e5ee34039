"""Says when, within a backward, a layer's gradients are ready, and when, within a forward, its weights are needed.

A backward runs from the head to the embedding, a forward the other way round.
"""

from hetero.cost.cost_model import CostModel
from hetero.cost.layers.layer_times import LayerCost
from hetero.plan.ir import Stage
from hetero.schedule.actions import ActionKind
from hetero.spec.profile import LayerKind


def share_of_backward(costs: CostModel, stage: Stage, position: float, kind: ActionKind) -> float:
    """The share of the stage's last backward or W after which all gradients from ``position`` on are ready, 0 to 1.

    Where a stage has W, the gradients of its blocks come from there, in the same order. Blocks are taken to be equally
    long.

    position: a layer, half a layer more for its MLP; -1 is the embedding, the number of layers the head.
    """
    layers_done = max(0.0, stage.end - max(position, stage.start))
    if kind == ActionKind.W:
        return layers_done / stage.num_layers
    whole = costs.of(stage).undelayed_backward_s
    if whole == 0 or position < stage.start:
        return 1.0
    head_s = _layer(costs, stage, "head").backward_s if stage.end == costs.model.num_layers else 0.0
    return min(1.0, (head_s + (whole - head_s) * layers_done / stage.num_layers) / whole)


def share_of_forward(costs: CostModel, stage: Stage, position: float) -> float:
    """The share of a forward of the stage before it comes to ``position``, 0 to 1; positions as above."""
    whole = costs.of(stage).forward_s
    if whole == 0 or position < stage.start:
        return 0.0
    head_s = _layer(costs, stage, "head").forward_s if stage.end == costs.model.num_layers else 0.0
    embedding_s = _layer(costs, stage, "embedding").forward_s if stage.start == 0 else 0.0
    layers_done = min(stage.end, position) - stage.start
    return min(1.0, (embedding_s + (whole - head_s - embedding_s) * layers_done / stage.num_layers) / whole)


def _layer(costs: CostModel, stage: Stage, kind: LayerKind) -> LayerCost:
    return costs.layer(
        kind,
        device=stage.device,
        tp=stage.tp,
        micro_batch_size=stage.micro_batch_size,
        sequence_parallel=stage.splits_sequence,
        fp8=stage.fp8,
    )
