"""Bytes of device and host, and the seconds of a step, of stages parts of which live on their host.

One rank of a stage has blocks j = 0, 1, ... in the order of the forward, M microbatches in a step, N of them in flight.
P_j are a block's parameters, P_j / ways those that the rank updates, A_j what it keeps of a microbatch, f_j, b_j, r_j
the seconds of its forward, its backward and of its forward again; w, g, o are bytes of a weight, of a gradient, of
optimizer state (2, 4, 12 in bf16). A sum over "host" is over blocks of which that part lives on the host.

**Device**: what stays, and slots through which the rest comes and goes.

    sum_resident (w P + g P + o P / ways + N A)  +  sum_recomputed N A'  +  max_recomputed A
    + 2 max_streamed w P + 2 max_streamed w P [gradients] + max_streamed w L + 4 max_streamed A + bucket

Two slots let one block be copied while another computes; activations have two on their way out and two on their way in.
Gradients of a microbatch have the precision of weights, and L is a block's largest weight, whose gradient may be there
before the backward can be held up. Where other ranks hold some of these, a bucket is there while it is summed. A' is
what is kept of a block that is computed again, which then has all of its activations once more.

**Host**, of each rank:

    sum_optimizer (s + s [speculate] + s [a checkpoint is staged] + g + w) P / ways
    + sum_gradients g (P - P / ways) + max_gradients g L + sum_weights w (P - P / ways) + sum_activations N A

s P are master weights and moments; the gradient that they are updated by and the weights on their way back are there
besides (:mod:`hetero.cost.host_memory`), and the state of a preview. Where gradients add up on the host all of them are
there, and so are weights that live there. A weight's gradient lands beside the sums before it is added.

**Copies.** A microbatch brings weights in for each use and activations out and in. Its gradient goes out and the host
adds it, one block after the other. What nobody else holds is updated where it is. Of several owners the sum comes in
behind the last microbatch's, ranks sum it up, and the owner's part of it goes out. New weights come in from their
owner, but for weights that live there and have one owner. Of several owners the devices gather them, and what others
have updated of weights on the host goes out again.

**Period.** Slots let copies be two blocks ahead of the compute or behind, not more. So what a forward needs has to fit
beside the forward, and what a backward needs beside the backward:

    forward   max( sum f,        sum A / B_out,   sum w P / B_in )
    backward  max( sum (b + r),  sum (w P / B_out + host's adding), sum (w P + A) / B_in )
    period    max( forward + backward + turn,  of a switch's cards: all bytes out / B_out, all bytes in / B_in )

That is never less than one maximum over the whole period. It is still a lower bound: where only some blocks in a row
are streamed, their copies fit beside these blocks and two more, not beside the whole forward. ``turn``: with N
microbatches in flight, activations of block j have to go out and come back during N - 1 other microbatches and what
comes behind j,

    turn  [ max_j A_j / B_out + A_j / B_in - (N - 1) (sum f + sum (b + r)) - sum_{i>j} (f_i + b_i + r_i) ]+

which counts where N = 1: the last block's activations have no time at all. The step's first forward and last backward
are beside no other microbatch: gathered weights go out in the one, and summed gradients come in in the other. They are
the fill's.

**Wait.** Let 0 be the end of the pipeline's last backward. The stage is done ``drain`` before, its blocks in turn:

    ready_j   -drain - sum_{i<j} (b_i + r_i)
    arrive_j  when the owner's part of the gradient is on the host: copies in the order of the backward, one by one;
              of what adds up there, with the adding, and the way to the device and back where others hold it
    nu        when the norm is known; so much later as the last sums there are behind 0
    start_j   max(nu, arrive_j) after the norm;  arrive_j with a preview
    need_j    fill + sum_{i<j} f_i

Host threads and copies in take what is needed first first: when a block arrives that is needed sooner, the one at work
is put aside between two chunks (a block that has to be finished first costs its own u more at most). Blocks that are
needed sooner arrive later. Of all orders with such interruptions the earliest need first has the least lateness, and
that is the most, over all sets of blocks, of (first start + all work - last need) (W. A. Horn, "Some simple
scheduling algorithms", Naval Research Logistics Quarterly 21, 1974). Only the sets {0..j} count here: whatever else
starts no earlier than block j is needed no later than it. Weights follow the update chunk by chunk, at their own rate,
so that the slower of the two decides:

    wait      max( nu + device's updates - fill,
                   max_j on the host [ start_j + max( sum_{i<=j} u_i, sum_{i<=j} in_i ) + fetch_j - need_j ] )+

``fetch_j`` is the copy of weights that live on the host, which comes behind their update.

u_i is a direct update, or a preview with its commit. (The runtime takes previews one after the other as gradients come,
until the norm is known, and only then by need: it may be later than this.) The wait moves the next forward.
When a preview turns out wrong, u is done again after the norm, and that step waits as it does without previews.

**Step** = rest of the fill + sum of the stages' first forwards and last backwards + (M - 1) period + longest wait.
That the longest wait moves the whole step is an upper bound: a slower stage's steady state may hide it.

Left out: sums and gathers between ranks (the simulator has them), copies of both directions slowing each other down,
and updates' copies beside those of the first microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.cost.offload.block_prices import BlockPrice, OffloadQuestion
from hetero.cost.offload.blocks import BlockChoice, OffloadChoice, OffloadStage
from hetero.cost.stage_memory import ACTIVATION_SLOTS, GRADIENT_SLOTS, WEIGHT_SLOTS
from hetero.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedBytes:
    """Bytes that one rank copies from its device to the host, and back."""

    to_host: int
    to_device: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadedStage:
    """What one rank of a stage takes with a choice.

    forward_s, backward_s, turn_s: of a microbatch in the steady state; copies count where they take longer.
    ends_s: of the step's first forward and its last backward.
    updates_s: of each block on the host, a preview with its commit if there are previews; 0 for others.
    wait_s: by how much the next step begins later for it; below 0, how much there is to spare.
    per_microbatch, per_step: copies in the steady state, and those of a whole step beside.
    """

    device_bytes: int
    host_bytes: int
    forward_s: float
    backward_s: float
    turn_s: float
    ends_s: float
    updates_s: tuple[float, ...]
    wait_s: float
    per_microbatch: CopiedBytes
    per_step: CopiedBytes

    @property
    def microbatch_s(self) -> float:
        """Between two microbatches of this stage alone."""
        return self.forward_s + self.backward_s + self.turn_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadedStep:
    """What a choice for all stages of a question takes.

    host_bytes: of all their ranks.
    wait_s: from the end of the last backward to the next step's first forward, at least 0.
    """

    stages: tuple[OffloadedStage, ...]
    host_bytes: int
    period_s: float
    wait_s: float
    step_s: float

    def fits(self, question: OffloadQuestion) -> bool:
        """Whether every device and the host have the memory."""
        return self.host_bytes <= question.host.memory_bytes and all(
            found.device_bytes <= stage.capacity_bytes
            for found, stage in zip(self.stages, question.stages, strict=True)
        )


def offloaded_step(question: OffloadQuestion, choices: Sequence[OffloadChoice]) -> OffloadedStep:
    """Price a choice for each stage of ``question`` by the formulas above.

    Raises:
        ConfigError: a choice that is not legal, or more threads than the host has.
    """
    for stage, choice in zip(question.stages, choices, strict=True):
        choice.check(stage)
    ranks = [stage.num_ranks for stage in question.stages]
    threads = sum(count * choice.threads for count, choice in zip(ranks, choices, strict=True))
    if threads > question.host.threads:
        raise ConfigError(f"host: {threads} threads are chosen for updates, it has {question.host.threads}")
    stages = tuple(
        _stage(question, stage, prices, choice)
        for stage, prices, choice in zip(question.stages, question.prices, choices, strict=True)
    )
    period_s = max(question.rest_period_s, *(stage.microbatch_s for stage in stages), _shared_s(question, choices))
    wait_s = max(0.0, *(stage.wait_s for stage in stages))
    ends_s = question.rest_s + sum(stage.ends_s for stage in stages)
    return OffloadedStep(
        stages=stages,
        host_bytes=sum(count * stage.host_bytes for count, stage in zip(ranks, stages, strict=True)),
        period_s=period_s,
        wait_s=wait_s,
        step_s=ends_s + (question.num_microbatches - 1) * period_s + wait_s,
    )


Priced = Sequence[tuple[BlockPrice, BlockChoice]]


def _stage(
    question: OffloadQuestion, stage: OffloadStage, prices: Sequence[BlockPrice], choice: OffloadChoice
) -> OffloadedStage:
    priced = list(zip(prices, choice.blocks, strict=True))
    forward_s, backward_s = (
        sum(p.forward_s for p in prices),
        sum(p.backward_s + c.recompute * p.recompute_s for p, c in priced),
    )
    activations_out_s = sum(c.activations * p.activations_out_s for p, c in priced)
    forward_in_s = sum(c.weights * p.forward_weights_s for p, c in priced)
    backward_in_s = sum(c.weights * p.backward_weights_s + c.activations * p.activations_in_s for p, c in priced)
    gathered_out_s = sum(c.weights * p.gathered_out_s for p, c in priced)
    sums_in_s = sum(c.gradients * p.sums_in_s for p, c in priced)
    added_s = sum(c.gradients * (p.gradients_out_s + p.add_s) for p, c in priced)
    turn_s = _turn_s(priced, others_s=(question.in_flight(stage) - 1) * (forward_s + backward_s))
    return OffloadedStage(
        device_bytes=stage.other_bytes + _device_bytes(priced, stage),
        host_bytes=_host_bytes(priced, speculates=choice.speculate),
        forward_s=max(forward_s, activations_out_s, forward_in_s),
        backward_s=max(backward_s, added_s, backward_in_s),
        turn_s=turn_s,
        ends_s=max(forward_s, activations_out_s + gathered_out_s, forward_in_s)
        + max(backward_s, added_s, backward_in_s + sums_in_s)
        + turn_s,
        updates_s=tuple(_updates_s(priced, question, choice)),
        wait_s=_wait_s(priced, question, stage, choice),
        per_microbatch=_per_microbatch(priced, stage),
        per_step=_per_step(priced, stage),
    )


def _device_bytes(priced: Priced, stage: OffloadStage) -> int:
    held = 0
    for p, c in priced:
        held += p.weights_bytes * (not c.weights) + p.gradients_bytes * (not c.gradients)
        held += p.state_bytes * (not c.optimizer)
        held += 0 if c.activations else p.kept_again_bytes if c.recompute else p.kept_bytes
    again = max((p.activations_slot_bytes for p, c in priced if c.recompute), default=0)
    slots = WEIGHT_SLOTS * max((p.weights_slot_bytes for p, c in priced if c.weights), default=0)
    slots += GRADIENT_SLOTS * max((p.gradients_slot_bytes for p, c in priced if c.gradients), default=0)
    slots += max((p.largest_slot_bytes for p, c in priced if c.gradients), default=0)
    slots += ACTIVATION_SLOTS * max((p.activations_slot_bytes for p, c in priced if c.activations), default=0)
    bucket = stage.bucket_bytes if any(c.gradients for _, c in priced) else 0
    return held + slots + again + bucket


def _host_bytes(priced: Priced, *, speculates: bool) -> int:
    held = 0
    for p, c in priced:
        held += c.optimizer * (p.host_state_bytes + speculates * p.host_preview_bytes)
        held += c.gradients * p.host_sum_bytes + c.weights * p.host_weights_bytes
        held += c.activations * p.host_activations_bytes
    return held + max((p.host_landing_bytes for p, c in priced if c.gradients), default=0)


def _turn_s(priced: Priced, *, others_s: float) -> float:
    """What a microbatch's activations are late for its backward while nothing else is."""
    turn_s, behind_s = 0.0, 0.0
    for p, c in reversed(priced):
        if c.activations:
            turn_s = max(turn_s, p.activations_out_s + p.activations_in_s - others_s - behind_s)
        behind_s += p.forward_s + p.backward_s + c.recompute * p.recompute_s
    return turn_s


