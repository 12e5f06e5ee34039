"""Words for plans that tables, figures and the page share: what a stage holds, how a replica is scheduled."""

from collections.abc import Callable, Iterable, Sequence

from hetero.cost.prediction_range import StepRange
from hetero.launch.hosts import nodes_in_words
from hetero.plan.communicators import PlanCommunicators, max_communicators
from hetero.plan.ir import Plan, Stage
from hetero.schedule.orders import BY_DEPTHS
from hetero.text import in_halves, number_ranges, numbered

SORTS_SHOWN = 3
"""Sorts of replica that one line of text tells."""

DOMAINS_SHOWN = 6
"""Domains that one line of text tells."""


def shape_of(plan: Plan) -> str:
    """``4x (V100-16 tp2: 5 | A100-40: 7 + 6)``: layers per stage of each sort of replica; stages that the same devices
    hold in turns are added up."""
    sorts = []
    for members in plan.alike():
        replica = plan.replicas[members[0]]
        groups = [[replica.stages[s] for s in group] for group in replica.device_groups]
        devices = " | ".join(
            f"{device_of(stages[0])}{degrees(stages[0]).replace(',', '').replace('tp ', 'tp').replace('dp ', 'dp')}: "
            f"{' + '.join(in_halves(stage.num_layers) for stage in stages)}"
            for stages in groups
        )
        sorts.append(f"{len(members)}x ({devices})")
    shown = sorts[:SORTS_SHOWN] + ([f"and {len(sorts) - SORTS_SHOWN} more sorts"] if len(sorts) > SORTS_SHOWN else [])
    return ", ".join(shown)


def orders_of(plan: Plan) -> str:
    """``replicas 0-3: stages 0,2 | 1,3 in turns``, and the schedule where it is not 1F1B; empty if there is nothing of
    the kind."""
    said = []
    for members in plan.alike():
        replica = plan.replicas[members[0]]
        parts = [replica.schedule] if replica.schedule != BY_DEPTHS else []
        if replica.is_interleaved:
            parts.append(f"stages {' | '.join(map(number_ranges, replica.device_groups))} in turns")
        if parts:
            said.append(f"{numbered('replica', members)}: {', '.join(parts)}")
    return "; ".join(
        said[:SORTS_SHOWN] + ([f"and {len(said) - SORTS_SHOWN} more sorts"] if len(said) > SORTS_SHOWN else [])
    )


def offload_of(plan: Plan) -> str:
    """``replicas 0-3: stage 1 from layer 6, previewed``: of which stages hosts update what; empty if of none."""
    return _of_stages(
        plan,
        lambda stage: (
            f"{_from(stage.offload.optimizer_from, plan)}"
            f"{', previewed' if stage.offload.speculate else ''}"
            f"{'' if stage.offload.overlap else ', before the next forward'}"
            if stage.offload.optimizer_from is not None
            else ""
        ),
    )


def gradients_on_hosts(plan: Plan) -> str:
    """``replicas 0-3: stage 1 from layer 8``: of which stages gradients add up on hosts; empty if of none."""
    return _of_stages(plan, lambda stage: _from(stage.offload.gradients_from, plan))


def weights_on_hosts(plan: Plan) -> str:
    """``replicas 0-3: stage 1 from layer 8``: of which stages weights live on hosts; empty if of none."""
    return _of_stages(plan, lambda stage: _from(stage.offload.weights_from, plan))


def activations_on_hosts(plan: Plan) -> str:
    """``replicas 0-3: stage 0 through layer 6``: of which stages hosts hold which activations; empty if of none."""
    return _of_stages(
        plan,
        lambda stage: (
            f"through {_position_in_words(stage.offload.activations_until, plan)}"
            if stage.offload.activations_until is not None
            else ""
        ),
    )


def _of_stages(plan: Plan, said_of: Callable[[Stage], str]) -> str:
    """What there is to say of each stage, replicas that are alike together."""
    said = []
    for members in plan.alike():
        parts = [
            f"stage {s} {text}" for s, stage in enumerate(plan.replicas[members[0]].stages) if (text := said_of(stage))
        ]
        if parts:
            said.append(f"{numbered('replica', members)}: {'; '.join(parts)}")
    return " | ".join(
        said[:SORTS_SHOWN] + ([f"and {len(said) - SORTS_SHOWN} more sorts"] if len(said) > SORTS_SHOWN else [])
    )


def _from(position: float | None, plan: Plan) -> str:
    return "" if position is None else f"from {_position_in_words(position, plan)}"


def _position_in_words(position: float, plan: Plan) -> str:
    if position < 0:
        return "the embedding"
    if position == plan.model.num_layers:
        return "the head"
    return f"the MLP of layer {int(position)}" if position % 1 else f"layer {int(position)}"


def in_turns(texts: Iterable[str]) -> str:
    """What there is to say of the stages of one device: once if that is the same of all."""
    return " | ".join(dict.fromkeys(texts))


def title_of(plan: Plan) -> str:
    """``24 layers, sequence 2048, global batch 64, bf16, 8 ranks``."""
    return (
        f"{plan.model.num_layers} layers, sequence {plan.seq_length}, global batch {plan.global_batch_size}, "
        f"{plan.precision}, {plan.world_size} ranks" + (", distributed optimizer" if plan.distributed_optimizer else "")
    )


