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

A stage that splits its backward (arXiv 2401.10241) holds, between a microbatch's I and its W, the inputs of its linear
layers and the gradients of their outputs. In a block those are, for the projections of attention and the MLP's,

    inputs     e b s ((h / t' + q / t) + (h / t' + f / t))
    gradients  e b s (((q + 2 kv) / t + h) + (g f / t + h))

where a gradient of width h is whole on every rank, since it is gathered before the product. Experts hold k copies of a
token instead, k (h + f / t) and k (g f / t + h). With delay k, k microbatches wait, and one more from the end of
its I to its W.

A device with several stages holds the weights, gradients and optimizer states of all, and at its worst moment what its
row (:func:`~.activation_residency.worst_moments`) then holds of each. Of 1F1B with one stage per device that moment
follows from depth and delay.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetero.cost.gradient_volume import communicators, cut_parameters, owned_parameters
from hetero.cost.layers.latency import CostModel
from hetero.cost.layers.stage_modules import Part, modules_of
from hetero.cost.runtime_model import RuntimeModel
from hetero.plan.ir import Plan, Recompute, Replica, Stage
from hetero.plan.lowering import step_rows
from hetero.schedule.activation_residency import HeldMicrobatches, Moment, worst_moments
from hetero.schedule.orders import BY_DEPTHS
from hetero.spec.profile import ProfileStore
from hetero.units import GIB

LOSS_BYTES = 4
"""The loss is computed in fp32 whatever the logits are."""

TOKEN_BYTES = 8
"""The first stage's input, and nobody else's, is numbers of tokens."""

