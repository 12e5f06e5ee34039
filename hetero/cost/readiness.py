"""When, within its backward, a stage has the gradients of a layer: it runs from the head to the embedding."""

from hetero.cost.latency import CostModel
from hetero.plan.ir import Stage
from hetero.schedule.actions import Kind


def share_of_backward(costs: CostModel, stage: Stage, position: float, kind: Kind) -> float:
    """How much of the stage's last B or W is over when everything from ``position`` on has its gradients, 0 to 1.

    Where a stage has W, its blocks have theirs from there, in the same order.

    position: a layer, half a layer more for its MLP; -1 is the embedding, the number of layers the head.
    """
    layers_done = max(0.0, stage.end - max(position, stage.start))
    if kind == Kind.W:
        return layers_done / stage.num_layers
    whole = costs.of(stage).at_once_s
    if whole == 0 or position < stage.start:
        return 1.0
    head_s = 0.0
    if stage.end == costs.model.num_layers:
        head_s = costs.layer(
            "head", device=stage.device, tp=stage.tp, micro_batch_size=stage.micro_batch_size
        ).backward_s
    return min(1.0, (head_s + (whole - head_s) * layers_done / stage.num_layers) / whole)
