"""A lower bound on the step of any plan by the simulator, whatever its replicas, layer cuts and schedules.

A sample passes L layers, an embedding and a head. A *group* is the tp ranks of one tensor-parallel group; in a step of
T seconds it takes n samples through layers of worth omega, where attention and MLP are worth w and 1 - w of a layer. Of
its T seconds it is not at work

    max(u, u_1 + p phi)        before its first forward: until its own weights are updated, and until a sample has come
                               through the p layers before its own; u_1 is the least update of a first stage
    max(p beta + E, sums - H)  after its last backward: until that sample's gradient has gone back through these layers
                               and the embedding's is summed, and until its own gradients are summed but for what the
                               last backward H hides

and at work it takes tau seconds for a layer's worth of a sample. A layer that several nodes hold is summed between
them; one whose samples a single node takes alone is not, but then that node has all B samples of the step for it:

    n omega tau <= T - max(u, u_1 + p phi) - max(p beta + E, sums - H)                   several nodes
    n omega tau <= T - max(u, u_1 + p phi) - p beta - E, and B omega tau tp / G <= that  one node of G devices

E is the sum of the word embedding, during which nobody computes (:mod:`.embedding_sum`).

phi and beta are the least seconds of forward and backward of a layer anywhere, the others those of the device type, the
least over every tp and microbatch that fits. So a device of node type k has at most

    W_k(T, x) = max over tp, microbatch, omega, with p = max(0, x - omega), of  n omega / tp

layers' worth of samples for what lies x layers behind the embedding. What does not hold the whole model receives its
samples over the node's interfaces, which bounds n where the group is all of its node. With
v(x) = max_k W_k(T, x) / W_k(T, 0) and D_k devices, the B samples of the step need

    B r + integral over x of B / v(x)  <=  sum_k D_k W_k(T, 0)

r being what embedding and head are worth at least. The least T for which that holds is below every step.

Where stages may be interleaved, a group that holds several in turns may start with what is near the embedding, and hide
the sums of one stage behind another: then p = 0 and there are no sums but E. Where backwards may be split, weights'
gradients may wait for the end: then there are no p beta and no E. With a distributed optimizer u and u_1 are 0 and
memory is no bound, as ranks may share its state, or leave it to hosts; sums take half as long, and the other half of E,
the gather of the embedding, comes before every forward, however backwards are split.
docs/planner.md has the proof in full.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetero.cost.network import RING_SHARE
from hetero.plan.ir import Recompute
from hetero.planner.cover.embedding_sum import NodeEnds, embedding_sum_s, least_ring_s, links_of_node
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.stage_options import RECOMPUTES, Slot, StageOption, StageOptionTable
from hetero.spec.profile import HALVES
from hetero.units import GB

Floats = NDArray[np.float64]

BISECTIONS = 40
"""Of the step between the bound without pipelines and twice, four times ... of it."""

MOST_POINTS = 64
"""Places between embedding and head, and numbers of layers per group, that are looked at: of deeper models ranges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config:
    """A group of ``tp`` devices of a node type with one microbatch size.

    layer_s: seconds of forward and backward for a layer's worth of one sample, ``tau``.
    worths: what a group may hold, from ``least`` to ``most`` layers' worth; nothing where memory forbids it.
    update_s, sums_s: of the least in each of these ranges.
    backward_s, head_backward_s, embedding_backward_s: of a layer's worth, of the head and of the embedding, of a whole
        microbatch with everything computed again.
    """

    tp: int
    gpus_per_node: int
    layer_s: float
    least: Floats
    most: Floats
    update_s: Floats
    sums_s: Floats
    backward_s: float
    head_backward_s: float
    embedding_backward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _NodeType:
    """What the devices of one node type can do: their configurations, and the least that ends take, device-seconds per
    sample.

    first_update_s: the least update of a first stage.
    node: what a whole node takes for the ends.
    """

    num_devices: int
    configs: tuple[_Config, ...]
    ends_s: float
    forward_s: float
    backward_s: float
    first_update_s: float
    node: NodeEnds

    @property
    def layer_s(self) -> float:
        """Device-seconds of a layer's worth of one sample, ``e_k``."""
        return min(config.tp * config.layer_s for config in self.configs)


def lower_bound_s(problem: Problem) -> float:
    """Seconds that no plan of ``problem`` has a shorter step than by the simulator; 0 if no device holds a layer."""
    bound = _Bound(problem)
    return bound.least_step_s() if bound.node_types else 0.0


