"""Checks what a plan leaves to its hosts."""

from hetero.errors import PlanError
from hetero.plan.ir import Plan, Stage
from hetero.plan.offload import NOTHING_ON_HOST, block_positions
from hetero.spec.parameters import HALF
from hetero.text import in_halves


def check_offload(plan: Plan) -> None:
    """Positions lie inside of their stage, and what a stage leaves to its hosts can be done by them."""
    for r, s, stage in plan.stages():
        where, offload = f"replica {r} stage {s}", stage.offload
        _check_activations(where, stage, plan)
        _check_gradients(where, stage, plan)
        _check_weights(where, stage, plan)
        if offload.optimizer_from is None:
            for name, value in (("speculate", offload.speculate), ("overlap", offload.overlap)):
                if value != getattr(NOTHING_ON_HOST, name):
                    raise PlanError(
                        f"{where}: offload.{name} is {str(value).lower()}, but no optimizer is on the host; set "
                        f"optimizer_from or leave {name} out"
                    )
            continue
        if not plan.distributed_optimizer:
            raise PlanError(
                f"{where}: offload.optimizer_from is {in_halves(offload.optimizer_from)}, but the plan has no "
                "distributed_optimizer; set distributed_optimizer to true, or leave offload out"
            )
        _check_held(where, "optimizer_from", offload.optimizer_from, stage, plan)
    overlap = {stage.offload.overlap for _, _, stage in plan.stages() if stage.offload.updates}
    if len(overlap) > 1:
        raise PlanError("plan: offload.overlap is true for some stages and false for others; make them equal")
    for r, replica in enumerate(plan.replicas):
        for group in replica.device_groups:
            speculating = {replica.stages[s].offload.speculate for s in group if replica.stages[s].offload.updates}
            if len(speculating) > 1:
                raise PlanError(
                    f"replica {r}: stages {list(group)} are on the same ranks, and offload.speculate is true for some "
                    "of them only; make them equal"
                )


def _check_activations(where: str, stage: Stage, plan: Plan) -> None:
    until = stage.offload.activations_until
    if until is None:
        return
    if stage.wgrad_delay is not None:
        raise PlanError(
            f"{where}: offload.activations_until is {in_halves(until)}, and wgrad_delay is {stage.wgrad_delay}, beside "
            "which activations stay on the device: what a delayed W needs outlives its backward; leave one of them out"
        )
    blocks = block_positions(stage, num_layers=plan.model.num_layers)
    if until not in blocks:
        raise PlanError(
            f"{where}: offload.activations_until is {until:g}, but the stage has blocks at positions "
            f"{', '.join(map(in_halves, blocks))}; choose one of these, or leave it out"
        )


def _check_gradients(where: str, stage: Stage, plan: Plan) -> None:
    first = stage.offload.gradients_from
    if first is None:
        return
    _check_not_before(where, stage, "gradients_from", "optimizer_from", why="gradients add up where hosts update")
    if stage.wgrad_delay is not None:
        raise PlanError(
            f"{where}: offload.gradients_from is {in_halves(first)}, and wgrad_delay is {stage.wgrad_delay}, beside "
            "which gradients stay on the device: those of a microbatch come in two parts; leave one of them out"
        )
    _check_held(where, "gradients_from", first, stage, plan)


def _check_weights(where: str, stage: Stage, plan: Plan) -> None:
    first = stage.offload.weights_from
    if first is None:
        return
    why = "gradients on the host free twice the bytes of weights for half the copies"
    _check_not_before(where, stage, "weights_from", "gradients_from", why=why)
    _check_held(where, "weights_from", first, stage, plan)


def _check_not_before(where: str, stage: Stage, name: str, other: str, *, why: str) -> None:
    """Check that the position ``name`` of the stage's offload, which is there, is not before that of ``other``."""
    first, least = getattr(stage.offload, name), getattr(stage.offload, other)
    if least is None or first < least:
        raise PlanError(
            f"{where}: offload.{name} is {in_halves(first)}, and {other} is "
            f"{in_halves(least) if least is not None else 'missing'}: {why}; set {other} to {in_halves(first)} or "
            f"less, or raise {name}"
        )


def _check_held(where: str, key: str, position: float, stage: Stage, plan: Plan) -> None:
    first, last = _positions(stage, plan)
    held = position == first or (max(first, stage.start) <= position <= last and position % HALF == 0)
    if not held:
        raise PlanError(
            f"{where}: offload.{key} is {position:g}, but the stage holds positions {in_halves(first)} to "
            f"{in_halves(last)}, halves of layers among them; choose one of these, or leave it out"
        )


def _positions(stage: Stage, plan: Plan) -> tuple[float, float]:
    """The first and the last position at which the stage holds parameters."""
    is_last = stage.end == plan.model.num_layers
    return -1.0 if stage.start == 0 else stage.start, stage.end if is_last else stage.end - HALF
