"""Peak bytes of a device, part by part.

Activations of one microbatch are what its layers save between forward and backward; a stage holds up to ``in_flight``
microbatches of them (arXiv 2205.05198, section 4, counts the same tensors). With b samples of s tokens, e bytes per
element, hidden size h, q and kv channels, ffn size f with g projections up, heads a and tensor parallelism t, a block
of megatron-core saves

    e b s (4 h / t' + (2 q + 2 kv + (g + 1) f) / t + a s / t)        t' = t with sequence parallelism, else 1

of which its attention has e b s (2 h / t' + (2 q + 2 kv) / t + a s / t) and its MLP e b s (2 h / t' + (g + 1) f / t).
The term with a, the attention scores, is absent with flash attention and with selective recomputation; full
recomputation keeps the input, e b s h / t', alone, of each half where a stage has only one of them. A published profile
has what its own layers saved; halves are by the formula in any case.

A stage that splits its backward (arXiv 2401.10241) holds, between a microbatch's B and its W, the inputs of its linear
layers and the gradients of their outputs. In a block those are, for the projections of attention and the MLP's,

    inputs     e b s ((h / t' + q / t) + (h / t' + f / t))
    gradients  e b s (((q + 2 kv) / t + h) + (g f / t + h))

where a gradient of width h is whole on every rank, since it is gathered before the product. Experts hold k copies of a
token instead, k (h + f / t) and k (g f / t + h). With lag k, that many microbatches wait, and one more from the end of
its B to its W.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetero.cost.gradients import communicators, cut_parameters, owned_parameters
from hetero.cost.latency import CostModel
from hetero.cost.parts import Part, modules_of
from hetero.cost.traits import RuntimeTraits
from hetero.plan.ir import Plan, Recompute, Stage
from hetero.spec.profile import ProfileStore
from hetero.units import GIB

LOSS_BYTES = 4
"""The loss is computed in fp32 whatever the logits are."""

BUFFERS_PER_NEIGHBOUR = 2
"""One slice on its way in, one on its way out, per direction that has data in flight at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """Bytes of one device of a stage at its peak, by what they are for.

    activations: of all microbatches in flight, the head's logits not counted.
    logits: saved logits and softmax of the microbatches in flight.
    deferred: of all microbatches whose weights' gradients are still to be computed.
    working: what the most demanding layer needs beside them while it computes.
    boundary_buffers: slices on their way to and from neighbours.
    sync_buffers: what the reduction of gradients needs beside the gradients.
    slack: reserved by the allocator and not used.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    deferred: int
    working: int
    boundary_buffers: int
    sync_buffers: int
    context: int
    communicators: int
    slack: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    def named(self) -> Mapping[str, int]:
        """Every part by its name, in the order of the fields."""
        return MappingProxyType({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The peak as a function of the depth: activations, logits, deferred parts and slack change, the rest does not."""

    fixed: MemoryParts
    activations_per_microbatch: int
    logits_per_microbatch: int
    deferred_per_microbatch: int
    allocator_slack: float

    def at(self, in_flight: int, *, deferred: int = 0) -> MemoryParts:
        """The parts with ``in_flight`` microbatches between F and B, and ``deferred`` between B and W."""
        activations = in_flight * self.activations_per_microbatch
        logits = in_flight * self.logits_per_microbatch
        waiting = deferred * self.deferred_per_microbatch
        moving = activations + logits + waiting + self.fixed.working
        return dataclasses.replace(
            self.fixed,
            activations=activations,
            logits=logits,
            deferred=waiting,
            slack=int(self.allocator_slack * moving),
        )

    def peak(self, *, in_flight: int, weight_lag: int | None, num_microbatches: int) -> MemoryParts:
        """The parts when a stage holds most: before a B, or after it and before the W that follows."""
        depth = min(in_flight, num_microbatches)
        if weight_lag is None:
            return self.at(depth)
        before = self.at(depth, deferred=min(weight_lag, num_microbatches - depth))
        deferred = min(weight_lag + 1, num_microbatches)
        after = self.at(min(depth - 1, num_microbatches - deferred), deferred=deferred)
        return max(before, after, key=lambda parts: parts.total)