def _updates_s(priced: Priced, question: OffloadQuestion, choice: OffloadChoice) -> list[float]:
    factor = question.host.preview_factor if choice.speculate else 1.0
    return [c.optimizer * factor * p.update_thread_s / choice.threads for p, c in priced]


def _wait_s(priced: Priced, question: OffloadQuestion, stage: OffloadStage, choice: OffloadChoice) -> float:
    arrives_s = _arrivals_s(priced, stage)
    added_s = (at_s for (_, c), at_s in zip(priced, arrives_s, strict=True) if c.gradients)
    norm_s = question.norm_s + max(0.0, *added_s, 0.0)
    wait_s = norm_s + sum((not c.optimizer) * p.device_update_s for p, c in priced) - stage.fill_s
    updated_s = copied_s = 0.0
    need_s = stage.fill_s
    for j, update_s in enumerate(_updates_s(priced, question, choice)):
        p, c = priced[j]
        if c.optimizer:
            updated_s += update_s
            copied_s += p.kept_in_s if c.weights else p.update_in_s
            start_s = arrives_s[j] if choice.speculate else max(norm_s, arrives_s[j])
            fetched_s = c.weights * p.forward_weights_s
            wait_s = max(wait_s, start_s + max(updated_s, copied_s) + fetched_s - need_s)
        need_s += p.forward_s
    return wait_s


