"""The constraints of what goes to the host, one per function, each with its formula.

The formulas are those of :mod:`hetero.cost.offload.offloaded_step`, in whole MiB and microseconds: what something takes
is rounded up, term by term, and what is there is rounded down. So a choice that fits here fits, and takes no longer
than it says.

j          a block of a stage, in the order of the forward
o g w a r  whether block j has its optimizer state, gradients, weights, activations on the host; is computed again
s          the stage previews its updates;  n[t] whether each of its ranks has t threads
"""

from collections.abc import Callable
from itertools import pairwise

from ortools.sat.python import cp_model

from hetero.cost.offload.block_prices import OffloadQuestion
from hetero.cost.stage_memory import ACTIVATION_SLOTS, GRADIENT_SLOTS, WEIGHT_SLOTS
from hetero.planner.offload.variables import HostVars, StageVars, Whole, mib, us, us_of_credit
from hetero.units import MIB

OffloadConstraint = Callable[[cp_model.CpModel, HostVars, OffloadQuestion], None]


def residency_is_nested(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """What the host has of a block is nested: w => g => o."""
    for stage in host.stages:
        for block in stage.blocks:
            model.add_implication(block.weights, block.gradients)
            model.add_implication(block.gradients, block.optimizer)


def activations_are_kept_once(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """Activations on the host are not computed again, and those of embedding and head never: not (a and r)."""
    for stage in host.stages:
        for block, described in zip(stage.blocks, stage.stage.blocks, strict=True):
            model.add_at_most_one(block.activations, block.recompute)
            if described.recomputed_bytes is None:
                model.add(block.recompute == 0)


def slots_hold_the_largest_block(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """A slot is as large as the largest block that goes through it: slot >= bytes[j] if j is streamed."""
    for stage in host.stages:
        for block in stage.blocks:
            price = block.price
            model.add(stage.weights_slot >= mib(price.weights_slot_bytes) * block.weights)
            model.add(stage.gradients_slot >= mib(price.gradients_slot_bytes) * block.gradients)
            model.add(stage.largest_slot >= mib(price.largest_slot_bytes) * block.gradients)
            model.add(stage.landing >= mib(price.host_landing_bytes) * block.gradients)
            model.add(stage.activations_slot >= mib(price.activations_slot_bytes) * block.activations)
            model.add(stage.again >= mib(price.activations_slot_bytes) * block.recompute)
            model.add_implication(block.gradients, stage.sums)


def devices_have_the_memory(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """What stays on a device, the slots and what is there anyway fit: sum_j [W (1 - w) + G (1 - g) + O (1 - o)
    + N A (1 - a - r) + N A' r] + slots + A of the largest r + bucket of any g + other <= capacity."""
    for stage in host.stages:
        held = sum(
            mib(b.price.weights_bytes) * (1 - b.weights)
            + mib(b.price.gradients_bytes) * (1 - b.gradients)
            + mib(b.price.state_bytes) * (1 - b.optimizer)
            + mib(b.price.kept_bytes) * (1 - b.activations - b.recompute)
            + mib(b.price.kept_again_bytes) * b.recompute
            for b in stage.blocks
        )
        slots = WEIGHT_SLOTS * stage.weights_slot + GRADIENT_SLOTS * stage.gradients_slot + stage.largest_slot
        slots += ACTIVATION_SLOTS * stage.activations_slot + mib(stage.stage.bucket_bytes) * stage.sums
        capacity_mib = stage.stage.capacity_bytes // MIB
        model.add(held + slots + stage.again + mib(stage.stage.other_bytes) <= capacity_mib)


def host_has_the_memory(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """What all ranks have on the host fits: sum over ranks, over j [state o + preview (o and s) + sums g + W w + N A a]
    + landing of the largest g <= memory."""
    model.add(host.host_mib() <= question.host.memory_bytes // MIB)


def previews_hold_the_state_twice(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """A block is previewed if its stage does so and the host updates it: o and s => previewed; and only where previews
    are allowed."""
    for stage in host.stages:
        for block in stage.blocks:
            model.add_bool_or(block.optimizer.negated(), stage.speculate.negated(), block.previewed)
        if not question.may_speculate:
            model.add(stage.speculate == 0)


def threads_are_there(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """Every rank has threads of its own: sum_t n[t] = 1, and sum over stages, t of ranks x t n[t] <= threads."""
    for stage in host.stages:
        model.add_exactly_one(stage.threads.values())
    taken = [stage.stage.num_ranks * count * has for stage in host.stages for count, has in stage.threads.items()]
    model.add(sum(taken) <= question.host.threads)


def copies_fit_beside_a_forward(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """A forward lasts as long as its computes, its copies out and its copies in: forward >= sum f, sum A_out a,
    sum W_in w; a step's first one has the gathered weights going out besides."""
    for stage in host.stages:
        computes_us = us(sum(b.price.forward_s for b in stage.blocks))
        out = sum(us(b.price.activations_out_s) * b.activations for b in stage.blocks)
        gathered = sum(us(b.price.gathered_out_s) * b.weights for b in stage.blocks)
        weights_in = sum(us(b.price.forward_weights_s) * b.weights for b in stage.blocks)
        for forward, going_out in ((stage.forward, out), (stage.first_forward, out + gathered)):
            model.add(forward >= computes_us)
            model.add(forward >= going_out)
            model.add(forward >= weights_in)


def copies_fit_beside_a_backward(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """A backward lasts as long as its computes, copies and the host's adding: backward >= sum (b + r),
    sum (G_out + add) g, sum (W_in w + A_in a); a step's last one has summed gradients coming in besides."""
    for stage in host.stages:
        computes: Whole = us(sum(b.price.backward_s for b in stage.blocks))
        computes = computes + sum(us(b.price.recompute_s) * b.recompute for b in stage.blocks)
        coming_in = sum(
            us(b.price.backward_weights_s) * b.weights + us(b.price.activations_in_s) * b.activations
            for b in stage.blocks
        )
        added = sum((us(b.price.gradients_out_s) + us(b.price.add_s)) * b.gradients for b in stage.blocks)
        sums_in = sum(us(b.price.sums_in_s) * b.gradients for b in stage.blocks)
        for backward, all_in in ((stage.backward, coming_in), (stage.last_backward, coming_in + sums_in)):
            model.add(backward >= computes)
            model.add(backward >= added)
            model.add(backward >= all_in)


def activations_are_back_in_time(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """A block's activations go out and come back during N - 1 other microbatches and what is behind the block, or the
    microbatch is late: turn >= A_out + A_in - (N - 1) (sum f + sum (b + r)) - sum_{i>j} (f_i + b_i + r_i), if a_j."""
    for stage in host.stages:
        others = question.in_flight(stage.stage) - 1
        for j, block in enumerate(stage.blocks):
            copied_us = us(block.price.activations_out_s) + us(block.price.activations_in_s)
            times = [(others + (i > j), b) for i, b in enumerate(stage.blocks)]
            behind_s = sum(n * (b.price.forward_s + b.price.backward_s) for n, b in times)
            again = sum(n * us_of_credit(b.price.recompute_s) * b.recompute for n, b in times if n)
            late = copied_us - us_of_credit(behind_s) - again
            model.add(stage.turn >= late).only_enforce_if(block.activations)


def period_lasts_as_long_as_each_stage(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """No stage takes longer per microbatch: period >= forward + backward + turn."""
    for stage in host.stages:
        model.add(host.period >= stage.forward + stage.backward + stage.turn)


def links_are_shared(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """In a period all cards behind a switch copy over its one link: period >= sum over cards of (A_out a + G_out g),
    and of (A_in a + W_in w)."""
    for switch in range(len(question.cards_behind)):
        cards = [stage.stage.cards[switch] for stage in host.stages]
        for copies in (_out, _in):
            model.add(host.period >= sum(n * copies(s) for n, s in zip(cards, host.stages, strict=True) if n))


def _out(stage: StageVars) -> Whole:
    return sum(
        us(b.price.activations_out_s) * b.activations + us(b.price.gradients_out_s) * b.gradients for b in stage.blocks
    )


def _in(stage: StageVars) -> Whole:
    return sum(
        us(b.price.activations_in_s) * b.activations
        + (us(b.price.forward_weights_s) + us(b.price.backward_weights_s)) * b.weights
        for b in stage.blocks
    )


def gradients_arrive_one_by_one(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """The gradients that the host updates by follow one another, in the order of the backward: arrive_j >=
    arrive_{j+1} + G_out o, and arrive_j >= -drain - sum_{i<j} (b_i + r_i) + G_out, if o_j; of what adds up there with
    the adding."""
    for stage in host.stages:
        for block, behind in pairwise(stage.blocks):
            update_out, added_out = us(block.price.update_out_s), us(block.price.added_out_s)
            out = update_out * block.optimizer + (added_out - update_out) * block.gradients
            model.add(block.arrive >= behind.arrive + out)
        before_s = stage.stage.drain_s
        again_before: Whole = 0
        for block in stage.blocks:
            ready = -us_of_credit(before_s) - again_before
            out_s = us(block.price.update_out_s)
            model.add(block.arrive >= ready + out_s).only_enforce_if(block.optimizer, block.gradients.negated())
            model.add(block.arrive >= ready + us(block.price.added_out_s)).only_enforce_if(block.gradients)
            before_s += block.price.backward_s
            again_before = again_before + us_of_credit(block.price.recompute_s) * block.recompute


def updates_start_when_they_may(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """An update starts when its gradient is there, and without a preview when the norm is known, for which the last
    sums on the host have to be there: start_j >= arrive_j; start_j >= nu, if not s; nu >= norm, and >= norm + arrive_j,
    if g_j."""
    for stage in host.stages:
        for block in stage.blocks:
            model.add(block.start >= block.arrive)
            model.add(block.start >= stage.norm).only_enforce_if(stage.speculate.negated())
            model.add(stage.norm >= us(question.norm_s) + block.arrive).only_enforce_if(block.gradients)


def threads_share_the_updates(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """Updates of the blocks up to j take their threads so long: t worked_j >= sum_{i<=j} u_i o_i, if n[t]; of previews
    with their commits, if s."""
    for stage in host.stages:
        direct: Whole = 0
        previewed: Whole = 0
        for block in stage.blocks:
            thread_s = block.price.update_thread_s
            direct = direct + us(thread_s) * block.optimizer
            previewed = previewed + us(question.host.preview_factor * thread_s) * block.optimizer
            for count, has in stage.threads.items():
                model.add(count * block.worked >= direct).only_enforce_if(has)
                model.add(count * block.worked >= previewed).only_enforce_if(has, stage.speculate)


def weights_are_there_when_needed(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """The next step waits until no weight comes too late: wait >= start_j + worked_j + fetch_j - need_j and wait >=
    start_j + sum_{i<=j} in_i + fetch_j - need_j, if o_j, with need_j = fill + sum_{i<j} f_i; fetch_j of weights that
    live on the host."""
    for stage in host.stages:
        need_s = stage.stage.fill_s
        copied: Whole = 0
        for block in stage.blocks:
            update_in, kept_in = us(block.price.update_in_s), us(block.price.kept_in_s)
            copied = copied + update_in * block.optimizer + (kept_in - update_in) * block.weights
            fetched = us(block.price.forward_weights_s) * block.weights
            for taken in (block.worked, copied):
                late = block.start + taken + fetched - us_of_credit(need_s)
                model.add(host.wait >= late).only_enforce_if(block.optimizer)
            need_s += block.price.forward_s


def devices_update_after_the_norm(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """The next step waits for the norm and for the devices' own updates: wait >= nu + sum u_device (1 - o) - fill."""
    for stage in host.stages:
        own = sum(us(b.price.device_update_s) * (1 - b.optimizer) for b in stage.blocks)
        model.add(host.wait >= stage.norm + own - us_of_credit(stage.stage.fill_s))


CONSTRAINTS: tuple[OffloadConstraint, ...] = (
    residency_is_nested,
    activations_are_kept_once,
    slots_hold_the_largest_block,
    devices_have_the_memory,
    host_has_the_memory,
    previews_hold_the_state_twice,
    threads_are_there,
    copies_fit_beside_a_forward,
    copies_fit_beside_a_backward,
    activations_are_back_in_time,
    period_lasts_as_long_as_each_stage,
    links_are_shared,
    gradients_arrive_one_by_one,
    updates_start_when_they_may,
    threads_share_the_updates,
    weights_are_there_when_needed,
    devices_update_after_the_norm,
)


def choices_are_positions(model: cp_model.CpModel, host: HostVars, question: OffloadQuestion) -> None:
    """A plan says by position what goes to the host: o, g and w hold from a block on, to the last; r for the first
    layers; a for all before a block that are not computed again.

    Not in :data:`CONSTRAINTS`: free choices need not be so.
    """
    for stage in host.stages:
        for block, behind in pairwise(stage.blocks):
            model.add_implication(block.optimizer, behind.optimizer)
            model.add_implication(block.gradients, behind.gradients)
            model.add_implication(block.weights, behind.weights)
            model.add_bool_or(behind.activations.negated(), block.activations, block.recompute)
        layers = [
            block
            for block, described in zip(stage.blocks, stage.stage.blocks, strict=True)
            if described.recomputed_bytes is not None
        ]
        for block, behind in pairwise(layers):
            model.add_implication(behind.recompute, block.recompute)