def stage_memory(
    costs: CostModel,
    *,
    device: str,
    first_layer: float,
    end_layer: float,
    tp: int,
    micro_batch_size: int,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    num_neighbours: int = 2,
    shares_gradients: bool = True,
    num_communicators: int = 8,
    optimizer_ways: float = 1.0,
) -> StageMemory:
    """Memory of one device of a stage.

    Args:
        optimizer_ways: the device has this part of the optimizer state of its weights, one in so many.
        num_neighbours: stages before and after it in its replica.
        shares_gradients: another rank holds some of the same parameters.
        num_communicators: that the device takes part in.
    """
    traits, model = costs.traits, costs.model
    parameters = costs.held_parameters(device=device, first_layer=first_layer, end_layer=end_layer, tp=tp)
    has_head = end_layer == model.num_layers
    modules = modules_of(first_layer, end_layer)
    sequence_ways = tp if sequence_parallel else 1
    boundary = costs.element_bytes * micro_batch_size * costs.seq_length * model.hidden_size // sequence_ways

    def saved(kind: Part, how: Recompute) -> int:
        return saved_bytes(
            costs,
            kind,
            device=device,
            tp=tp,
            micro_batch_size=micro_batch_size,
            sequence_ways=sequence_ways,
            recompute=how,
        )

    num_recomputed = (recompute_num_layers or len(modules)) if recompute != "none" else 0
    recomputed, kept = Counter(modules[:num_recomputed]), Counter(modules[num_recomputed:])
    activations = sum(count * saved(kind, recompute) for kind, count in recomputed.items())
    activations += sum(count * saved(kind, "none") for kind, count in kept.items())
    activations += saved("embedding", "none") if first_layer == 0 else 0
    working = _working_bytes(costs, modules, tp=tp, micro_batch_size=micro_batch_size, has_head=has_head)
    if recompute == "full":
        # The layer under recomputation has all of its activations once more.
        working += max(saved(kind, "none") for kind in recomputed)
    gradients = costs.gradient_bytes * parameters
    return StageMemory(
        fixed=MemoryParts(
            weights=costs.element_bytes * parameters,
            gradients=gradients,
            optimizer=int(optimizer_bytes_per_parameter(costs) * parameters / optimizer_ways),
            activations=0,
            logits=0,
            deferred=0,
            working=working,
            boundary_buffers=num_neighbours * BUFFERS_PER_NEIGHBOUR * boundary,
            sync_buffers=_sync_buffer_bytes(traits, gradients, costs.gradient_bytes) if shares_gradients else 0,
            context=context_bytes(traits, device),
            communicators=num_communicators * traits.communicator_bytes,
            slack=0,
        ),
        activations_per_microbatch=activations,
        logits_per_microbatch=saved("head", "none") if has_head else 0,
        deferred_per_microbatch=sum(
            count * deferred_bytes(costs, kind, tp=tp, micro_batch_size=micro_batch_size, sequence_ways=sequence_ways)
            for kind, count in Counter(modules).items()
        ),
        allocator_slack=traits.allocator_slack,
    )


def memory_costs(plan: Plan) -> CostModel:
    """Enough to price the memory of ``plan``: what our own runtime holds needs no profile."""
    return CostModel(model=plan.model, seq_length=plan.seq_length, precision=plan.precision, profiles=ProfileStore([]))


def plan_memory(plan: Plan, costs: CostModel) -> dict[tuple[int, int], MemoryParts]:
    """Peak parts of every stage of ``plan``, by replica and stage; all its devices are alike."""
    gradient_groups = Counter(rank for ranks in communicators(plan) for rank in ranks)
    owned = owned_parameters(plan) if plan.distributed_optimizer else {}
    cut = {} if costs.traits.runs_profiled_layers else cut_parameters(plan)
    parts = {}
    for r, s, stage in plan.stages():
        num_neighbours = (s > 0) + (s + 1 < len(plan.replicas[r].stages))
        shared = max(gradient_groups[rank] for rank in stage.ranks)
        memory = memory_of_stage(
            stage, costs, num_neighbours=num_neighbours, shares_gradients=shared > 0, num_gradient_groups=shared
        )
        parts[r, s] = memory.peak(
            in_flight=stage.in_flight,
            weight_lag=stage.weight_lag,
            num_microbatches=plan.replicas[r].num_microbatches(s),
        )
        if cut.get((r, s)):
            parts[r, s] = dataclasses.replace(
                parts[r, s],
                weights=parts[r, s].weights + costs.element_bytes * cut[r, s],
                gradients=parts[r, s].gradients + costs.gradient_bytes * cut[r, s],
            )
        if owned:
            optimizer = optimizer_bytes_per_parameter(costs) * max(owned[rank] for rank in stage.ranks)
            parts[r, s] = dataclasses.replace(parts[r, s], optimizer=int(optimizer))
    return parts


def memory_of_stage(
    stage: Stage,
    costs: CostModel,
    *,
    num_neighbours: int = 2,
    shares_gradients: bool = True,
    num_gradient_groups: int = 2,
) -> StageMemory:
    """:func:`stage_memory` of a plan's stage.

    Its communicators are the world, tensor parallelism, the losses, two per neighbour, and one per set of ranks that
    sum gradients.
    """
    return stage_memory(
        costs,
        device=stage.device,
        first_layer=stage.start,
        end_layer=stage.end,
        tp=stage.tp,
        micro_batch_size=stage.micro_batch_size,
        sequence_parallel=stage.splits_sequence,
        recompute=stage.recompute,
        recompute_num_layers=stage.recompute_num_layers,
        num_neighbours=num_neighbours,
        shares_gradients=shares_gradients,
        num_communicators=2 + (stage.tp > 1) + 2 * num_neighbours + num_gradient_groups,
    )


