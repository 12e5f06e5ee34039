"""Lists what one stage may be: a part of a node, cut by tensor and data parallelism, with its price in seconds and
bytes.

Tensor parallelism stays inside a node, so a stage is ``gpus`` devices of one node: ``tp`` x ``dp``.

Where hosts may update, a stage may leave all of its optimizer's state to its host, and where that is too little all of
its gradients, or these and its weights. How much of it is best, and whether updates are previewed, is settled in
finished plans (:mod:`hetero.planner.improve.residency`).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from hetero.cost.cost_model import StageConfig
from hetero.cost.host_memory import of_parameters
from hetero.cost.offload.host_rates import HostRates, host_rates
from hetero.plan.ir import Recompute
from hetero.plan.offload import Offload, OnHost
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.footprint import UNLIMITED, Footprint, Footprints
from hetero.spec.model import ModelSpec
from hetero.spec.profile import ModuleKind

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""In ascending time and descending memory."""

UPDATED_PARTS: tuple[ModuleKind, ...] = ("block", "embedding", "head")
"""The parts of a stage whose updates are priced one by one."""

COMPARED_DEPTHS = (1, 16)
"""Microbatches in flight at which the memory of two options is compared: few, and many. A heuristic."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The devices of one stage: ``gpus`` of one node of type ``node_type``, ``tp`` of which share a layer."""

    node_type: int
    gpus: int
    tp: int

    @property
    def dp(self) -> int:
        return self.gpus // self.tp


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a slot: a microbatch, a recomputation, in fp8 or not, in seconds and bytes.

    layer_s: forward and backward of one block for one microbatch; ``embedding_s`` and ``head_s`` likewise.
    backwards_s: the backward's part of these three.
    updates_s: of the weights of one block, of the embedding, and of the head; on the host it counts until they are
        back on the device.
    on_host: what of all parameters is in the host's memory, which updates them. Copies of gradients and weights count
        where they take longer than the computes of their block.
    host_bytes: what one device takes of its host for these three, nothing else; of ``host_capacity_bytes``.
    """

    micro_batch_size: int
    recompute: Recompute
    fp8: bool
    layer_s: float
    embedding_s: float
    head_s: float
    backwards_s: tuple[float, float, float]
    updates_s: tuple[float, float, float]
    memory: Footprint
    capacity_bytes: int
    on_host: OnHost = OnHost.NOTHING
    host_bytes: tuple[int, int, int] = (0, 0, 0)
    host_capacity_bytes: int = 0

    def seconds(self, num_layers: int, *, first: bool, last: bool) -> float:
        """Seconds of forward and backward of one microbatch, t_s."""
        return num_layers * self.layer_s + first * self.embedding_s + last * self.head_s

    def backward_s(self, num_layers: int, *, first: bool, last: bool) -> float:
        """Seconds of the backward of one microbatch."""
        return num_layers * self.backwards_s[0] + first * self.backwards_s[1] + last * self.backwards_s[2]

    def offload(self, first_layer: int) -> Offload:
        """What a stage from this layer on leaves to its host."""
        return self.on_host.offload(float(first_layer) or -1.0)

    def update_s(self, num_layers: int, *, first: bool, last: bool, fill_s: float = 0.0) -> float:
        """Seconds that the next step waits for the update of the stage's weights.

        On a device that is all of it. A host updates in the order of the forward, whose blocks need their weights one
        after the other: the wait is max over j of sum_{i <= j} u_i - fill - sum_{i < j} f_i, or nothing. Previews,
        which make it less, do not count here.

        fill_s: seconds from the first forward of the pipeline to that of the stage.
        """
        layer_s, embedding_s, head_s = self.updates_s
        if not self.on_host:
            return num_layers * layer_s + first * embedding_s + last * head_s
        forward_s = self.layer_s - self.backwards_s[0]
        updated_s, needed_s = first * embedding_s, fill_s
        waits_s = [updated_s - needed_s]
        needed_s += first * (self.embedding_s - self.backwards_s[1])
        # The lateness of the layers between is on a straight line.
        waits_s.append(updated_s + min(1, num_layers) * layer_s - needed_s)
        updated_s += num_layers * layer_s
        needed_s += num_layers * forward_s
        waits_s.append(updated_s - (needed_s - min(1, num_layers) * forward_s))
        waits_s.append(last * (updated_s + head_s - needed_s))
        return max(0.0, *waits_s)

    def fits(self, num_layers: int, depth: int, *, first: bool, last: bool) -> bool:
        """Whether ``num_layers`` with ``depth`` microbatches in flight stay within the device's memory, and what they
        leave to the host within the device's part of that."""
        return self.memory.bytes(num_layers, depth, first=first, last=last) <= self.capacity_bytes and (
            num_layers <= self._most_layers_of_host(first=first, last=last)
        )

    def most_layers(self, depth: int, *, first: bool, last: bool) -> int:
        """The most layers that fit with ``depth`` microbatches in flight; 0 if none does."""
        on_device = self.memory.most_layers(self.capacity_bytes, depth, first=first, last=last)
        return min(on_device, self._most_layers_of_host(first=first, last=last))

    def deepest(self, num_layers: int, *, first: bool, last: bool) -> int:
        """The most microbatches in flight that fit with ``num_layers``; 0 if not even one does."""
        if num_layers > self._most_layers_of_host(first=first, last=last):
            return 0
        return self.memory.deepest(self.capacity_bytes, num_layers, first=first, last=last)

    def _most_layers_of_host(self, *, first: bool, last: bool) -> int:
        """The most layers of which the host has room for what is left to it."""
        layer, embedding, head = self.host_bytes
        room = self.host_capacity_bytes - first * embedding - last * head
        return int(min(room // layer, UNLIMITED)) if layer else UNLIMITED


class StageOptionTable:
    """Prices the stage options of a problem when they are first asked for.

    Args:
        hosts: the most that stages may leave to hosts that can update.
        only: the node types to use, by their indices; the others idle. ``None`` for all.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        num_gradient_groups: int = 3,
        optimizer_ways: int | None = None,
        hosts: OnHost = OnHost.NOTHING,
        only: frozenset[int] | None = None,
    ) -> None:
        self._problem = problem
        self._optimizer_ways = optimizer_ways
        self._hosts = hosts
        self._only = only
        self._footprints = Footprints(problem, num_gradient_groups=num_gradient_groups, optimizer_ways=optimizer_ways)
        self._known_updates: dict[tuple[str, int, int], tuple[float, float, float]] = {}
        self._single: dict[tuple[Slot, int, Recompute, OnHost], StageOption] = {}
        self._options: dict[tuple[Slot, int], tuple[StageOption, ...]] = {}

    @cached_property
    def on_devices(self) -> "StageOptionTable":
        """The same without hosts."""
        if not self._hosts:
            return self
        table = copy.copy(self)
        table._hosts, table._options = OnHost.NOTHING, {}
        return table

    @cached_property
    def usable_node_types(self) -> tuple[PlannerNodeType, ...]:
        """The node types whose devices have the precision, of those to use."""
        usable, only = self._problem.usable_node_types, self._only
        return tuple(node_type for node_type in usable if only is None or node_type.index in only)

    def degrees(self, gpus: int) -> tuple[int, ...]:
        """Legal tensor-parallel degrees of ``gpus`` devices, ascending."""
        return tuple(tp for tp in self.legal_tps(gpus) if gpus % tp == 0)

    def legal_tps(self, most: int) -> tuple[int, ...]:
        """Every tensor-parallel degree up to ``most`` that the validator lets pass, ascending.

        megatron-core trains experts under tensor parallelism only with sequence parallelism.
        """
        problem = self._problem
        return tuple(
            tp
            for tp in range(1, most + 1)
            if divides(problem.model, tp)
            and (tp == 1 or problem.model.num_experts is None or problem.splits_sequence(tp))
        )

    def of(self, slot: Slot, samples: int) -> tuple[StageOption, ...]:
        """The options of ``slot`` for microbatches of ``samples``, fastest first; empty if dp does not divide them.

        An option that is neither faster nor smaller than another is left out. Of equally fast ones the first has its
        optimizer's state on the device.
        """
        key = slot, samples
        if key not in self._options:
            found: list[StageOption] = []
            if samples % slot.dp == 0:
                for option in self.every(slot, samples // slot.dp):
                    if not any(_dominates(other, option, self._problem.model.num_layers) for other in found):
                        found.append(option)
            self._options[key] = tuple(sorted(found, key=lambda option: option.layer_s))
        return self._options[key]

    def _updates(self, device: str, slot: Slot) -> tuple[float, float, float]:
        """Of a block, the embedding and the head; what other replicas update of it is not known here."""
        key = device, slot.tp, slot.dp if self._problem.distributed_optimizer else 1
        if key not in self._known_updates:
            block, embedding, head = (
                self._problem.costs.update(part, device=device, tp=slot.tp)[0] / key[2] for part in UPDATED_PARTS
            )
            self._known_updates[key] = block, embedding, head
        return self._known_updates[key]

    def every(self, slot: Slot, micro_batch_size: int) -> Iterator[StageOption]:
        """All options of a slot and a microbatch, dominated or not, those with everything on the device first."""
        most = self._hosts if self._problem.node_types[slot.node_type].host_bytes > 0 else OnHost.NOTHING
        for on_host in OnHost:
            for recompute in RECOMPUTES if on_host <= most else ():
                yield self.option(slot, micro_batch_size, recompute, on_host=on_host)

    def option(
        self, slot: Slot, micro_batch_size: int, recompute: Recompute, *, on_host: OnHost = OnHost.NOTHING
    ) -> StageOption:
        """One option by itself, dominated or not."""
        key = slot, micro_batch_size, recompute, on_host
        if key not in self._single:
            option = self._priced(slot, micro_batch_size, recompute)
            self._single[key] = self._left_to_host(option, slot, on_host) if on_host else option
        return self._single[key]

    def _left_to_host(self, option: StageOption, slot: Slot, on_host: OnHost) -> StageOption:
        """The same option with that of all its parameters on the host."""
        problem, node_type = self._problem, self._problem.node_types[slot.node_type]
        costs, device_type = problem.costs, problem.cluster.device_types.of(node_type.device)
        rates = host_rates(problem.cluster.node_types[slot.node_type])
        updates_s, host_bytes, landing_bytes = [], [], 0
        for part in UPDATED_PARTS:
            numel = costs.parameter_counts.per_rank(part, slot.tp)
            owned = numel / (self._optimizer_ways or slot.dp)
            # Weights follow chunk by chunk, at their own rate.
            updates_s.append(max(rates.update_s(owned), rates.in_s(costs.element_bytes * owned)))
            taken = of_parameters(owned, costs, device_type, speculates=False)
            if on_host >= OnHost.GRADIENTS:
                taken = replace(taken, gradients=costs.gradient_bytes * numel)
                largest = costs.parameter_counts.largest(part, slot.tp)
                landing_bytes = max(landing_bytes, costs.gradient_bytes * largest)
            if on_host >= OnHost.WEIGHTS:
                taken = replace(taken, weights=costs.element_bytes * numel)
            host_bytes.append(taken.total)
        forwards_s, backwards_s = self._beside_copies(option, slot, on_host, rates)
        layer_s, embedding_s, head_s = (f + b for f, b in zip(forwards_s, backwards_s, strict=True))
        return replace(
            option,
            layer_s=layer_s,
            embedding_s=embedding_s,
            head_s=head_s,
            backwards_s=(backwards_s[0], backwards_s[1], backwards_s[2]),
            updates_s=(updates_s[0], updates_s[1], updates_s[2]),
            memory=self._footprints.of(
                device=node_type.device,
                tp=slot.tp,
                dp=slot.dp,
                micro_batch_size=option.micro_batch_size,
                recompute=option.recompute,
                on_host=on_host,
            ),
            on_host=on_host,
            host_bytes=(host_bytes[0], host_bytes[1], host_bytes[2]),
            host_capacity_bytes=node_type.host_bytes - landing_bytes,
        )

    def _beside_copies(
        self, option: StageOption, slot: Slot, on_host: OnHost, rates: HostRates
    ) -> tuple[list[float], list[float]]:
        """Seconds of the forwards and of the backwards of a block, the embedding and the head.

        Each lasts as long as its own copies at least. Blocks before and behind it may take some of them over, but
        between alike layers none has anything to spare.
        """
        costs = self._problem.costs
        whole_s = option.layer_s, option.embedding_s, option.head_s
        forwards_s, backwards_s = [], []
        for part, block_s, backward_s in zip(UPDATED_PARTS, whole_s, option.backwards_s, strict=True):
            numel, forward_s = costs.parameter_counts.per_rank(part, slot.tp), block_s - backward_s
            if on_host >= OnHost.GRADIENTS:
                out_bytes, sum_bytes = costs.element_bytes * numel, costs.gradient_bytes * numel
                backward_s = max(backward_s, rates.add_s(out_bytes, sum_bytes=sum_bytes))
            if on_host >= OnHost.WEIGHTS:
                fetch_s = rates.in_s(costs.element_bytes * numel)
                forward_s = max(forward_s, fetch_s)
                # A backward of the embedding needs no weights.
                backward_s = max(backward_s, fetch_s if part != "embedding" else 0.0)
            forwards_s.append(forward_s)
            backwards_s.append(backward_s)
        return forwards_s, backwards_s

    def _priced(self, slot: Slot, micro_batch_size: int, recompute: Recompute) -> StageOption:
        node_type = self._problem.node_types[slot.node_type]
        costs = self._problem.costs
        splits_sequence = self._problem.splits_sequence(slot.tp)
        embedding, head = (
            costs.layer(
                part,
                device=node_type.device,
                tp=slot.tp,
                micro_batch_size=micro_batch_size,
                sequence_parallel=splits_sequence,
            )
            for part in ("embedding", "head")
        )
        embedding_s = embedding.forward_s + embedding.backward_s
        head_s = head.forward_s + head.backward_s
        # The first layer alone; in a model of one layer the head is with it.
        fp8 = self._problem.computes_in_fp8(node_type.device, tp=slot.tp, micro_batch_size=micro_batch_size)
        config = StageConfig(
            node_type.device, 0, 1, slot.tp, micro_batch_size, splits_sequence, recompute=recompute, fp8=fp8
        )
        first = costs.stage(config)
        return StageOption(
            micro_batch_size=micro_batch_size,
            recompute=recompute,
            fp8=fp8,
            layer_s=first.microbatch_s - embedding_s - head_s * (self._problem.model.num_layers == 1),
            embedding_s=embedding_s,
            head_s=head_s,
            backwards_s=(
                first.backward_s - embedding.backward_s - head.backward_s * (self._problem.model.num_layers == 1),
                embedding.backward_s,
                head.backward_s,
            ),
            updates_s=self._updates(node_type.device, slot),
            memory=self._footprints.of(
                device=node_type.device,
                tp=slot.tp,
                dp=slot.gpus // slot.tp,
                micro_batch_size=micro_batch_size,
                recompute=recompute,
            ),
            capacity_bytes=node_type.memory_bytes,
        )


def _dominates(a: StageOption, b: StageOption, num_layers: int) -> bool:
    """Whether ``a`` is neither slower nor larger than ``b``; memory is compared at a few points, which is a
    heuristic."""
    return (
        a.layer_s <= b.layer_s
        and a.on_host <= b.on_host
        and all(
            a.memory.bytes(layers, depth, first=False, last=False)
            <= b.memory.bytes(layers, depth, first=False, last=False)
            for layers in (1, num_layers)
            for depth in COMPARED_DEPTHS
        )
    )


def divides(model: ModelSpec, tp: int) -> bool:
    """Whether ``tp`` divides every dimension of ``model`` that tensor parallelism cuts."""
    cut = [model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size, model.padded_vocab_size]
    if model.moe_ffn_hidden_size is not None:
        cut.append(model.moe_ffn_hidden_size)
    return all(size % tp == 0 for size in cut)
