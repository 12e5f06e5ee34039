"""Enumerates the template space: the replica templates that a cover may use.

Blocks cover whole nodes, up to a number per replica that grows with the model's memory; in small clusters also a half,
a quarter ... of one node. Replicas mix up to ``MOST_NODE_TYPES`` node types, each in one block, in any order; with tied
embeddings the first node type may come back at the end. Replicas that divide the cluster evenly are looked at first.

Within a node type and a size, blocks that another one beats in speed, in memory and in number of stages are left out,
and so are templates that another one with the same devices and the same cuts between node types beats in fill, in
period and in update. The more node types there are, the fewer sizes, blocks and cuts of each mixture are kept, so that
the space stays at some hundreds of templates. These numbers are heuristics: the bound of a search is on covers by the
templates of the space, and says nothing of others.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero.planner.deadline import Deadline
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.stage_options import StageOption, StageOptionTable
from hetero.planner.replica.templates import StageBlock, Template, TemplateFactory

MOST_NODE_TYPES = 3
"""In one replica."""

MOST_STAGES = 24
"""In one replica."""

MOST_NODES, MOST_PROPORTIONS = 24, {2: 5, 3: 2}
"""Of replicas that take equal parts of the nodes of so many node types: nodes of one replica, and how many such
parts."""

SMALL_CLUSTER = 32
"""Devices up to which a replica may take a part of a node: beyond, equal parts are data parallelism in a stage."""

BLOCKS_PER_SIZE = {1: 24, 2: 5, 3: 2}
"""Blocks of one node type and size that go into replicas of so many node types; fewer in clusters of many node
types."""

MOST_NODES_MIXED = {1: 10**6, 2: 4, 3: 2}
"""Nodes of one node type in replicas of so many node types, unless the model asks for more."""

CUTS = {1: 12, 2: 10, 3: 4}
"""Templates with the same devices in the same order that are kept in a cluster of so many node types; 2 beyond."""

FEW_DEVICES, CUTS_OF_FEW = 8, 16
"""In clusters of so many devices at most, so many are kept however many node types there are: a small batch has to be
divided among unequal replicas exactly, for which slower ones with smaller microbatches are of use."""

MOST_BUILT, MEDIUM_CLUSTER = 1000, 256
"""Replicas of three node types or more that are looked at in clusters of so many devices at most, what matters most
first: with more of them the proofs there take longer than the plans get better. In larger ones they do get better."""

FIRST_BLOCKS = 2
"""Of one node type, size and microbatch that go into a first plan: the fastest, and the one with the fewest stages."""

NOMINAL_SAMPLES = 64
"""Samples of a replica at which templates are compared by fill and period together."""

SAMPLES = (1, 2, 4, 8, 16, 32)
"""Samples per microbatch of a replica."""

LEAST_EFFICIENCY = 0.7
"""Templates with less than this share of what their devices reach in the best templates of one node type are left
out."""


@dataclass(frozen=True, slots=True)
class _Rated:
    """A block of stages at some number of samples per microbatch, with what pruning compares.

    layers_per_s: layers of microbatches per second if it never waits.
    most_layers: that its memory holds; ``most_layers_fast`` without recomputation.
    """

    block: StageBlock
    layers_per_s: float
    most_layers: int
    most_layers_fast: int

    def beats(self, other: "_Rated") -> bool:
        return (
            self.layers_per_s >= other.layers_per_s
            and self.most_layers >= other.most_layers
            and self.most_layers_fast >= other.most_layers_fast
            and self.block.num_stages <= other.block.num_stages
        )


_Combination = tuple[tuple[StageBlock, ...], int]
"""The blocks of a template, and the samples of its microbatches."""

_Mixture = tuple[tuple[tuple[PlannerNodeType, int], ...], int]
"""The (node type, devices) of a replica, and how many blocks of each to look at."""


class TemplateSpace:
    """Enumerates the templates of one problem."""

    def __init__(self, problem: Problem, stage_options: StageOptionTable) -> None:
        self._problem = problem
        self._stage_options = stage_options
        # A faster stage may be the one that leaves nothing to its host and computes again instead.
        tables = dict.fromkeys((stage_options, stage_options.on_devices))
        self._factories = tuple(TemplateFactory(problem, table) for table in tables)
        self._blocks: dict[tuple[int, int], dict[int, list[_Rated]]] = {}
        self._left: Iterator[_Combination | None] = self._combinations()
        self._num_built = 0
        self._found: list[Template] = []
        # Of one node type, the samples per second and device of the best template.
        self._best_rates: dict[int, float] = defaultdict(float)
        self.is_complete = False

    def templates(self, deadline: Deadline) -> list[Template]:
        """All templates of the space that are not dominated, in a fixed order.

        When ``deadline`` runs out, the mixtures that were not looked at are missing, and ``is_complete`` is false;
        asked again, it goes on with these.
        """
        usable = self._stage_options.usable_node_types
        is_medium = SMALL_CLUSTER < self._problem.cluster.num_devices <= MEDIUM_CLUSTER and len(usable) > 2
        while not self.is_complete and not deadline.glance():
            try:
                combination = next(self._left)
            except StopIteration:
                self.is_complete = True
                break
            if combination is None:
                continue
            if is_medium and self._num_built == MOST_BUILT:
                self.is_complete = True
            elif deadline.is_over():
                self._left = itertools.chain((combination,), self._left)
            else:
                self._num_built += 1
                self._build(*combination)
        most = CUTS_OF_FEW if self._problem.cluster.num_devices <= FEW_DEVICES else CUTS.get(len(usable), 2)
        return _fewest_cuts(undominated(self._found), most)

    def _build(self, blocks: tuple[StageBlock, ...], samples: int) -> None:
        """Build the templates with these blocks, and keep those that are fast enough."""
        best = self._best_rates
        least_rate = LEAST_EFFICIENCY * sum(block.num_devices * best[block.node_type] for block in blocks)
        for template in dict.fromkeys(each.build(blocks, samples, least_rate=least_rate) for each in self._factories):
            if template is not None and template.rate >= least_rate:
                self._found.append(template)
                if len(blocks) == 1:
                    node_type = blocks[0].node_type
                    best[node_type] = max(best[node_type], template.rate / template.devices[node_type])

    def of_one_node_type(self) -> Iterator[Template | None]:
        """Replicas on one node type each, of all node types in turn, the smallest first; ``None`` for one that does not
        fit."""
        for round_ in itertools.zip_longest(
            *(self._sizes(node_type, 1) for node_type in self._stage_options.usable_node_types)
        ):
            for samples in SAMPLES:
                for node_type, size in zip(self._stage_options.usable_node_types, round_, strict=True):
                    if size is None or samples > self._problem.global_batch_size:
                        continue
                    blocks = [rated.block for rated in self._rated(node_type, size, samples)[:FIRST_BLOCKS]]
                    for block in blocks:
                        if block.num_stages <= self._problem.model.num_layers:
                            yield self._factories[0].build((block,), samples)
                    if not blocks:
                        yield None

    def _combinations(self) -> Iterator[_Combination | None]:
        """Blocks and samples of all templates, what matters most first, so that a search that is cut short has seen it:
        replicas of one node type, then those that leave no device over, then all other mixtures. ``None`` stands for a
        round of listing, so that the deadline is looked at where most of what is listed is no template."""
        seen = set()
        usable = len(self._stage_options.usable_node_types)
        for mixture in itertools.chain(
            self._mixed_sizes(1),
            self._proportional_sizes(),
            *map(self._mixed_sizes, range(2, usable + 1)[: MOST_NODE_TYPES - 1]),
        ):
            if mixture is None:
                yield None
                continue
            sizes, most_blocks = mixture
            for samples in SAMPLES:
                if samples > self._problem.global_batch_size:
                    break
                choices = [[rated.block for rated in self._rated(k, n, samples)[:most_blocks]] for k, n in sizes]
                yield None
                for blocks in itertools.product(*choices):
                    if sum(block.num_stages for block in blocks) > min(MOST_STAGES, self._problem.model.num_layers):
                        continue
                    for order in self._orders(blocks):
                        if (order, samples) not in seen:
                            seen.add((order, samples))
                            yield order, samples

    def _mixed_sizes(self, num_node_types: int) -> Iterator[_Mixture | None]:
        """Every mixture of ``num_node_types`` node types, and ``None`` between them."""
        many = len(self._stage_options.usable_node_types) > 2
        most_blocks = 3 if num_node_types == 2 and many else BLOCKS_PER_SIZE[num_node_types]
        for chosen in itertools.combinations(self._stage_options.usable_node_types, num_node_types):
            yield None
            for sizes in itertools.product(*(self._sizes(node_type, num_node_types) for node_type in chosen)):
                yield tuple(zip(chosen, sizes, strict=True)), most_blocks

    def _proportional_sizes(self) -> Iterator[_Mixture | None]:
        """The mixtures that take an equal part of every node, or of all nodes of each of their types, and ``None``
        between them."""
        usable = self._stage_options.usable_node_types
        for num_node_types in range(min(len(usable), MOST_NODE_TYPES), 1, -1):
            most_blocks = BLOCKS_PER_SIZE[num_node_types] if len(usable) < 3 else 3 if num_node_types == 2 else 2
            for chosen in itertools.combinations(usable, num_node_types):
                yield None
                found: dict[tuple[int, ...], None] = {}
                if self._problem.cluster.num_devices <= SMALL_CLUSTER and all(
                    node_type.count == 1 for node_type in chosen
                ):
                    for parts in (2, 4, 8):
                        if all(node_type.gpus_per_node % parts == 0 for node_type in chosen):
                            found[tuple(node_type.gpus_per_node // parts for node_type in chosen)] = None
                for copies in range(min(node_type.count for node_type in chosen), 0, -1):
                    nodes = [node_type.count // copies for node_type in chosen]
                    if sum(nodes) <= MOST_NODES:
                        found[
                            tuple(n * node_type.gpus_per_node for n, node_type in zip(nodes, chosen, strict=True))
                        ] = None
                large = [sizes for sizes in found if self._may_hold_the_model(chosen, sizes)]
                for sizes in large[: MOST_PROPORTIONS[num_node_types]]:
                    yield tuple(zip(chosen, sizes, strict=True)), most_blocks

    def _may_hold_the_model(self, node_types: Sequence[PlannerNodeType], sizes: Sequence[int]) -> bool:
        """Whether the best blocks of these sizes have memory for all layers."""
        most = sum(
            max((rated.most_layers for rated in self._rated(node_type, size, 1)), default=0)
            for node_type, size in zip(node_types, sizes, strict=True)
        )
        return most >= self._problem.model.num_layers

    def _orders(self, blocks: tuple[StageBlock, ...]) -> Iterator[tuple[StageBlock, ...]]:
        """Every order of ``blocks``; with tied embeddings also with the first and the last stages on one node type.

        Embedding and head are then copies of one matrix, whose gradients would else be summed between nodes.
        """
        for order in itertools.permutations(blocks):
            yield order
            outer = order[0]
            if len(blocks) > 1 and self._problem.model.tied_embeddings:
                for stages in sorted({outer.num_stages // 2, outer.num_stages - 1} & set(range(1, outer.num_stages))):
                    back = replace(outer, num_stages=outer.num_stages - stages)
                    yield replace(outer, num_stages=stages), *order[1:], back

    def _sizes(self, node_type: PlannerNodeType, num_node_types: int) -> list[int]:
        """How many devices of ``node_type`` a replica of ``num_node_types`` node types may take."""
        per_node = node_type.gpus_per_node
        sizes = []
        if self._problem.cluster.num_devices <= SMALL_CLUSTER:
            part = per_node
            while part % 2 == 0:
                part //= 2
                sizes.append(part)
        needed = self._most_nodes(node_type)
        nodes = min(node_type.count, needed, max(MOST_NODES_MIXED[num_node_types], needed // num_node_types))
        steps = [m for m in range(1, nodes + 1) if m in (1, 2, 3, 4, nodes) or m % 4 == 0]
        return sorted(sizes) + [m * per_node for m in steps]

    def _most_nodes(self, node_type: PlannerNodeType) -> int:
        """The most nodes of one replica: twice as many as hold weights, gradients and optimizer state, and four at
        least; a heuristic."""
        block = self._stage_options.of(StageBlock(node_type.index, 1, 1, 1).slot, 1)
        if not block:
            return 4
        static = block[-1].memory.cases[0].per_layer * self._problem.model.num_layers
        return max(4, 2 * math.ceil(static / (node_type.memory_bytes * node_type.gpus_per_node)))

    def _rated(self, node_type: PlannerNodeType, size: int, samples: int) -> list[_Rated]:
        """The undominated blocks of ``size`` devices: the fastest, the one with the fewest stages, then by speed."""
        by_samples = self._blocks.setdefault((node_type.index, size), {})
        if samples not in by_samples:
            rated = [
                each for block in self._blocks_of(node_type, size) if (each := self._rate(block, samples)) is not None
            ]
            rated.sort(key=lambda each: (-each.layers_per_s, each.block))
            kept: list[_Rated] = []
            for each in rated:
                if not any(other.beats(each) for other in kept):
                    kept.append(each)
            # The fastest and the shortest, which fills fastest, come first.
            shortest = min(kept, key=lambda each: each.block.num_stages, default=None)
            by_samples[samples] = sorted(kept, key=lambda each: each is not kept[0] and each is not shortest)
        return by_samples[samples]

    def _blocks_of(self, node_type: PlannerNodeType, size: int) -> Iterator[StageBlock]:
        """Every way to divide ``size`` devices into equal stages."""
        inside = min(size, node_type.gpus_per_node)
        for gpus in (g for g in range(1, inside + 1) if inside % g == 0):
            for tp in self._stage_options.degrees(gpus):
                yield StageBlock(node_type.index, size // gpus, gpus, tp)

    def _rate(self, block: StageBlock, samples: int) -> _Rated | None:
        """Rate a block; ``None`` if it cannot hold a layer of such microbatches."""
        options = self._stage_options.of(block.slot, samples)
        if not options or block.num_stages > self._problem.model.num_layers:
            return None

        def most_layers(choices: Sequence[StageOption]) -> int:
            return sum(
                max(option.most_layers(block.num_stages - s, first=False, last=False) for option in choices)
                for s in range(block.num_stages)
            )

        most = most_layers(options)
        if most == 0:
            return None
        return _Rated(block, block.num_stages / options[0].layer_s, most, most_layers(options[:1]))


def undominated(templates: Sequence[Template]) -> list[Template]:
    """Drop templates that another one with the same devices, cuts and no more samples per microbatch beats in time."""
    groups: dict[object, list[Template]] = defaultdict(list)
    for template in templates:
        groups[template.devices, template.cuts].append(template)
    return [template for group in groups.values() for template in _pareto(group)]


def _fewest_cuts(templates: Sequence[Template], most: int) -> list[Template]:
    """Keep ``most`` of the templates with the same devices in the same order of node types: those with the shortest
    periods and fills."""
    groups: dict[object, list[Template]] = defaultdict(list)
    for template in templates:
        groups[template.devices, tuple(node_type for node_type, _, _ in template.cuts)].append(template)
    kept = []
    for group in groups.values():
        by_period = sorted(group, key=lambda t: (t.period_s / t.samples, t.fill_s))
        by_fill = sorted(group, key=lambda t: (t.fill_s + NOMINAL_SAMPLES / t.samples * t.period_s, t.samples))
        ordered = dict.fromkeys(itertools.chain.from_iterable(zip(by_fill, by_period, strict=True)))
        kept += list(ordered)[:most]
    return kept


def _pareto(group: Sequence[Template]) -> list[Template]:
    """Keep what no other beats."""
    kept: list[Template] = []
    for template in sorted(group, key=lambda t: (t.period_s / t.samples, t.fill_s, t.samples)):
        if not any(_beats(other, template) for other in kept):
            kept.append(template)
    return kept


def _beats(a: Template, b: Template) -> bool:
    """``a`` takes any number of samples in no more time than ``b`` needs for it, its nodes' layers left aside."""
    return (
        a.samples <= b.samples
        and a.period_s / a.samples <= b.period_s / b.samples
        and a.fill_s + a.update_s + (b.samples / a.samples - 1) * a.period_s <= b.fill_s + b.update_s
    )
