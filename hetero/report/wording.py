"""Wording of plans that tables, figures and the page share."""

import dataclasses
from collections.abc import Sequence

from hetero.plan.ir import Plan, Replica, Stage
from hetero.text import in_halves, number_ranges

SORTS_SHOWN = 3
"""Sorts of replica that one line of text tells."""

DOMAINS_SHOWN = 6
"""Domains that one line of text tells."""


def alike(plan: Plan) -> list[list[int]]:
    """The replicas, those that differ in their ranks only together."""

    def sort_of(replica: Replica) -> object:
        stages = tuple(dataclasses.replace(stage, ranks=()) for stage in replica.stages)
        return replica.num_samples, replica.schedule, replica.device_groups, stages

    sorts: dict[object, list[int]] = {}
    for r, replica in enumerate(plan.replicas):
        sorts.setdefault(sort_of(replica), []).append(r)
    return list(sorts.values())


def shape_of(plan: Plan) -> str:
    """``4x (V100-16 tp2: 5 | A100-40: 14 | A100-40: 13)``: layers per stage of each sort of replica; ``5+4`` are two
    stages on the same devices.
    """
    sorts = []
    for members in alike(plan):
        replica = plan.replicas[members[0]]
        groups = [[replica.stages[s] for s in group] for group in replica.device_groups]
        stages = " | ".join(
            f"{held[0].device}{degrees(held[0]).replace(',', '').replace('tp ', 'tp').replace('dp ', 'dp')}: "
            f"{'+'.join(in_halves(stage.num_layers) for stage in held)}"
            for held in groups
        )
        sorts.append(f"{len(members)}x ({stages})")
    shown = sorts[:SORTS_SHOWN] + ([f"and {len(sorts) - SORTS_SHOWN} more sorts"] if len(sorts) > SORTS_SHOWN else [])
    return ", ".join(shown)


def title_of(plan: Plan) -> str:
    return (
        f"{plan.model.num_layers} layers, sequence {plan.seq_length}, global batch {plan.global_batch_size}, "
        f"{plan.precision}, {plan.world_size} ranks" + (", distributed optimizer" if plan.distributed_optimizer else "")
    )


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


def depth_of(stage: Stage) -> str:
    """Microbatches in flight, and as ``+2`` by how many the weights' gradients lag behind a split backward."""
    return str(stage.in_flight) + (f"+{stage.weight_lag}" if stage.weight_lag is not None else "")


def depth_title(plan: Plan) -> str:
    """What :func:`depth_of` says, for the head of a column."""
    splits = any(stage.weight_lag is not None for _, _, stage in plan.stages())
    return "in\nflight\n+ lag" if splits else "in\nflight"


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


def orders_of(plan: Plan) -> list[str]:
    """``replicas 0-3: stages 0 2 | 1 3 take turns`` and ``replica 4: gpipe``, of all that is not plain 1F1B."""
    told: dict[str, list[int]] = {}
    for r, replica in enumerate(plan.replicas):
        said = [replica.schedule] if replica.schedule != "1f1b" else []
        if replica.is_interleaved:
            groups = " | ".join(" ".join(map(str, group)) for group in replica.device_groups)
            said.append(f"stages {groups} take turns")
        if said:
            told.setdefault(", ".join(said), []).append(r)
    return [f"replica{'s' if len(where) > 1 else ''} {number_ranges(where)}: {what}" for what, where in told.items()]


def recompute_of(stage: Stage) -> str:
    if stage.recompute_num_layers is None:
        return "-" if stage.recompute == "none" else stage.recompute
    return f"{stage.recompute} {stage.recompute_num_layers}/{len(stage.layer_numbers)}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {number_ranges(ranks)}"


def degrees(stage: Stage) -> str:
    """``, tp 2, dp 4``, as far as they are above 1."""
    return "".join(f", {name} {value}" for name, value in (("tp", stage.tp), ("dp", stage.dp)) if value > 1)