def caption_of(plan: Plan) -> str:
    """Idle ranks, gradient sums, orders and what is left to hosts, a line each, as far as there is something to say."""
    lines = [f"idle ranks: {number_ranges(plan.idle_ranks) or 'none'}"]
    for what, said in (
        ("gradient sums", gradient_sync_of(plan)),
        ("order", orders_of(plan)),
        ("updated on hosts", offload_of(plan)),
        ("gradients on hosts", gradients_on_hosts(plan)),
        ("weights on hosts", weights_on_hosts(plan)),
        ("activations on hosts", activations_on_hosts(plan)),
    ):
        lines += [f"{what}: {said}"] if said else []
    return "\n".join(lines)


def communicators_in_words(plan: Plan) -> str:
    """``2 on ranks 0-3, 5 on ranks 4-7 (at most 28)``: how many communicators of two or more ranks each rank is in."""
    counts = PlanCommunicators(plan).counts()
    ranks_with: dict[int, list[int]] = {}
    for rank in sorted(plan.ranks()):
        ranks_with.setdefault(counts[rank], []).append(rank)
    said = (f"{count} on {ranks_in_words(ranks)}" for count, ranks in sorted(ranks_with.items()))
    return f"{', '.join(said)} (at most {max_communicators(plan)})"


def layers_of(stage: Stage) -> str:
    """``3 mlp + 4-5 + 6 attn``: the MLP of layer 3, layers 4 to 5, and the attention of layer 6."""
    whole = number_ranges(range(stage.first_layer + stage.starts_with_mlp, stage.end_layer))
    parts = [
        f"{stage.first_layer} mlp" if stage.starts_with_mlp else "",
        whole,
        f"{stage.end_layer} attn" if stage.ends_with_attention else "",
    ]
    return " + ".join(part for part in parts if part)


def held_by(plan: Plan, stage: Stage) -> str:
    """The layers, and the embedding and the head with the stages that hold them."""
    parts = ["emb"] if stage.start == 0 else []
    parts.append(layers_of(stage))
    if stage.end == plan.model.num_layers:
        parts.append("head")
    return " + ".join(parts)


def device_of(stage: Stage) -> str:
    """``H100``, or ``H100 fp8`` where the stage computes in it."""
    return stage.device + (" fp8" if stage.fp8 else "")


def depth_of(stage: Stage) -> str:
    """Microbatches in flight, and as ``+2`` by how many the weights' gradients lag behind a split backward."""
    return str(stage.in_flight) + (f"+{stage.wgrad_delay}" if stage.wgrad_delay is not None else "")


def depth_title(plan: Plan) -> str:
    """What :func:`depth_of` says, for the head of a column."""
    splits = any(stage.wgrad_delay is not None for _, _, stage in plan.stages())
    return "in\nflight\n+delay" if splits else "in\nflight"


def gradient_sync_of(plan: Plan) -> str:
    """``inside 0-3 | 4-7 first, then between them; buckets of 5 M``; empty if the plan says nothing of the kind."""
    sync = plan.gradient_sync
    said = []
    if sync.domains:
        shown = [number_ranges(sorted(ranks)) for ranks in sync.domains[:DOMAINS_SHOWN]]
        more = len(sync.domains) - len(shown)
        said.append(f"inside {' | '.join([*shown, *([f'{more} more'] if more else [])])} first, then between them")
    if sync.bucket_numel is not None:
        said.append(f"buckets of {sync.bucket_numel / 1e6:.4g} M")
    return "; ".join(said)


def recompute_of(stage: Stage) -> str:
    """``selective``, or ``full 2/4`` where two of four layers are recomputed; ``-`` for none."""
    if stage.recompute_num_layers is None:
        return "-" if stage.recompute == "none" else stage.recompute
    return f"{stage.recompute} {stage.recompute_num_layers}/{len(stage.layer_numbers)}"


def provenance_lines(plan: Plan) -> list[str]:
    """What made the plan, for which cluster, and what was predicted; nothing if the plan does not say."""
    if (origin := plan.provenance) is None:
        return []
    predicted = origin.prediction
    seconds = f"{_rounded(predicted.step_low_s)} to {_rounded(predicted.step_high_s)}"
    return [
        f"made for: {nodes_in_words(origin.cluster)}",
        f"predicted: {predicted.step_s:.4g} s per step ({seconds}), bubble {predicted.bubble_share:z.1%}",
        f"made by: {origin.shown_command}",
    ]


def range_of(step: StepRange) -> str:
    """``1.10 to 1.38``: the seconds between which nine of ten such steps were measured."""
    return f"{_rounded(step.low_s)} to {_rounded(step.high_s)}"


def _rounded(seconds: float) -> str:
    return f"{seconds:#.3g}".removesuffix(".")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-3``."""
    return numbered("rank", ranks)


def degrees(stage: Stage) -> str:
    """``, tp 2, dp 4``, as far as they are above 1."""
    return "".join(f", {name} {value}" for name, value in (("tp", stage.tp), ("dp", stage.dp)) if value > 1)
