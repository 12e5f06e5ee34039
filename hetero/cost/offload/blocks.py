"""The blocks of a stage as offload sees them, and what may be chosen for each.

A **block** is the embedding, a layer, half a layer, or the head, on one rank; all ranks of a stage are alike. Offload
is chosen block by block. What the host has of a block is nested, because who updates needs the gradients, and streamed
weights are those that an update on the host has written:

    weights on the host  =>  gradients on the host  =>  optimizer state on the host

Activations either go to the host or are computed again, not both.
"""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Self

from hetero.cost.cost_model import CostModel, StageConfig
from hetero.cost.layers.stage_modules import modules_of
from hetero.cost.stage_memory import StageMemory, optimizer_bytes_per_parameter
from hetero.errors import ConfigError
from hetero.spec.profile import ModuleKind


class BlockChoice(NamedTuple):
    """What of one block lives on the host, and whether its forward is computed again in the backward.

    optimizer: master weights and moments; the host updates them.
    gradients: summed up over the microbatches on the host.
    weights: come to the device for a forward and for a backward.
    activations: go to the host after the forward and come back for the backward.
    recompute: of the microbatches in flight the device keeps what the forward needs to run again.
    """

    optimizer: bool = False
    gradients: bool = False
    weights: bool = False
    activations: bool = False
    recompute: bool = False

    @property
    def is_nested(self) -> bool:
        """Legal for a block that may be computed again."""
        return self.weights <= self.gradients <= self.optimizer and not (self.activations and self.recompute)