class _Bound:
    """Bounds the step of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._stage_options = StageOptionTable(problem, num_gradient_groups=0)
        share = self._share_of_attention()
        unlike: dict[tuple[object, ...], _NodeType | None] = {}
        self.node_types: list[_NodeType] = []
        for node_type in self._stage_options.usable_node_types if share is not None else ():
            bytes_per_s = self._most_bytes_per_s(node_type)
            sum_s = least_ring_s(self._embedding_bytes(), node_type, problem)
            key = node_type.device, node_type.gpus_per_node, node_type.memory_bytes, bytes_per_s, sum_s
            if key not in unlike:
                unlike[key] = self._described(node_type, share or 0.5, bytes_per_s=bytes_per_s, sum_s=sum_s)
            if (known := unlike[key]) is not None:
                self.node_types.append(replace(known, num_devices=node_type.num_devices))

    def least_step_s(self) -> float:
        """The least T of the head of this file."""
        problem = self._problem
        num_layers, batch = problem.model.num_layers, problem.global_batch_size
        ratio = min(node_type.ends_s / node_type.layer_s for node_type in self.node_types)
        speed = sum(node_type.num_devices / node_type.layer_s for node_type in self.node_types)
        self._forward_s = min(node_type.forward_s for node_type in self.node_types)
        self._backward_s = 0.0
        if not problem.splits_backward:
            self._backward_s = min(node_type.backward_s for node_type in self.node_types)
        self._first_update_s = min(node_type.first_update_s for node_type in self.node_types)
        low_s = batch * (num_layers + ratio) / speed
        points = min(2 * num_layers, MOST_POINTS)
        places: Floats = np.arange(points, dtype=np.float64) * (num_layers / points)

        def is_possible(step_s: float) -> bool:
            capacity, reach = 0.0, np.zeros(points)
            idle_s = self._embedding_s(step_s)
            for node_type in self.node_types:
                most = np.zeros(points)
                for config in node_type.configs:
                    most = np.maximum(most, self._work(config, node_type.node, step_s, idle_s, places))
                if most[0] > 0:
                    capacity += node_type.num_devices * float(most[0])
                    reach = np.maximum(reach, most / most[0])
            if not reach.all():
                return False
            return batch * (ratio + float(np.sum(1 / reach)) * num_layers / points) <= capacity

        high_s = low_s
        while not is_possible(high_s):
            low_s, high_s = high_s, 2 * high_s
        for _ in range(BISECTIONS if high_s > low_s else 0):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if is_possible(middle_s) else (middle_s, high_s)
        return low_s

    def _embedding_s(self, step_s: float) -> tuple[float, float]:
        """Seconds at the start and at the end of a step in which nobody computes, as the word embedding is gathered, or
        its gradient summed."""
        problem = self._problem
        whole_s = embedding_sum_s(
            [node_type.node for node_type in self.node_types],
            batch=problem.global_batch_size,
            step_s=step_s,
            tied=problem.model.tied_embeddings,
        )
        if problem.distributed_optimizer:
            # Of fewer bytes in the same rings: gathered are weights, which may be narrower than gradients.
            gathered_s = whole_s / 2 * min(1.0, problem.costs.element_bytes / problem.costs.gradient_bytes)
            return gathered_s, 0.0 if problem.splits_backward else whole_s / 2
        return 0.0, 0.0 if problem.splits_backward else whole_s

    def _work(
        self, config: _Config, node: NodeEnds, step_s: float, idle_s: tuple[float, float], places: Floats
    ) -> Floats:
        """The most layers' worth of samples that a device of a group does in ``step_s``, by what lies where."""
        num_layers, batch = self._problem.model.num_layers, self._problem.global_batch_size
        if self._problem.interleaves:
            before = np.zeros((len(places), len(config.most)))
        else:
            before = np.maximum(0.0, places[:, None] - config.most[None, :])
        left_s = step_s - np.maximum(
            config.update_s[None, :], before * self._forward_s + self._first_update_s + idle_s[0]
        )
        has_head = places[:, None] + config.most[None, :] >= num_layers
        hidden_s = config.most[None, :] * config.backward_s + has_head * config.head_backward_s
        hidden_s = hidden_s + (before <= 0) * config.embedding_backward_s
        sums_s = np.zeros_like(before) if self._problem.interleaves else config.sums_s[None, :] - hidden_s
        drain_s = before * self._backward_s + idle_s[1]
        several_s = left_s - np.maximum(drain_s, sums_s)
        one_s = left_s - drain_s
        # A node receives every sample that it has any part in, unless it computes all of it. A group that is all of its
        # node does so with all layers only.
        most_received = step_s / node.received_s if node.received_s else float("inf")
        is_whole = config.most[None, :] >= num_layers
        share = config.tp / config.gpus_per_node
        of_all_s = batch * share * config.least[None, :] * config.layer_s
        takes_all = (of_all_s <= one_s) & (is_whole | (batch <= most_received + step_s / node.whole_s))
        best = np.maximum(0.0, np.maximum(several_s, np.where(takes_all, one_s, 0.0))) / config.layer_s
        if share == 1:
            best = np.minimum(best, config.most[None, :] * np.where(is_whole, float("inf"), most_received))
        found: Floats = best.max(axis=1) / config.tp
        return found

    def _share_of_attention(self) -> float | None:
        """The attention's worth in a layer: that of the fastest device; ``None`` if no device holds anything."""
        fastest: tuple[float, float] | None = None
        for node_type in self._stage_options.usable_node_types:
            for tp, size in self._shapes(node_type):
                attention_s, mlp_s = (tp * sum(each) / size for each in self._halves_s(node_type, tp, size))
                if fastest is None or attention_s + mlp_s < sum(fastest):
                    fastest = attention_s, mlp_s
        return None if fastest is None else fastest[0] / sum(fastest)

    def _halves_s(self, node_type: PlannerNodeType, tp: int, size: int) -> tuple[tuple[float, float], ...]:
        """Forward and backward of attention and MLP for a whole microbatch."""
        problem = self._problem
        fp8 = problem.computes_in_fp8(node_type.device, tp=tp, micro_batch_size=size)
        found = (
            problem.costs.layer(
                half,
                device=node_type.device,
                tp=tp,
                micro_batch_size=size,
                sequence_parallel=problem.splits_sequence(tp),
                fp8=fp8,
            )
            for half in HALVES
        )
        return tuple((each.forward_s, each.backward_s) for each in found)

    def _shapes(self, node_type: PlannerNodeType) -> Iterator[tuple[int, int]]:
        """Every tp, and the microbatches at one of which the time per sample is least.

        Between two measured microbatches time is a straight line, and so time per sample has its least value at one of
        them or at the largest that fits; how a layer splits into its halves hardly changes between them.
        """
        profile = self._problem.costs.profile_of(node_type.device)
        measured = {time.micro_batch_size for time in profile.times} if profile is not None else set()
        for tp in self._stage_options.legal_tps(node_type.gpus_per_node):
            largest = self._largest_microbatch(Slot(node_type.index, tp, tp))
            yield from ((tp, size) for size in sorted({1, largest, *measured}) if 1 <= size <= largest)

    def _largest_microbatch(self, slot: Slot) -> int:
        """The largest microbatch with which a stage fits, its layers not counted; 0 if not even one sample does.

        With a distributed optimizer nobody knows how little of its state a device may have, so everything fits.
        """
        batch = self._problem.global_batch_size
        if self._problem.distributed_optimizer:
            return batch

        def largest(recompute: Recompute) -> int:
            one, two = (self._stage_options.option(slot, size, recompute) for size in (1, 2))
            base, more = (option.memory.bytes(0, 1, first=False, last=False) for option in (one, two))
            # Bytes are a straight line in the samples, but for rounding: one sample more loses nothing of the bound.
            room = one.capacity_bytes - base
            return 0 if room < 0 else min(2 + int(room / max(1.0, more - base)), batch)

        return max(largest(recompute) for recompute in RECOMPUTES)

    def _embedding_bytes(self) -> int:
        """Bytes of the gradient of the word embedding, but for what rails round down."""
        costs, rounded = self._problem.costs, self._problem.cluster.num_devices
        return max(0, costs.parameter_counts.word_embedding * costs.gradient_bytes - rounded)

    def _most_bytes_per_s(self, node_type: PlannerNodeType) -> float:
        """Bytes per second that come into a node at most, over all of its interfaces; infinite where there is no other
        node."""
        problem = self._problem
        interfaces = problem.cluster.node_types[node_type.index].nics_per_node
        fastest = max((link.most_gb_per_s for link in links_of_node(node_type, problem)), default=float("inf"))
        return interfaces * fastest * GB

    def _described(
        self, node_type: PlannerNodeType, share: float, *, bytes_per_s: float, sum_s: float
    ) -> _NodeType | None:
        """What the devices of ``node_type`` can do, with the links of their nodes; ``None`` if nothing fits."""
        configs, embeddings_s, heads_s, forwards_s, backwards_s, first_updates_s = [], [], [], [], [], []
        costs = self._problem.costs
        sample_bytes = self._problem.seq_length * self._problem.model.hidden_size * costs.element_bytes
        for tp, size in self._shapes(node_type):
            slot = Slot(node_type.index, tp, tp)
            options = [self._stage_options.option(slot, size, recompute) for recompute in RECOMPUTES]
            halves_s = self._halves_s(node_type, tp, size)
            block_forward_s = options[0].layer_s - options[0].backwards_s[0]
            forwards_s.append(min(_per_worth([forward_s for forward_s, _ in halves_s], share), block_forward_s))
            whole_s = options[0].backwards_s[0]
            backwards_s.append(min(_per_worth([backward_s for _, backward_s in halves_s], share), whole_s))
            embeddings_s.append(tp * options[0].embedding_s / size)
            heads_s.append(tp * options[0].head_s / size)
            least, most = self._worths(options, share)
            update_s = [costs.update(half, device=node_type.device, tp=tp)[0] for half in HALVES]
            num_bytes = [costs.parameter_counts.sharded(half) * costs.gradient_bytes / tp for half in HALVES]
            scale = 0.5 if self._problem.distributed_optimizer else 1.0
            first_update_s = update_s[0] + costs.update("embedding", device=node_type.device, tp=tp)[0]
            if self._problem.distributed_optimizer:
                # How little of an update one of many ranks may be left with, nobody knows.
                update_s, first_update_s = [0.0, 0.0], 0.0
            first_updates_s.append(first_update_s)
            configs.append(
                _Config(
                    tp=tp,
                    gpus_per_node=node_type.gpus_per_node,
                    # Halves may have been measured by themselves: then a whole layer may take less than both.
                    layer_s=min(_per_worth([sum(each) / size for each in halves_s], share), options[0].layer_s / size),
                    least=least,
                    most=most,
                    update_s=_of_run(update_s, share, least),
                    sums_s=_of_run([scale * each / (RING_SHARE * bytes_per_s) for each in num_bytes], share, least),
                    backward_s=max(
                        max(option.backwards_s[0] for option in options),
                        _most_per_worth([backward_s for _, backward_s in halves_s], share),
                    ),
                    head_backward_s=max(option.backwards_s[2] for option in options),
                    embedding_backward_s=max(option.backwards_s[1] for option in options),
                )
            )
        if not configs:
            return None
        gpus, layer_s = node_type.gpus_per_node, min(config.tp * config.layer_s for config in configs)
        embedding_s, head_s = min(embeddings_s), min(heads_s)
        return _NodeType(
            num_devices=node_type.num_devices,
            configs=tuple(configs),
            ends_s=embedding_s + head_s,
            forward_s=min(forwards_s),
            backward_s=min(backwards_s),
            first_update_s=min(first_updates_s),
            node=NodeEnds(
                sum_s=sum_s,
                first_s=(embedding_s + share * layer_s) / gpus,
                last_s=(head_s + (1 - share) * layer_s) / gpus,
                whole_s=(embedding_s + self._problem.model.num_layers * layer_s + head_s) / gpus,
                received_s=sample_bytes / bytes_per_s,
            ),
        )

    def _worths(self, options: list[StageOption], share: float) -> tuple[Floats, Floats]:
        """What a group may hold in layers' worth, as far as memory goes: ranges from the least to the most."""
        num_layers = self._problem.model.num_layers
        every = sorted({each for i in range(num_layers) for each in (i + share, i + 1 - share, i + 1.0)})
        held = float(num_layers)
        if not self._problem.distributed_optimizer:
            # A layer more than by the formula of footprints, which takes some too many bytes for small stages.
            held = max(option.most_layers(1, first=False, last=False) for option in options) + 1.0
        every = [each for each in every if each <= held] or every[:1]
        step = -(-len(every) // (3 * MOST_POINTS))
        least, most = every[::step], [every[min(i + step, len(every)) - 1] for i in range(0, len(every), step)]
        return np.array(least), np.array(most)


def _per_worth(halves: list[float], share: float) -> float:
    """The least for a layer's worth of attentions and MLPs, in whatever numbers."""
    return min(halves[0] / share, halves[1] / (1 - share))


def _most_per_worth(halves: list[float], share: float) -> float:
    return max(halves[0] / share, halves[1] / (1 - share))


def _of_run(halves: list[float], share: float, worths: Floats) -> Floats:
    """The least for a run of layers of these worths: there one more attention than MLPs at most, or one less."""
    attention, mlp = halves
    whole = attention + mlp
    excess = max(0.0, share * whole - attention, (1 - share) * whole - mlp)
    found: Floats = np.maximum(worths * _per_worth(halves, share), worths * whole - excess)
    return found
