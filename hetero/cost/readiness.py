"""When, within its backward, a stage has the gradients of a layer: it runs from the head to the embedding."""

from hetero.cost.latency import CostModel
from hetero.plan.ir import Stage


def share_of_backward(costs: CostModel, stage: Stage, position: float) -> float:
    """How much of the stage's backward is over when everything from ``position`` on has its gradients, 0 to 1.

    position: a layer, half a layer more for its MLP; -1 is the embedding, the number of layers the head.
    """
    whole = costs.of(stage).backward_s
    if whole == 0 or position < stage.start:
        return 1.0
    head_s = 0.0
    if stage.end == costs.model.num_layers:
        head_s = costs.layer(
            "head", device=stage.device, tp=stage.tp, micro_batch_size=stage.micro_batch_size
        ).backward_s
    layers_done = max(0.0, stage.end - position)
    return min(1.0, (head_s + (whole - head_s) * layers_done / stage.num_layers) / whole)