def _arrivals_s(priced: Priced, stage: OffloadStage) -> list[float]:
    """When the gradient that a block is updated by is on the host; meaningless for one that the device updates."""
    ready_s = -stage.drain_s - sum(p.backward_s + c.recompute * p.recompute_s for p, c in priced)
    arrived_s = float("-inf")
    arrives_s = []
    for p, c in reversed(priced):
        ready_s += p.backward_s + c.recompute * p.recompute_s
        if c.optimizer:
            arrived_s = max(arrived_s, ready_s) + (p.added_out_s if c.gradients else p.update_out_s)
        arrives_s.append(arrived_s)
    return arrives_s[::-1]


def _shared_s(question: OffloadQuestion, choices: Sequence[OffloadChoice]) -> float:
    """The least seconds per microbatch of what stages share: a switch's link out and its link in."""
    out_s, in_s = [], []
    for prices, choice in zip(question.prices, choices, strict=True):
        priced = list(zip(prices, choice.blocks, strict=True))
        out_s.append(sum(c.activations * p.activations_out_s + c.gradients * p.gradients_out_s for p, c in priced))
        in_s.append(
            sum(
                c.activations * p.activations_in_s + c.weights * (p.forward_weights_s + p.backward_weights_s)
                for p, c in priced
            )
        )
    shared_s = 0.0
    for cards in zip(*(stage.cards for stage in question.stages), strict=True):
        for each_s in (out_s, in_s):
            shared_s = max(shared_s, sum(count * s for count, s in zip(cards, each_s, strict=True)))
    return shared_s


