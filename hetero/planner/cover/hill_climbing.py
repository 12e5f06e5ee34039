"""Looks for better covers next to good ones, among replicas that the template space leaves out: hill climbing.

Templates hold each node type in one block of equal stages. Here one stage at a time is cut in two, joined with its
neighbour, left out, added, resized, moved, or given another tp, and the samples per microbatch are doubled or halved;
layers, recomputation and depths are chosen anew, and so are the replicas' samples. Or one layer moves to another stage.
The best of all such changes is taken as long as one helps, or two in a row do. The answer is a cover like any other;
a heuristic, without a proof that it is the best.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from hetero.planner.cover.cover import Cover, CoverScore, divide_batch, score_cover
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.deadline import Deadline
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.balance import settle
from hetero.planner.replica.boundary_costs import PlacedSlot
from hetero.planner.replica.stage_options import Slot, StageOptionTable
from hetero.planner.replica.templates import Template, TemplateFactory, place_in_order

LEAST_GAIN_OF_CHANGE = 5e-4
"""Relative: a change has to make the step shorter by this much. A heuristic."""

MOST_CLIMBED = 6
"""Covers that are changed, the best first. A heuristic."""

DETOUR, MOST_DETOURS = 1.15, 6
"""Where no change helps, the best so many of those that make the step at most so much longer are changed again."""

FEW_STAGES = 8
"""Replicas with so many stages at most have any two of them exchanged."""

Slots = tuple[Slot, ...]


class HillClimbing:
    """Climbs from covers of one problem, asked once or again and again."""

    def __init__(self, problem: Problem, stage_options: StageOptionTable, sync_tiers: SyncTiers) -> None:
        self._problem = problem
        self._stage_options = stage_options
        self._sync_tiers = sync_tiers
        self._factory = TemplateFactory(problem, stage_options)
        self._known: dict[tuple[Slots, int], Template | None] = {}
        self._found: dict[Cover, CoverScore] = {}
        # Those of which all changes were looked at, or one that helps was taken.
        self._left: set[Cover] = set()
        self._unfinished: list[tuple[Cover, CoverScore]] = []

    def climb(self, covers: Sequence[tuple[Cover, CoverScore]], deadline: Deadline) -> list[tuple[Cover, CoverScore]]:
        """All covers on the way from ``covers`` to where no change helps, the shortest step first, and those of earlier
        calls. What ``deadline`` cuts short is gone on with in the next call."""
        starts, self._unfinished = [*self._unfinished, *covers[:MOST_CLIMBED]], []
        self._found.update(covers)
        for start in starts:
            better: tuple[Cover, CoverScore] | None = start
            while better is not None and better[0] not in self._left and not deadline.ran_out:
                here, better = better, self._better(*better, deadline)
                if better is not None:
                    self._found[better[0]] = better[1]
                if better is not None or not deadline.ran_out:
                    self._left.add(here[0])
                if deadline.ran_out:
                    self._unfinished = [better or here]
        return sorted(self._found.items(), key=lambda item: item[1].step_s)

    def _better(self, cover: Cover, cover_score: CoverScore, deadline: Deadline) -> tuple[Cover, CoverScore] | None:
        """The best cover with a shorter step that is one change away, or two; ``None`` if there is none."""
        enough_s = (1 - LEAST_GAIN_OF_CHANGE) * cover_score.step_s
        changed = self._changed(cover, DETOUR * cover_score.step_s, deadline)
        if changed and changed[0][1].step_s < enough_s:
            return changed[0]
        for once, _ in changed[:MOST_DETOURS]:
            twice = self._changed(once, enough_s, deadline)
            if twice:
                return twice[0]
        return None

    def _changed(self, cover: Cover, limit_s: float, deadline: Deadline) -> list[tuple[Cover, CoverScore]]:
        """All changes of ``cover`` with a step below ``limit_s``, the shortest first."""
        found: dict[Cover, CoverScore] = {}
        for changed in self._changes(cover):
            if deadline.is_over():
                break
            shared = divide_batch(changed, self._problem.global_batch_size, limit_s)
            if shared is not None:
                shared_score = score_cover(shared, self._problem, self._sync_tiers)
                if shared_score.step_s < limit_s and shared_score.milli_price <= self._problem.milli_budget:
                    found[shared] = shared_score
        return sorted(found.items(), key=lambda item: item[1].step_s)

    def _changes(self, cover: Cover) -> Iterator[list[tuple[Template, int]]]:
        """(template, copies) with one template changed; what it takes more is taken from idle devices."""
        used = [
            sum(c.replicas * c.template.devices[node_type.index] for c in cover)
            for node_type in self._problem.node_types
        ]
        for i, copies in enumerate(cover):
            others = [(c.template, c.replicas) for j, c in enumerate(cover) if j != i]
            spare = [
                (k.num_devices - n) // copies.replicas for k, n in zip(self._problem.node_types, used, strict=True)
            ]
            room = [n + more for n, more in zip(copies.template.devices, spare, strict=True)]
            slots = tuple(placed.slot for placed in copies.template.placed_slots)
            samples = copies.template.samples
            for changed in dict.fromkeys(self._neighbours(slots, spare)):
                if (template := self._template(changed, samples, room)) is not None:
                    yield [*others, (template, copies.replicas)]
            for other in (2 * samples, samples // 2):
                if other and (template := self._template(slots, other, room)) is not None:
                    yield [*others, (template, copies.replicas)]
            for template in self._layers_moved(copies.template):
                yield [*others, (template, copies.replicas)]

    def _layers_moved(self, template: Template) -> Iterator[Template]:
        """``template`` with one layer on another stage; in long replicas on a neighbour only."""
        placed_slots, samples = template.placed_slots, template.samples
        layers = [stage.num_layers for stage in template.stages]
        options = [self._stage_options.of(placed.slot, samples) for placed in placed_slots]
        boundary_costs = self._factory.boundary_costs(placed_slots, samples)
        nic_s = self._factory.nic_s(placed_slots, boundary_costs)
        for a, b in itertools.permutations(range(len(placed_slots)), 2):
            if layers[a] > 1 and (len(placed_slots) <= FEW_STAGES or abs(a - b) == 1):
                moved = [n - (s == a) + (s == b) for s, n in enumerate(layers)]
                balanced = settle(options, boundary_costs, layers=moved, nic_s=nic_s)
                if balanced is not None:
                    yield self._factory.template(placed_slots, balanced, samples)

    def _neighbours(self, slots: Slots, spare: Sequence[int]) -> Iterator[Slots]:
        """Every change of the slots of one replica, which may take ``spare`` devices more."""
        yield slots[::-1]
        if len(slots) <= FEW_STAGES:
            for a, b in itertools.combinations(range(len(slots)), 2):
                yield (*slots[:a], slots[b], *slots[a + 1 : b], slots[a], *slots[b + 1 :])
        for s, slot in enumerate(slots):
            before, after = slots[:s], slots[s + 1 :]
            if len(slots) > 1:
                yield before + after
            for other in self._slots(slot.node_type, 1, slot.gpus + spare[slot.node_type]):
                yield (*before, other, *after)
                rest = slot.gpus - other.gpus
                yield from ((*before, other, cut, *after) for cut in self._slots(slot.node_type, rest, rest) if rest)
            if after and after[0].node_type == slot.node_type:
                both = slot.gpus + after[0].gpus
                yield from ((*before, joined, *after[1:]) for joined in self._slots(slot.node_type, both, both))
            for to in range(len(slots)):
                others = before + after
                if to != s:
                    yield (*others[:to], slot, *others[to:])
        for node_type in self._stage_options.usable_node_types:
            for new in self._slots(node_type.index, 1, spare[node_type.index]):
                for s in range(len(slots) + 1):
                    yield (*slots[:s], new, *slots[s:])

    def _slots(self, node_type: int, least: int, most: int) -> Iterator[Slot]:
        """All slots of a node type with a power of two of devices, from ``least`` to ``most``."""
        gpus = 1
        while gpus <= min(most, self._problem.node_types[node_type].gpus_per_node):
            if gpus >= least:
                yield from (Slot(node_type, gpus, tp) for tp in self._stage_options.degrees(gpus))
            gpus *= 2

    def _template(self, slots: Slots, samples: int, room: Sequence[int]) -> Template | None:
        """The balanced template on these slots; ``None`` if it does not fit or takes more than ``room``."""
        key = slots, samples
        if key not in self._known:
            placed_slots = _placed(slots, self._problem.node_types)
            self._known[key] = None if placed_slots is None else self._factory.balanced(placed_slots, samples)
        template = self._known[key]
        if template is None or any(n > most for n, most in zip(template.devices, room, strict=True)):
            return None
        return template


def _placed(slots: Slots, node_types: Sequence[PlannerNodeType]) -> tuple[PlacedSlot, ...] | None:
    """Place the slots one after the other on the nodes of their types; ``None`` if a stage lay across two nodes.

    Of a node type with several nodes a replica takes whole nodes and one half, quarter ... at most: such parts of
    several replicas can be packed without gaps.
    """
    placed_slots = place_in_order(slots, node_types)
    if any(each.offset + each.slot.gpus > node_types[each.slot.node_type].gpus_per_node for each in placed_slots):
        return None
    for node_type in node_types:
        count = sum(slot.gpus for slot in slots if slot.node_type == node_type.index)
        part = count % node_type.gpus_per_node
        halved = (
            part and node_type.gpus_per_node % part == 0 and math.log2(node_type.gpus_per_node // part).is_integer()
        )
        if count > node_type.num_devices or (node_type.count > 1 and part and not halved):
            return None
    return placed_slots
