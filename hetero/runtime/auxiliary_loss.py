"""Says how experts' auxiliary loss depends on a plan: ``aux_loss`` on its microbatches, ``seq_aux_loss`` not at all."""

from hetero.plan.ir import Plan
from hetero.runtime.options import StageOptions


def microbatch_note(options: StageOptions, plan: Plan) -> str | None:
    """Return a line for the start of a run whose auxiliary loss depends on the plan; ``None`` for all others."""
    if not options.aux_loss_is_per_microbatch:
        return None
    unlike = ", so that not all layers and samples have the same one" if len(plan.micro_batch_sizes) > 1 else ""
    return (
        f"auxiliary loss: aux_loss is a mean over each microbatch and depends on the plan, here {_sizes(plan)}{unlike};"
        " --moe-router-load-balancing-type seq_aux_loss depends on no plan"
    )


def changed_microbatch_note(options: StageOptions, before: Plan | None, now: Plan) -> str | None:
    """Return a line for a run that goes on with another auxiliary loss than it had; ``None`` if it keeps its loss.

    Args:
        before: the plan that the run had, ``None`` if it is not known.
    """
    if before is None or not options.aux_loss_is_per_microbatch:
        return None
    if before == now or len({*before.micro_batch_sizes, *now.micro_batch_sizes}) == 1:
        return None
    return (
        f"auxiliary loss: aux_loss is a mean over each microbatch; the run had {_sizes(before)} and goes on with "
        f"{_sizes(now)}, so with another loss"
    )


def _sizes(plan: Plan) -> str:
    """``microbatches of 1 and 2 samples``."""
    *first, last = map(str, plan.micro_batch_sizes)
    sizes = f"{', '.join(first)} and {last}" if first else last
    return f"microbatches of {sizes} sample{'' if sizes == '1' else 's'}"
