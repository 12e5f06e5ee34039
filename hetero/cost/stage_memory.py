"""What one device holds of a stage, by what it is for, as a function of the microbatches that are in flight.

Weights, gradients, optimizer states and buffers are there throughout; activations of :mod:`.activation_memory` come and
go with the microbatches.
"""

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from hetero.cost.cost_model import CostModel, StageConfig
from hetero.cost.layers.activation_memory import (
    collective_bytes,
    deferred_bytes,
    logits_working_bytes,
    working_bytes,
)
from hetero.cost.layers.stage_modules import modules_of
from hetero.plan.ir import Recompute, Stage
from hetero.plan.offload import (
    blocks_with_activations_on_host,
    blocks_with_gradients_on_host,
    blocks_with_weights_on_host,
)
from hetero.schedule.activation_residency import HeldMicrobatches
from hetero.spec.profile import ModuleKind

TOKEN_BYTES = 8
"""The first stage's input, and nobody else's, is numbers of tokens."""

GRADIENT_SLOTS = 2
"""Blocks whose gradients are on the device where they add up on the host: one that comes, one that leaves
(:mod:`hetero.runtime.host_gradients`)."""

WEIGHT_SLOTS = 2
"""Blocks whose weights are on the device where they live on the host: one that computes, one that comes
(:mod:`hetero.runtime.host_weights`)."""

ACTIVATION_SLOTS_EACH_WAY = 2
ACTIVATION_SLOTS = 2 * ACTIVATION_SLOTS_EACH_WAY
"""Blocks on their way to the host and back: two that leave, two that come (:mod:`hetero.runtime.host_activations`)."""

BUFFERS_PER_NEIGHBOUR = 2
"""One slice on its way in, one on its way out, per direction that has data in flight at the same time."""