def saved_bytes(
    costs: CostModel,
    kind: Part,
    *,
    device: str,
    tp: int,
    micro_batch_size: int,
    sequence_ways: int,
    recompute: Recompute,
) -> int:
    """Bytes that one layer, or half of one, saves of one microbatch from forward to backward on one device."""
    profile = costs.profile_of(device) if costs.traits.runs_profiled_layers else None
    if profile is not None and kind != "attention" and kind != "mlp" and recompute == "none" and sequence_ways == 1:
        measured = profile.memory_of(kind, tp=tp)
        if measured is not None:
            return measured.saved_bytes * micro_batch_size
    return _saved_by_megatron_core(costs, kind, tp, micro_batch_size, sequence_ways, recompute)


def _saved_by_megatron_core(
    costs: CostModel, kind: Part, tp: int, micro_batch_size: int, sequence_ways: int, recompute: Recompute
) -> int:
    shape, tokens, element = costs.shape, micro_batch_size * costs.seq_length, costs.element_bytes
    rows = shape.hidden // sequence_ways
    if kind == "embedding":
        return element * tokens * rows
    if kind == "head":
        return element * tokens * 2 * rows + (element + LOSS_BYTES) * tokens * shape.vocabulary // tp
    if recompute == "full":
        return element * tokens * rows
    q, kv = shape.heads * shape.kv_channels, shape.query_groups * shape.kv_channels
    experts = shape.experts_per_token or 1
    mlp = experts * ((2 if shape.gated else 1) + 1) * shape.ffn
    # Experts work on copies of the tokens that were sent to them.
    dispatched = 2 * experts * rows if shape.num_experts else 0
    scores = 0 if costs.traits.flash_attention or recompute == "selective" else shape.heads * costs.seq_length
    attention = 2 * q + 2 * kv + scores
    if kind == "attention":
        return element * tokens * (2 * rows + attention // tp)
    if kind == "mlp":
        return element * tokens * (2 * rows + dispatched + mlp // tp)
    return element * tokens * (4 * rows + dispatched + (attention + mlp) // tp)


def deferred_bytes(costs: CostModel, kind: Part, *, tp: int, micro_batch_size: int, sequence_ways: int) -> int:
    """Bytes that a block, or half of one, holds of one microbatch between B and W on one device: the sums at the head
    of this file."""
    shape = costs.shape
    rows, whole = shape.hidden // sequence_ways, shape.hidden
    q, kv = shape.heads * shape.kv_channels, shape.query_groups * shape.kv_channels
    copies = shape.experts_per_token or 1
    mlp = whole + (whole if shape.num_experts else rows) + ((2 if shape.gated else 1) + 1) * shape.ffn // tp
    widths = {"attention": rows + whole + (2 * q + 2 * kv) // tp, "mlp": copies * mlp}
    width = widths[kind] if kind in widths else sum(widths.values())
    return costs.element_bytes * micro_batch_size * costs.seq_length * width


def _working_bytes(costs: CostModel, modules: Sequence[Part], *, tp: int, micro_batch_size: int, has_head: bool) -> int:
    """The largest of the layers' temporaries: a block's backward has the gradients of its scores before and after the
    softmax, a head's those of its logits and their softmax."""
    works = [costs.work(kind, tp=tp, micro_batch_size=micro_batch_size) for kind in set(modules)]
    score_copies = 0 if costs.traits.flash_attention else 2
    layers = max(score_copies * work.score_bytes + work.row_bytes for work in works)
    head = costs.work("head", tp=tp, micro_batch_size=micro_batch_size)
    logits = 2 * head.score_bytes * LOSS_BYTES / costs.element_bytes if has_head else 0.0
    return int(max(layers, logits))


def _sync_buffer_bytes(traits: RuntimeTraits, gradients: int, element_bytes: int) -> int:
    return min(gradients, traits.bucket_numel * element_bytes) if traits.copies_gradients_to_sync else 0


def optimizer_bytes_per_parameter(costs: CostModel) -> int:
    """Adam's two moments, and beside half-precision weights their master copy, all as wide as a gradient."""
    return (2 + (costs.element_bytes < costs.gradient_bytes)) * costs.gradient_bytes


def context_bytes(traits: RuntimeTraits, device: str) -> int:
    """What a process occupies on ``device`` before it allocates a tensor."""
    return int(dict(traits.context_gib).get(device, traits.default_context_gib) * GIB)