CHOICES = tuple(choice for choice in map(BlockChoice._make, product((False, True), repeat=5)) if choice.is_nested)
"""All that are legal for a layer: twelve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadBlock:
    """One block on one rank of a stage.

    parameters: elements of its weights. Of an embedding that a head of the same stage is tied to, the embedding has
        them all.
    largest: elements of the largest of these weights.
    ways: the rank has this part of the block's optimizer state, one in so many: those that hold the weights share it.
    saved_bytes: of one microbatch, kept from its forward to its backward.
    recomputed_bytes: the same where the forward is computed again, its input among it; ``None`` where it never is.
    forward_s, backward_s: of one microbatch.
    recompute_s: seconds more in the backward where the forward is computed again.
    update_s: of the rank's part of the optimizer state, on the device.
    forward_reads, backward_reads: how often a forward and a backward need the weights, each time anew where these are
        streamed. A backward of an embedding needs none.
    """

    kind: ModuleKind
    parameters: int
    largest: int = 0
    ways: float = 1.0
    saved_bytes: int
    recomputed_bytes: int | None = None
    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    update_s: float = 0.0
    forward_reads: int = 1
    backward_reads: int = 1

    @property
    def owned(self) -> float:
        """Elements of which the rank has the optimizer state."""
        return self.parameters / self.ways

    @property
    def choices(self) -> tuple[BlockChoice, ...]:
        """Those that are legal for this block."""
        return tuple(each for each in CHOICES if self.recomputed_bytes is not None or not each.recompute)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBytes:
    """Bytes of one element: of a weight, of a gradient, of the optimizer's state on the device, and on the host.

    host_state: master weight and both moments. Where weights are in full precision the device's are their own master;
        the host has a copy of them to update.
    """

    weight: int
    gradient: int
    device_state: int
    host_state: int

    @classmethod
    def of(cls, costs: CostModel) -> Self:
        """Of the precision and the runtime of ``costs``."""
        return cls(
            weight=costs.element_bytes,
            gradient=costs.gradient_bytes,
            device_state=optimizer_bytes_per_parameter(costs),
            host_state=3 * costs.state_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadStage:
    """A stage of which parts may go to the host, as one of its ranks has it.

    blocks: in the order of the forward.
    in_flight: microbatches between forward and backward, at most.
    capacity_bytes: of the device, for all of this.
    other_bytes: on the device whatever is chosen: context, buffers, what layers work with.
    bucket_bytes: on the device while a bucket of gradients that add up on the host is summed over ranks; 0 where no
        other rank holds any of them.
    allocator_slack: share that the allocator reserves beyond activations, and beyond all that comes and goes.
    cards: its ranks on this host, by the switch that they are behind: (2, 0) are two ranks behind switch 0.
    fill_s: from the pipeline's first forward to the stage's own first, at least.
    drain_s: from the stage's last backward to the end of the pipeline's, at least.
    """

    blocks: tuple[OffloadBlock, ...]
    element_bytes: ElementBytes
    in_flight: int
    capacity_bytes: int
    other_bytes: int = 0
    bucket_bytes: int = 0
    allocator_slack: float = 0.0
    cards: tuple[int, ...] = (1,)
    fill_s: float = 0.0
    drain_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ConfigError("offload of a stage: it has no blocks; give it at least one")
        if self.in_flight < 1:
            raise ConfigError(f"offload of a stage: in_flight is {self.in_flight}, must be at least 1")
        if self.num_ranks < 1 or min(self.cards) < 0:
            raise ConfigError(f"offload of a stage: cards is {self.cards}, must be counts with at least one rank")

    @property
    def num_ranks(self) -> int:
        """Its ranks on this host."""
        return sum(self.cards)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadChoice:
    """What is chosen for a stage: for each block, and for its updates on the host.

    speculate: an update on the host is previewed before the norm of the gradient is known.
    threads: of each rank, that update on the host.
    """

    blocks: tuple[BlockChoice, ...]
    speculate: bool = False
    threads: int = 1

    @classmethod
    def nothing(cls, stage: OffloadStage) -> Self:
        """Everything stays on the device."""
        return cls(blocks=(BlockChoice(),) * len(stage.blocks))

    def check(self, stage: OffloadStage) -> None:
        """
        Raises:
            ConfigError: not one choice for each block, or one that is not legal for it.
        """
        if len(self.blocks) != len(stage.blocks):
            raise ConfigError(
                f"offload of a stage with {len(stage.blocks)} blocks: {len(self.blocks)} choices; give one for each"
            )
        if self.threads < 1:
            raise ConfigError(f"offload of a stage: threads is {self.threads}, must be at least 1")
        for number, (block, choice) in enumerate(zip(stage.blocks, self.blocks, strict=True)):
            if choice not in block.choices:
                chosen = ", ".join(name for name, value in choice._asdict().items() if value)
                raise ConfigError(
                    f"offload of a stage: block {number} ({block.kind}) has {chosen}; weights on the host need "
                    "gradients there, and these the optimizer; activations are not computed again as well, and those "
                    "of embedding and head never"
                )


def offload_blocks(costs: CostModel, config: StageConfig, *, optimizer_ways: float = 1.0) -> tuple[OffloadBlock, ...]:
    """The blocks of a stage, priced by the cost model; what may be computed again is so in full.

    Args:
        config: without recomputation, which is chosen block by block, and with whole backwards.
        optimizer_ways: as of :func:`~hetero.cost.stage_memory.stage_memory`.

    Raises:
        ConfigError: ``config`` recomputes, or splits its backwards, beside which nothing goes to the host.
    """
    if config.recompute != "none" or config.splits_backward:
        what = f"recompute {config.recompute}" if config.recompute != "none" else "a split backward"
        raise ConfigError(f"offload of a stage: it has {what}; start from one without, what to recompute is chosen")
    has_embedding, has_head = config.first_layer == 0, config.end_layer == costs.model.num_layers
    kinds: list[ModuleKind] = ["embedding"] if has_embedding else []
    kinds += modules_of(config.first_layer, config.end_layer)
    kinds += ["head"] if has_head else []
    microbatch = costs.microbatch(
        tp=config.tp,
        micro_batch_size=config.micro_batch_size,
        sequence_parallel=config.sequence_parallel,
        fp8=config.fp8,
    )
    is_tied = costs.model.tied_embeddings
    blocks = []
    for kind in kinds:
        layer = costs.layer(
            kind,
            device=config.device,
            tp=config.tp,
            micro_batch_size=config.micro_batch_size,
            sequence_parallel=config.sequence_parallel,
            fp8=config.fp8,
        )
        is_layer = kind not in ("embedding", "head")
        parameters = costs.parameter_counts.per_rank(kind, config.tp)
        largest = costs.parameter_counts.largest(kind, config.tp)
        if kind == "head" and is_tied and not has_embedding:
            parameters += costs.parameter_counts.word_embedding // config.tp
            largest = max(largest, costs.parameter_counts.word_embedding // config.tp)
        by_head = int(kind == "embedding" and is_tied and has_head)
        blocks.append(
            OffloadBlock(
                kind=kind,
                parameters=parameters,
                largest=largest,
                ways=optimizer_ways,
                saved_bytes=costs.saved_bytes(kind, microbatch, device=config.device),
                recomputed_bytes=(
                    costs.saved_bytes(kind, microbatch, device=config.device, recompute="full") if is_layer else None
                ),
                forward_s=layer.forward_s,
                backward_s=layer.backward_s,
                recompute_s=layer.forward_s if is_layer else 0.0,
                update_s=costs.update(kind, device=config.device, tp=config.tp)[0] / optimizer_ways,
                forward_reads=1 + by_head,
                backward_reads=by_head if kind == "embedding" else 1,
            )
        )
    return tuple(blocks)


def other_bytes(memory: StageMemory) -> int:
    """What a stage's device holds beside weights, gradients, optimizer state and activations."""
    held = memory.at(0)
    return held.total - held.weights - held.gradients - held.optimizer