MOST_REMEMBERED = 1 << 12
"""Stages whose memory is kept: a planner asks for the same ones again and again. A heuristic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown:
    """Bytes of one device of a stage, by what they are for.

    activations: of all microbatches in flight, and the inputs of those that will be run forward again; the head's
        logits not counted.
    logits: saved logits and softmax of the microbatches in flight.
    deferred: of all microbatches whose weights' gradients are still to be computed.
    working: what the most demanding layer needs beside them while it computes, activations on their way to the host
        and back, gradients on theirs, and weights that come for a compute.
    boundary_buffers: slices on their way to and from neighbours.
    sync_buffers: what the reduction of gradients needs beside the gradients.
    held_by_collectives: tensors of a whole pass that the allocator has not got back yet from tensor-parallel
        collectives, where the runtime holds them (``holds_collective_tensors``). Before it runs out of memory, it waits
        for them.
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
    held_by_collectives: int
    slack: int

    @property
    def total(self) -> int:
        return sum(_PARTS(self))

    @property
    def required(self) -> int:
        """The least with which it runs."""
        return self.total - self.held_by_collectives

    def named(self) -> Mapping[str, int]:
        """Every field by its name, in their order."""
        return MappingProxyType({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def sum_of(cls, every: Iterable["MemoryBreakdown"]) -> "MemoryBreakdown":
        """Field by field, what ``every`` one takes together."""
        named = [each.named() for each in every]
        return cls(**{field.name: sum(each[field.name] for each in named) for field in dataclasses.fields(cls)})


_PARTS = operator.attrgetter(*(field.name for field in dataclasses.fields(MemoryBreakdown)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes of one device of a stage as a function of the microbatches it holds.

    Activations, logits, what is deferred and slack change; ``fixed`` is the rest.
    """

    fixed: MemoryBreakdown
    activations_per_microbatch: int
    logits_per_microbatch: int
    input_per_microbatch: int
    deferred_per_microbatch: int
    allocator_slack: float

    def at(self, in_flight: int, *, inputs: int = 0, deferred: int = 0) -> MemoryBreakdown:
        """With ``in_flight`` microbatches between F (R) and B, the ``inputs`` of so many between F and R, and
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

    def holding(self, held: HeldMicrobatches) -> MemoryBreakdown:
        """While so many microbatches are held."""
        return self.at(held.in_flight, inputs=held.inputs, deferred=held.deferred)

    def peak(self, *, in_flight: int, wgrad_delay: int | None, num_microbatches: int) -> MemoryBreakdown:
        """The most that a stage alone on its devices holds in 1F1B: before a B, or after an I and before its W."""
        depth = min(in_flight, num_microbatches)
        if wgrad_delay is None:
            return self.at(depth)
        before = self.at(depth, deferred=min(wgrad_delay, num_microbatches - depth))
        deferred = min(wgrad_delay + 1, num_microbatches)
        after = self.at(min(depth - 1, num_microbatches - deferred), deferred=deferred)
        return max(before, after, key=lambda held: held.total)


class BlockActivations(NamedTuple):
    """The embedding, a layer, half of one or the head, and the bytes that it saves of a microbatch."""

    kind: ModuleKind
    num_bytes: int
    is_recomputed: bool = False


def saved_blocks(costs: CostModel, config: StageConfig) -> list[BlockActivations]:
    """The blocks of a stage on one of its devices, in the order of the forward."""
    microbatch = costs.microbatch(
        tp=config.tp,
        micro_batch_size=config.micro_batch_size,
        sequence_parallel=config.sequence_parallel,
        fp8=config.fp8,
    )

    def block(kind: ModuleKind, recompute: Recompute = "none") -> BlockActivations:
        saved = costs.saved_bytes(kind, microbatch, device=config.device, recompute=recompute)
        return BlockActivations(kind, saved, recompute != "none")

    modules = modules_of(config.first_layer, config.end_layer)
    num_recomputed = (config.recompute_num_layers or len(modules)) if config.recompute != "none" else 0
    found = [block("embedding")] if config.first_layer == 0 else []
    found += [block(kind, config.recompute if i < num_recomputed else "none") for i, kind in enumerate(modules)]
    return found + ([block("head")] if config.end_layer == costs.model.num_layers else [])


def blocks_on_host(stage: Stage, costs: CostModel) -> dict[float, BlockActivations]:
    """The blocks of a plan's stage whose activations are on the host, by position, in the order of the forward."""
    positions = blocks_with_activations_on_host(stage, num_layers=costs.model.num_layers)
    return dict(zip(positions, saved_blocks(costs, StageConfig.of(stage)), strict=False)) if positions else {}


def _with_activations_on_host(memory: StageMemory, stage: Stage, costs: CostModel) -> StageMemory:
    """What is on the host stays on the device only while it is on its way, through slots of the largest block."""
    blocks = blocks_on_host(stage, costs).values()
    if not blocks:
        return memory
    slots = ACTIVATION_SLOTS * max(block.num_bytes for block in blocks)
    return dataclasses.replace(
        memory,
        fixed=dataclasses.replace(memory.fixed, working=memory.fixed.working + slots),
        activations_per_microbatch=memory.activations_per_microbatch
        - sum(block.num_bytes for block in blocks if block.kind != "head"),
        logits_per_microbatch=0 if any(block.kind == "head" for block in blocks) else memory.logits_per_microbatch,
    )


def gradients_to_host(stage: Stage, costs: CostModel) -> dict[float, int]:
    """Elements of the gradients that a rank of a plan's stage adds up on its host, by the positions of their blocks, in
    the order of the forward."""
    blocks = blocks_with_gradients_on_host(stage, num_layers=costs.model.num_layers)
    return _elements_of(blocks, stage.offload.gradients_from, stage, costs)


def weights_to_host(stage: Stage, costs: CostModel) -> dict[float, int]:
    """As :func:`gradients_to_host`, of weights that live there."""
    blocks = blocks_with_weights_on_host(stage, num_layers=costs.model.num_layers)
    return _elements_of(blocks, stage.offload.weights_from, stage, costs)


def fetched_weights(stage: Stage, costs: CostModel) -> dict[float, int]:
    """As :func:`weights_to_host`, what comes to the device for a compute of each block: with the head of a stage that
    has both ends also its tied embedding."""
    elements, model = weights_to_host(stage, costs), costs.model
    if -1.0 in elements and model.tied_embeddings and stage.end == model.num_layers:
        elements[stage.end] += costs.parameter_counts.word_embedding // stage.tp
    return elements


def _elements_of(blocks: Sequence[float], first: float | None, stage: Stage, costs: CostModel) -> dict[float, int]:
    """Elements on a rank of the weights from ``first`` on, by the positions of their ``blocks``."""
    num_layers, counts = costs.model.num_layers, costs.parameter_counts
    found = {}
    for position in blocks:
        assert first is not None
        if position < 0:
            found[position] = counts.per_rank("embedding", stage.tp)
        elif position == num_layers:
            tied = counts.word_embedding // stage.tp if costs.model.tied_embeddings and stage.start > 0 else 0
            found[position] = counts.per_rank("head", stage.tp) + tied
        else:
            begin, end = max(position, first), min(math.floor(position) + 1.0, stage.end)
            found[position] = sum(counts.per_rank(kind, stage.tp) for kind in modules_of(begin, end))
    return found


def _with_weights_on_host(memory: StageMemory, stage: Stage, costs: CostModel) -> StageMemory:
    """Of weights that live on the host there are those of two blocks.

    A bucket that is gathered needs no more than one of gradients in its time, which counts already.
    """
    fetched = fetched_weights(stage, costs)
    if not fetched:
        return memory
    total = sum(weights_to_host(stage, costs).values())
    there = min(total, WEIGHT_SLOTS * max(fetched.values())) * costs.element_bytes
    fixed = dataclasses.replace(
        memory.fixed,
        weights=memory.fixed.weights - costs.element_bytes * total,
        working=memory.fixed.working + there,
    )
    return dataclasses.replace(memory, fixed=fixed)


def _with_gradients_on_host(
    memory: StageMemory, stage: Stage, costs: CostModel, *, shares_gradients: bool
) -> StageMemory:
    """Of gradients that add up on the host stay those of two blocks, a weight's of a third one, which may be there
    before it has to wait, and a bucket while it is summed, where ranks share some."""
    elements = gradients_to_host(stage, costs)
    if not elements:
        return memory
    total, block = sum(elements.values()), max(elements.values())
    one = largest_gradient(stage, costs)
    slots = min(total, GRADIENT_SLOTS * block + one) * costs.element_bytes
    bucket = min(total, summed_at_once(one, costs)) if shares_gradients else 0
    fixed = dataclasses.replace(
        memory.fixed,
        gradients=memory.fixed.gradients - costs.gradient_bytes * (total - bucket),
        working=memory.fixed.working + slots,
    )
    return dataclasses.replace(memory, fixed=fixed)


def summed_at_once(largest: int, costs: CostModel) -> int:
    """Elements of a bucket of gradients that add up on the host, while it is on the device to be summed over ranks.

    largest: elements of the largest weight among them.
    """
    return max(largest, costs.runtime.bucket_numel)


def largest_gradient(stage: Stage, costs: CostModel) -> int:
    """Elements of the largest of these gradients, of one weight."""
    return max((costs.parameter_counts.largest(kind, stage.tp) for kind in _kinds(stage, costs)), default=0)


def _kinds(stage: Stage, costs: CostModel) -> Iterator[ModuleKind]:
    for position in blocks_with_gradients_on_host(stage, num_layers=costs.model.num_layers):
        if position < 0:
            yield "embedding"
        elif position == costs.model.num_layers:
            # The other copy of a tied embedding is there.
            yield "embedding" if costs.model.tied_embeddings and stage.start > 0 else "head"
        else:
            yield "block"


@lru_cache(maxsize=MOST_REMEMBERED)
def stage_memory(
    costs: CostModel,
    config: StageConfig,
    *,
    num_neighbours: int = 2,
    shares_gradients: bool = True,
    num_communicators: int = 8,
    optimizer_ways: float = 1.0,
    begins_device: bool = True,
) -> StageMemory:
    """Memory of one device of a stage.

    Args:
        num_neighbours: stages before and after it in its replica.
        shares_gradients: another rank holds some of the same parameters.
        num_communicators: that the device takes part in.
        optimizer_ways: the device has this part of the optimizer state of its weights, one in so many.
        begins_device: the context of the process on the device counts with this stage.
    """
    runtime, model, device = costs.runtime, costs.model, config.device
    parameters = costs.parameters_per_rank(
        device=device, first_layer=config.first_layer, end_layer=config.end_layer, tp=config.tp
    )
    has_embedding, has_head = config.first_layer == 0, config.end_layer == model.num_layers
    modules = modules_of(config.first_layer, config.end_layer)
    microbatch = costs.microbatch(
        tp=config.tp,
        micro_batch_size=config.micro_batch_size,
        sequence_parallel=config.sequence_parallel,
        fp8=config.fp8,
    )
    boundary = costs.element_bytes * microbatch.num_tokens * model.hidden_size // microbatch.sequence_ways

    def saved(kind: ModuleKind) -> int:
        return costs.saved_bytes(kind, microbatch, device=device)

    blocks = saved_blocks(costs, config)
    activations = sum(block.num_bytes for block in blocks if block.kind != "head")
    working = working_bytes(modules, costs.shape, microbatch, flash_attention=not costs.keeps_scores(device))
    if config.recompute == "full":
        # The layer under recomputation has all of its activations once more.
        working += max(saved(block.kind) for block in blocks if block.is_recomputed)
    if has_head:
        # The head's backward comes first, and when the layers' begins what it has saved is free again.
        logits = logits_working_bytes(costs.shape, microbatch, loss_copies=runtime.loss_copies)
        working = max(working - saved("head"), logits)
    gradients = costs.gradient_bytes * parameters
    context = runtime.context_bytes(costs.device_types.of(device), has_experts=model.num_experts is not None)
    return StageMemory(
        fixed=MemoryBreakdown(
            weights=costs.element_bytes * parameters,
            gradients=gradients,
            optimizer=int(optimizer_bytes_per_parameter(costs) * parameters / optimizer_ways),
            activations=0,
            logits=0,
            deferred=0,
            working=working,
            boundary_buffers=num_neighbours * BUFFERS_PER_NEIGHBOUR * boundary,
            sync_buffers=runtime.sync_buffer_bytes(gradients, costs.gradient_bytes) if shares_gradients else 0,
            context=context if begins_device else 0,
            communicators=num_communicators * runtime.communicator_bytes,
            held_by_collectives=(
                collective_bytes(modules, costs.shape, microbatch) if runtime.holds_collective_tensors else 0
            ),
            slack=0,
        ),
        activations_per_microbatch=activations,
        logits_per_microbatch=saved("head") if has_head else 0,
        input_per_microbatch=TOKEN_BYTES * microbatch.num_tokens if has_embedding else boundary,
        deferred_per_microbatch=sum(
            count
            * deferred_bytes(
                kind,
                costs.shape,
                microbatch,
                keeps_gathered_inputs=costs.may_have_transformer_engine(device),
            )
            for kind, count in Counter(modules).items()
        ),
        allocator_slack=runtime.allocator_slack,
    )


def memory_of_stage(
    stage: Stage,
    costs: CostModel,
    *,
    num_neighbours: int = 2,
    shares_gradients: bool = True,
    num_gradient_groups: int = 2,
    begins_device: bool = True,
) -> StageMemory:
    """Memory of one device of a plan's stage.

    Its communicators are the world, tensor parallelism, the losses, two per neighbour, and one per set of ranks that
    sum gradients.

    Args:
        begins_device: not a later one of the stages on its devices, with which only those of its neighbours count.
    """
    of_device = 2 + (stage.tp > 1) + num_gradient_groups
    memory = stage_memory(
        costs,
        StageConfig.of(stage),
        num_neighbours=num_neighbours,
        shares_gradients=shares_gradients,
        num_communicators=2 * num_neighbours + (of_device if begins_device else 0),
        begins_device=begins_device,
    )
    return with_offload(memory, stage, costs, shares_gradients=shares_gradients)


def with_offload(memory: StageMemory, stage: Stage, costs: CostModel, *, shares_gradients: bool) -> StageMemory:
    """What is left of ``memory``, in which everything but the optimizer's state is on the device, beside what ``stage``
    leaves to its host."""
    memory = _with_activations_on_host(memory, stage, costs)
    memory = _with_gradients_on_host(memory, stage, costs, shares_gradients=shares_gradients)
    return _with_weights_on_host(memory, stage, costs)


def optimizer_bytes_per_parameter(costs: CostModel) -> int:
    """Adam's two moments, and beside half-precision weights their master copy."""
    return (2 + (costs.element_bytes < costs.state_bytes)) * costs.state_bytes
