"""Bytes and seconds of one block for each thing that may be chosen for it, on a given host.

They are the coefficients of :mod:`.offloaded_step`, which adds them up, and of the planner's model, which chooses.
"""

from dataclasses import dataclass
from functools import cached_property

from hetero.cost.offload.blocks import OffloadBlock, OffloadStage
from hetero.cost.offload.host_resources import HostResources
from hetero.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPrice:
    """One block of one rank, with M microbatches in a step and N of them in flight. 0 is what does not happen.

    On the device: weights, gradients, state (this rank's part of it); ``kept`` activations of N microbatches, or
    ``kept_again`` if they are computed again. A slot of what is streamed: weights, gradients of one microbatch in the
    precision of weights, those of the largest weight alone, activations of one microbatch; ``saved_bytes`` are these
    without the allocator's slack, which all else that comes and goes has.

    On the host, as :mod:`hetero.cost.host_memory` counts it: ``host_state`` with the gradient that it is updated by,
    the weights on their way back and the copy that a checkpoint is written from; the state once more if updates are
    previewed. Besides, what other ranks own of gradients that add up there and of weights that live there; memory in
    which the gradient of one weight lands; activations of N microbatches.

    Copies, of one microbatch: weights in, once for every use; a gradient out, and ``add_s`` in which the host adds it;
    activations out and in. Of a step, of what other ranks hold as well: summed gradients in, and gathered weights out.
    ``update_in_s`` and ``update_out_s`` are the rank's part of new weights and of summed gradients, while all cards
    behind its switch copy theirs; ``added_out_s`` is what comes before an update of gradients that add up on the host:
    the last microbatch's go out and are added, and where others hold them the sum comes in and goes out again.
    ``kept_in_s`` is the part of ``update_in_s`` that is there also of weights that live on the host.

    update_thread_s: of one thread of the host, for a direct update. device_update_s: the same on the device.
    """

    weights_bytes: int
    gradients_bytes: int
    state_bytes: int
    kept_bytes: int
    kept_again_bytes: int
    saved_bytes: int
    weights_slot_bytes: int
    gradients_slot_bytes: int
    largest_slot_bytes: int
    activations_slot_bytes: int
    host_state_bytes: int
    host_preview_bytes: int
    host_sum_bytes: int
    host_landing_bytes: int
    host_weights_bytes: int
    host_activations_bytes: int
    forward_s: float
    backward_s: float
    recompute_s: float
    forward_weights_s: float
    backward_weights_s: float
    gradients_out_s: float
    add_s: float
    activations_out_s: float
    activations_in_s: float
    sums_in_s: float
    gathered_out_s: float
    update_out_s: float
    added_out_s: float
    update_in_s: float
    kept_in_s: float
    update_thread_s: float
    device_update_s: float


@dataclass(frozen=True, kw_only=True)
class OffloadQuestion:
    """What is to be chosen: stages of one pipeline that share a host, which may be one stage alone.

    num_microbatches: of a step, of each of the stages.
    norm_s: from the end of the pipeline's last backward until all ranks know the norm of the gradient.
    rest_s: the first microbatch's way through the pipeline, without these stages.
    rest_period_s: the least seconds per microbatch that the pipeline takes whatever these stages do.
    may_speculate: updates may be previewed.
    """

    stages: tuple[OffloadStage, ...]
    host: HostResources
    num_microbatches: int
    norm_s: float = 0.0
    rest_s: float = 0.0
    rest_period_s: float = 0.0
    may_speculate: bool = True

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("offload: no stages to choose for; name one at least")
        if self.num_microbatches < 1:
            raise ConfigError(f"offload: num_microbatches is {self.num_microbatches}, must be at least 1")
        if len({len(stage.cards) for stage in self.stages}) > 1:
            raise ConfigError(
                f"offload: stages on one host name {sorted({len(stage.cards) for stage in self.stages})} switches; "
                "cards counts the ranks behind each switch of the host, also where there are none"
            )
        ranks = sum(stage.num_ranks for stage in self.stages)
        if self.host.threads < ranks:
            raise ConfigError(
                f"host: {self.host.threads} threads for updates of {ranks} ranks; each needs one at least"
            )

    @cached_property
    def cards_behind(self) -> tuple[int, ...]:
        """Ranks behind each switch."""
        return tuple(map(sum, zip(*(stage.cards for stage in self.stages), strict=True)))

    @cached_property
    def prices(self) -> tuple[tuple[BlockPrice, ...], ...]:
        """Of each block of each stage."""
        return tuple(tuple(self._price(block, stage) for block in stage.blocks) for stage in self.stages)

    def in_flight(self, stage: OffloadStage) -> int:
        """N: no more than there are."""
        return min(stage.in_flight, self.num_microbatches)

    def _price(self, block: OffloadBlock, stage: OffloadStage) -> BlockPrice:
        host, element = self.host, stage.element_bytes
        weights, gradients = element.weight * block.parameters, element.gradient * block.parameters
        own_weights, own_gradients = element.weight * block.owned, element.gradient * block.owned
        own_state = element.host_state * block.owned
        in_flight, slack, is_shared = self.in_flight(stage), 1 + stage.allocator_slack, block.ways > 1
        weights_s = host.copy_s(host.to_device, weights)
        # Of one microbatch gradients have the precision of weights.
        gradients_out_s, add_s = host.copy_s(host.to_host, weights), host.sum_s(gradients)
        sums_in_s = host.copy_s(host.to_device, gradients) if is_shared else 0.0
        all_cards = max(behind for behind, own in zip(self.cards_behind, stage.cards, strict=True) if own)
        update_out_s = host.copy_s(host.to_host, all_cards * own_gradients)
        update_in_s = host.copy_s(host.to_device, all_cards * own_weights)
        return BlockPrice(
            weights_bytes=weights,
            gradients_bytes=gradients,
            state_bytes=int(element.device_state * block.owned),
            kept_bytes=int(slack * in_flight * block.saved_bytes),
            kept_again_bytes=int(slack * in_flight * (block.recomputed_bytes or 0)),
            saved_bytes=block.saved_bytes,
            weights_slot_bytes=int(slack * weights),
            gradients_slot_bytes=int(slack * weights),
            largest_slot_bytes=int(slack * element.weight * block.largest),
            activations_slot_bytes=int(slack * block.saved_bytes),
            host_state_bytes=int((1 + host.stages_checkpoints) * own_state + own_gradients + own_weights),
            host_preview_bytes=int(own_state),
            host_sum_bytes=int(gradients - own_gradients),
            host_landing_bytes=element.gradient * block.largest,
            host_weights_bytes=int(weights - own_weights),
            host_activations_bytes=in_flight * block.saved_bytes,
            forward_s=block.forward_s,
            backward_s=block.backward_s,
            recompute_s=block.recompute_s,
            forward_weights_s=block.forward_reads * weights_s,
            backward_weights_s=block.backward_reads * weights_s,
            gradients_out_s=gradients_out_s,
            add_s=add_s,
            activations_out_s=host.copy_s(host.to_host, block.saved_bytes),
            activations_in_s=host.copy_s(host.to_device, block.saved_bytes),
            sums_in_s=sums_in_s,
            gathered_out_s=host.copy_s(host.to_host, weights - own_weights) if is_shared else 0.0,
            update_out_s=update_out_s,
            added_out_s=gradients_out_s + add_s + (sums_in_s + update_out_s if is_shared else 0.0),
            update_in_s=update_in_s,
            kept_in_s=update_in_s if is_shared else 0.0,
            update_thread_s=host.update_thread_s(block.owned),
            device_update_s=block.update_s,
        )
