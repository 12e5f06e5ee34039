"""Decision variables of what goes to the host, in whole MiB and microseconds.

A constraint reads ``block.gradients``, never ``x[17]``.
"""

import math
from collections.abc import Mapping

from ortools.sat.python import cp_model

from hetero.cost.offload.block_prices import BlockPrice, OffloadQuestion
from hetero.cost.offload.blocks import OffloadStage
from hetero.units import MIB, US_PER_S

Whole = cp_model.LinearExpr | int
"""Microseconds or MiB that follow from what is chosen."""

EXACT = 1e-3
"""Of a microsecond: what is that close to a whole one is meant to be it, and was rounded by floating point."""


def us(seconds: float) -> int:
    """Whole microseconds that something takes, rounded up."""
    return math.ceil(seconds * US_PER_S - EXACT)


def us_of_credit(seconds: float) -> int:
    """Whole microseconds of time that is there, rounded down."""
    return math.floor(seconds * US_PER_S + EXACT)


def mib(num_bytes: float) -> int:
    """Whole MiB that something takes, rounded up."""
    return math.ceil(num_bytes / MIB)


class BlockVars:
    """The variables of one block: what of it lives on the host.

    chosen: what of it is on the host, and whether it is computed again, in the order of ``BlockChoice``.
    previewed: its update on the host is, and so the host has its state twice.
    arrive: when the gradient that it is updated by is on the host, or that of the next block behind it there.
    start: when its update can begin.
    worked: what updates up to this block take of the host's threads.
    """

    def __init__(self, model: cp_model.CpModel, name: str, price: BlockPrice, horizon_us: int) -> None:
        self.price = price
        self.optimizer = model.new_bool_var(f"optimizer_{name}")
        self.gradients = model.new_bool_var(f"gradients_{name}")
        self.weights = model.new_bool_var(f"weights_{name}")
        self.activations = model.new_bool_var(f"activations_{name}")
        self.recompute = model.new_bool_var(f"recompute_{name}")
        self.chosen = [self.optimizer, self.gradients, self.weights, self.activations, self.recompute]
        self.previewed = model.new_bool_var(f"previewed_{name}")
        self.arrive = model.new_int_var(-horizon_us, horizon_us, f"arrive_{name}")
        self.start = model.new_int_var(-horizon_us, horizon_us, f"start_{name}")
        self.worked = model.new_int_var(0, horizon_us, f"worked_{name}")


class StageVars:
    """The variables of one stage.

    threads: by number, whether each of its ranks has so many.
    weights_slot, gradients_slot, activations_slot, again: MiB of the largest block that is streamed or computed again.
    largest_slot, landing: MiB of the gradient of the largest weight of these blocks, on the device and on the host.
    sums: gradients of some block add up on the host.
    norm: microseconds from the end of the last backward until the norm is known.
    forward, backward, turn: microseconds of a microbatch; first_forward and last_backward those of a step's ends.
    """

    def __init__(
        self, model: cp_model.CpModel, index: int, stage: OffloadStage, question: OffloadQuestion, horizon_us: int
    ) -> None:
        prices = question.prices[index]
        self.stage = stage
        self.blocks = tuple(BlockVars(model, f"{index}_{j}", price, horizon_us) for j, price in enumerate(prices))
        self.speculate = model.new_bool_var(f"speculate_{index}")
        others = sum(question.cards_behind) - stage.num_ranks
        most = (question.host.threads - others) // stage.num_ranks
        # Threads are of no use to anybody else where the stage has the host alone.
        counts = range(1 if others else most, most + 1)
        self.threads: Mapping[int, cp_model.IntVar] = {
            count: model.new_bool_var(f"threads_{index}_{count}") for count in counts
        }
        slots = [
            (p.weights_slot_bytes, p.activations_slot_bytes, p.largest_slot_bytes, p.host_landing_bytes) for p in prices
        ]
        largest_mib = max(mib(max(sizes)) for sizes in slots)

        def size(name: str) -> cp_model.IntVar:
            return model.new_int_var(0, 2 * largest_mib, f"{name}_{index}")

        def duration(name: str) -> cp_model.IntVar:
            return model.new_int_var(0, horizon_us, f"{name}_{index}")

        self.weights_slot, self.gradients_slot = size("weights_slot"), size("gradients_slot")
        self.activations_slot, self.again = size("activations_slot"), size("again")
        self.largest_slot, self.landing = size("largest_slot"), size("landing")
        self.sums = model.new_bool_var(f"sums_{index}")
        self.norm = model.new_int_var(us(question.norm_s), horizon_us, f"norm_{index}")
        self.forward, self.backward, self.turn = duration("forward"), duration("backward"), duration("turn")
        self.first_forward, self.last_backward = duration("first_forward"), duration("last_backward")