BUFFERS_PER_NEIGHBOUR = 2
"""One slice on its way in, one on its way out, per direction that has data in flight at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """Bytes of one device of a stage at the device's peak, by what they are for.

    activations: of all microbatches in flight, and the inputs of those that will be run forward again; the head's
        logits not counted.
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

    @classmethod
    def sum_of(cls, every: Iterable["MemoryParts"]) -> "MemoryParts":
        """Part by part, what ``every`` one takes together."""
        named = [parts.named() for parts in every]
        return cls(**{field.name: sum(parts[field.name] for parts in named) for field in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The peak as a function of the depth: activations, logits, deferred parts and slack change, the rest does not."""

    fixed: MemoryParts
    activations_per_microbatch: int
    logits_per_microbatch: int
    input_per_microbatch: int
    deferred_per_microbatch: int
    allocator_slack: float

    def at(self, in_flight: int, *, inputs: int = 0, deferred: int = 0) -> MemoryParts:
        """The parts with ``in_flight`` microbatches between F (R) and B, the ``inputs`` of so many between F and R, and
        ``deferred`` between I and W."""
        activations = in_flight * self.activations_per_microbatch + inputs * self.input_per_microbatch
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

    def holding(self, held: HeldMicrobatches) -> MemoryParts:
        """The parts while so many microbatches are held."""
        return self.at(held.in_flight, inputs=held.inputs, deferred=held.deferred)

    def peak(self, *, in_flight: int, wgrad_delay: int | None, num_microbatches: int) -> MemoryParts:
        """The parts when a stage that is alone on its devices holds most in 1F1B: before a B, or after an I and before
        the W that follows."""
        depth = min(in_flight, num_microbatches)
        if wgrad_delay is None:
            return self.at(depth)
        before = self.at(depth, deferred=min(wgrad_delay, num_microbatches - depth))
        deferred = min(wgrad_delay + 1, num_microbatches)
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
    begins_device: bool = True,
) -> StageMemory:
    """Memory of one device of a stage.

    Args:
        begins_device: the context of the process on the device counts with this stage.
        optimizer_ways: the device has this part of the optimizer state of its weights, one in so many.
        num_neighbours: stages before and after it in its replica.
        shares_gradients: another rank holds some of the same parameters.
        num_communicators: that the device takes part in.
    """
    runtime, model = costs.runtime, costs.model
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
            sync_buffers=_sync_buffer_bytes(runtime, gradients, costs.gradient_bytes) if shares_gradients else 0,
            context=context_bytes(runtime, device) if begins_device else 0,
            communicators=num_communicators * runtime.communicator_bytes,
            slack=0,
        ),
        activations_per_microbatch=activations,
        logits_per_microbatch=saved("head", "none") if has_head else 0,
        input_per_microbatch=boundary if first_layer > 0 else TOKEN_BYTES * micro_batch_size * costs.seq_length,
        deferred_per_microbatch=sum(
            count * deferred_bytes(costs, kind, tp=tp, micro_batch_size=micro_batch_size, sequence_ways=sequence_ways)
            for kind, count in Counter(modules).items()
        ),
        allocator_slack=runtime.allocator_slack,
    )


def memory_costs(plan: Plan) -> CostModel:
    """Enough to price the memory of ``plan``: what our own runtime holds needs no profile."""
    return CostModel(model=plan.model, seq_length=plan.seq_length, precision=plan.precision, profiles=ProfileStore([]))


def plan_memory(plan: Plan, costs: CostModel) -> dict[tuple[int, int], MemoryParts]:
    """Parts of one device of every stage of ``plan`` at the device's peak, by replica and stage; all devices of a stage
    are alike.

    A device with several stages has an entry for each: what it holds of that stage when it holds most in all. Their sum
    is the device's peak (:func:`device_memory`). What it has once for all of them stands with the first stage: the
    context, the communicators that belong to no boundary, and what the most demanding layer of any works with.
    """
    gradient_groups = Counter(rank for ranks in communicators(plan) for rank in ranks)
    owned = owned_parameters(plan) if plan.distributed_optimizer else {}
    cut = {} if costs.runtime.runs_profiled_layers else cut_parameters(plan)
    every = _WorstMoments()
    parts = {}
    for r, replica in enumerate(plan.replicas):
        moments = every.of(replica)
        for group in replica.device_groups:
            ranks = replica.stages[group[0]].ranks
            shared = max(gradient_groups[rank] for rank in ranks)
            memories = {
                s: memory_of_stage(
                    replica.stages[s],
                    costs,
                    num_neighbours=(s > 0) + (s + 1 < len(replica.stages)),
                    shares_gradients=shared > 0,
                    num_gradient_groups=shared,
                    begins_device=s == group[0],
                )
                for s in group
            }
            owns_most = max(ranks, key=lambda rank: sum(owned[rank].values())) if owned else None
            for s, peak in _peak(replica, _on_one_device(memories, costs), moments.get(group)).items():
                if cut.get((r, s)):
                    peak = dataclasses.replace(
                        peak,
                        weights=peak.weights + costs.element_bytes * cut[r, s],
                        gradients=peak.gradients + costs.gradient_bytes * cut[r, s],
                    )
                if owns_most is not None:
                    optimizer = optimizer_bytes_per_parameter(costs) * owned[owns_most][s]
                    peak = dataclasses.replace(peak, optimizer=int(optimizer))
                parts[r, s] = peak
    return parts


def device_memory(plan: Plan, memory: Mapping[tuple[int, int], MemoryParts]) -> dict[tuple[int, int], MemoryParts]:
    """Peak parts of one device of every device group, by replica and the first of the group's stages, from what
    :func:`plan_memory` says of every stage."""
    return {
        (r, group[0]): memory[r, group[0]] if len(group) == 1 else MemoryParts.sum_of(memory[r, s] for s in group)
        for r, replica in enumerate(plan.replicas)
        for group in replica.device_groups
    }


class _WorstMoments:
    """Worst moments of device groups; of replicas that run alike they are found once."""

    def __init__(self) -> None:
        self._known: dict[object, Mapping[tuple[int, ...], list[Moment]]] = {}

    def of(self, replica: Replica) -> Mapping[tuple[int, ...], list[Moment]]:
        """By device group, from its row; empty where depths and delays say what is held at most."""
        groups = replica.device_groups
        if replica.schedule == BY_DEPTHS and len(groups) == len(replica.stages):
            return {}
        counts = tuple(replica.num_microbatches(s) for s in range(len(replica.stages)))
        orders = tuple((stage.in_flight, stage.wgrad_delay) for stage in replica.stages)
        key = replica.schedule, groups, counts, orders
        if key not in self._known:
            rows = zip(groups, step_rows(replica), strict=True)
            self._known[key] = {group: worst_moments(row) for group, row in rows}
        return self._known[key]


def _peak(
    replica: Replica, memories: Mapping[int, StageMemory], moments: Sequence[Moment] | None
) -> Mapping[int, MemoryParts]:
    """Parts by stage when the devices that hold these stages of ``replica`` hold most."""
    if moments is None:
        return {
            s: memory.peak(
                in_flight=replica.stages[s].in_flight,
                wgrad_delay=replica.stages[s].wgrad_delay,
                num_microbatches=replica.num_microbatches(s),
            )
            for s, memory in memories.items()
        }
    each = [{s: memory.holding(moment[s]) for s, memory in memories.items()} for moment in moments]
    return max(each, key=lambda parts: sum(part.total for part in parts.values()))


def _on_one_device(memories: Mapping[int, StageMemory], costs: CostModel) -> Mapping[int, StageMemory]:
    """Stages of one device: what they use in turns is counted once, with the first of them."""
    if len(memories) == 1:
        return memories
    every = [memory.fixed for memory in memories.values()]
    shared = any(parts.sync_buffers for parts in every)
    gradients = sum(parts.gradients for parts in every)
    sync = _sync_buffer_bytes(costs.runtime, gradients, costs.gradient_bytes) if shared else 0
    in_turns = itertools.chain([(max(parts.working for parts in every), sync)], itertools.repeat((0, 0)))
    return {
        s: dataclasses.replace(
            memory, fixed=dataclasses.replace(memory.fixed, working=working, sync_buffers=sync_buffers)
        )
        for (s, memory), (working, sync_buffers) in zip(memories.items(), in_turns, strict=False)
    }


def memory_of_stage(
    stage: Stage,
    costs: CostModel,
    *,
    num_neighbours: int = 2,
    shares_gradients: bool = True,
    num_gradient_groups: int = 2,
    begins_device: bool = True,
) -> StageMemory:
    """:func:`stage_memory` of a plan's stage.

    Its communicators are the world, tensor parallelism, the losses, two per neighbour, and one per set of ranks that
    sum gradients.

    Args:
        begins_device: not a later one of the stages on its devices, with which only those of its neighbours count.
    """
    of_device = 2 + (stage.tp > 1) + num_gradient_groups
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
        num_communicators=2 * num_neighbours + (of_device if begins_device else 0),
        begins_device=begins_device,
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
    profile = costs.profile_of(device) if costs.runtime.runs_profiled_layers else None
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
    scores = 0 if costs.runtime.flash_attention or recompute == "selective" else shape.heads * costs.seq_length
    attention = 2 * q + 2 * kv + scores
    if kind == "attention":
        return element * tokens * (2 * rows + attention // tp)
    if kind == "mlp":
        return element * tokens * (2 * rows + dispatched + mlp // tp)
    return element * tokens * (4 * rows + dispatched + (attention + mlp) // tp)


def deferred_bytes(costs: CostModel, kind: Part, *, tp: int, micro_batch_size: int, sequence_ways: int) -> int:
    """Bytes that a block, or half of one, holds of one microbatch between I and W on one device: the sums at the head
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
    score_copies = 0 if costs.runtime.flash_attention else 2
    layers = max(score_copies * work.score_bytes + work.row_bytes for work in works)
    head = costs.work("head", tp=tp, micro_batch_size=micro_batch_size)
    logits = 2 * head.score_bytes * LOSS_BYTES / costs.element_bytes if has_head else 0.0
    return int(max(layers, logits))


def _sync_buffer_bytes(runtime: RuntimeModel, gradients: int, element_bytes: int) -> int:
    return min(gradients, runtime.bucket_numel * element_bytes) if runtime.copies_gradients_to_sync else 0


def optimizer_bytes_per_parameter(costs: CostModel) -> int:
    """Adam's two moments, and beside half-precision weights their master copy, all as wide as a gradient."""
    return (2 + (costs.element_bytes < costs.gradient_bytes)) * costs.gradient_bytes


def context_bytes(runtime: RuntimeModel, device: str) -> int:
    """What a process occupies on ``device`` before it allocates a tensor."""
    return int(dict(runtime.context_gib).get(device, runtime.default_context_gib) * GIB)