def _per_microbatch(priced: Priced, stage: OffloadStage) -> CopiedBytes:
    activations = sum(c.activations * p.saved_bytes for p, c in priced)
    uses = (block.forward_reads + block.backward_reads for block in stage.blocks)
    weights = sum(c.weights * count * p.weights_bytes for (p, c), count in zip(priced, uses, strict=True))
    # Of one microbatch gradients have the precision of weights.
    return CopiedBytes(
        to_host=activations + sum(c.gradients * p.weights_bytes for p, c in priced), to_device=activations + weights
    )


def _per_step(priced: Priced, stage: OffloadStage) -> CopiedBytes:
    """Beside M times :func:`_per_microbatch`."""
    element, to_host, to_device = stage.element_bytes, 0.0, 0.0
    for (p, c), block in zip(priced, stage.blocks, strict=True):
        is_shared = block.ways > 1
        to_host += element.gradient * block.owned * (c.optimizer and (is_shared or not c.gradients))
        to_host += element.weight * (block.parameters - block.owned) * (c.weights and is_shared)
        to_device += p.gradients_bytes * (c.gradients and is_shared)
        to_device += element.weight * block.owned * (c.optimizer and (is_shared or not c.weights))
    return CopiedBytes(to_host=int(to_host), to_device=int(to_device))