class HostVars:
    """All variables of a question.

    period: microseconds per microbatch of the pipeline.
    wait: from the end of the last backward to the next step's first forward.
    """

    def __init__(self, model: cp_model.CpModel, question: OffloadQuestion) -> None:
        horizon_us = _horizon_us(question)
        self.stages = tuple(
            StageVars(model, index, stage, question, horizon_us) for index, stage in enumerate(question.stages)
        )
        self.period = model.new_int_var(us(question.rest_period_s), horizon_us, "period")
        self.wait = model.new_int_var(0, horizon_us, "wait")

    def decide_in_order(self, model: cp_model.CpModel) -> None:
        """Let the search decide what is chosen, and then set everything that follows from it as low as it can be.

        Without it CP-SAT comes down from a long step microsecond by microsecond.
        """
        chosen: list[cp_model.IntVar] = []
        follow: list[cp_model.IntVar] = []
        for stage in self.stages:
            chosen += [*stage.threads.values(), stage.speculate]
            for block in stage.blocks:
                chosen += block.chosen
                follow += [block.previewed, block.arrive, block.start, block.worked]
            follow += [stage.sums, stage.weights_slot, stage.gradients_slot, stage.activations_slot, stage.again]
            follow += [stage.largest_slot, stage.landing, stage.norm]
            follow += [stage.forward, stage.backward, stage.turn, stage.first_forward, stage.last_backward]
        for variables in (chosen, [*follow, self.period, self.wait]):
            model.add_decision_strategy(variables, cp_model.CHOOSE_FIRST, cp_model.SELECT_MIN_VALUE)

    def step_us(self, question: OffloadQuestion) -> cp_model.LinearExpr:
        """Microseconds of a step."""
        ends = sum(stage.first_forward + stage.last_backward + stage.turn for stage in self.stages)
        return us(question.rest_s) + ends + (question.num_microbatches - 1) * self.period + self.wait

    def host_mib(self) -> Whole:
        """MiB of the host's memory that all ranks take."""
        total: Whole = 0
        for stage in self.stages:
            total = total + stage.stage.num_ranks * _host_mib(stage)
        return total


def _host_mib(stage: StageVars) -> Whole:
    terms: list[cp_model.LinearExpr] = []
    for b in stage.blocks:
        terms += [
            mib(b.price.host_state_bytes) * b.optimizer,
            mib(b.price.host_preview_bytes) * b.previewed,
            mib(b.price.host_sum_bytes) * b.gradients,
            mib(b.price.host_weights_bytes) * b.weights,
            mib(b.price.host_activations_bytes) * b.activations,
        ]
    return sum(terms) + stage.landing


def _horizon_us(question: OffloadQuestion) -> int:
    """More microseconds than anything takes that is worth it."""
    total = question.norm_s + question.rest_s + question.rest_period_s
    for stage, prices in zip(question.stages, question.prices, strict=True):
        total += stage.fill_s + stage.drain_s
        for p in prices:
            computes_s = p.forward_s + p.backward_s + p.recompute_s + p.device_update_s
            weights_s = p.forward_weights_s + p.backward_weights_s + p.gathered_out_s
            gradients_s = p.gradients_out_s + p.sums_in_s + p.add_s
            activations_s = p.activations_out_s + p.activations_in_s
            updates_s = (
                p.update_out_s + p.added_out_s + p.update_in_s + question.host.preview_factor * p.update_thread_s
            )
            copies_s = stage.num_ranks * (weights_s + gradients_s + activations_s)
            total += computes_s + copies_s + updates_s
    # Rounding adds less than a microsecond to each of some tens of terms per block.
    return us(2 * total) + 100 * sum(len(prices) for prices in question.prices)
