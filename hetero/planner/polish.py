"""Better covers next to good ones, among replicas that the template space leaves out.

Templates hold each kind in one block of equal stages. Here one stage at a time is cut in two, joined with its
neighbour, left out, added, resized, moved, or given another tp, and the samples per microbatch are doubled or halved;
layers, recomputation and depths are chosen anew, and so are the replicas' samples. Or one layer moves to another stage.
The best of all such changes is taken as long as one helps, or two in a row do. The answer is a cover like any other;
there is no proof that it is the best.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from hetero.planner.balance import settle
from hetero.planner.boundaries import Seat
from hetero.planner.candidates import Candidates, Slot
from hetero.planner.clock import Clock
from hetero.planner.constraints import milli_price
from hetero.planner.cover import Copies, Cover, Score, score
from hetero.planner.problem import NodeKind, Problem
from hetero.planner.rings import Rings
from hetero.planner.templates import Template, TemplateFactory

ENOUGH = 0.9995
"""A change has to make the step shorter by this factor."""

MOST_STARTS = 6
"""Covers that are changed, the best first."""

DETOUR, MOST_DETOURS = 1.15, 6
"""Where no change helps, the best so many of those that make the step at most so much longer are changed again."""

FEW_STAGES = 8
"""Replicas with so many stages at most have any two of them exchanged."""

Slots = tuple[Slot, ...]


class Polish:
    """Changes covers of one problem."""

    def __init__(self, problem: Problem, candidates: Candidates, rings: Rings, clock: Clock) -> None:
        self._problem = problem
        self._candidates = candidates
        self._rings = rings
        self._clock = clock
        self._factory = TemplateFactory(problem, candidates)
        self._known: dict[tuple[Slots, int], Template | None] = {}
        self._reached: set[Cover] = set()

    def polished(self, covers: Sequence[tuple[Cover, Score]]) -> list[tuple[Cover, Score]]:
        """``covers`` and what they become, the shortest step first."""
        found = dict(covers)
        for start in covers[:MOST_STARTS]:
            better: tuple[Cover, Score] | None = start
            while better is not None and better[0] not in self._reached:
                self._reached.add(better[0])
                found[better[0]] = better[1]
                better = self._better(*better)
        return sorted(found.items(), key=lambda item: item[1].step_s)

    def _better(self, cover: Cover, cover_score: Score) -> tuple[Cover, Score] | None:
        """A cover with a shorter step, one change away or two; ``None`` if there is none."""
        enough_s = ENOUGH * cover_score.step_s
        changed = self._changed(cover, DETOUR * cover_score.step_s)
        if changed and changed[0][1].step_s < enough_s:
            return changed[0]
        for once, _ in changed[:MOST_DETOURS]:
            twice = self._changed(once, enough_s)
            if twice:
                return twice[0]
        return None

    def _changed(self, cover: Cover, limit_s: float) -> list[tuple[Cover, Score]]:
        """All changes of ``cover`` with a step below ``limit_s``, the shortest first."""
        found: dict[Cover, Score] = {}
        for changed in self._changes(cover):
            if self._clock.is_over():
                break
            shared = shared_anew(changed, self._problem.global_batch_size, limit_s)
            if shared is not None and self._within_budget(shared):
                shared_score = score(shared, self._problem, self._rings)
                if shared_score.step_s < limit_s:
                    found[shared] = shared_score
        return sorted(found.items(), key=lambda item: item[1].step_s)

    def _within_budget(self, cover: Cover) -> bool:
        budget = self._problem.budget_per_hour
        spent = sum(copies.replicas * milli_price(copies.template, self._problem) for copies in cover)
        return budget is None or spent <= int(budget * 1000)

    def _changes(self, cover: Cover) -> Iterator[list[tuple[Template, int]]]:
        """(template, copies) with one template changed; what it takes more is taken from idle devices."""
        used = [sum(c.replicas * c.template.devices[kind.index] for c in cover) for kind in self._problem.kinds]
        for i, copies in enumerate(cover):
            others = [(c.template, c.replicas) for j, c in enumerate(cover) if j != i]
            spare = [(k.num_devices - n) // copies.replicas for k, n in zip(self._problem.kinds, used, strict=True)]
            room = [n + more for n, more in zip(copies.template.devices, spare, strict=True)]
            slots = tuple(seat.slot for seat in copies.template.seats)
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
        seats, samples = template.seats, template.samples
        layers = [share.num_layers for share in template.shares]
        options = [self._candidates.options(seat.slot, samples) for seat in seats]
        crossings = self._factory.crossings(seats, samples)
        port_s = self._factory.port_s(seats, crossings)
        for a, b in itertools.permutations(range(len(seats)), 2):
            if layers[a] > 1 and (len(seats) <= FEW_STAGES or abs(a - b) == 1):
                moved = [n - (s == a) + (s == b) for s, n in enumerate(layers)]
                balanced = settle(options, crossings, layers=moved, port_s=port_s)
                if balanced is not None:
                    yield self._factory.template(seats, balanced, samples)

    def _neighbours(self, slots: Slots, spare: Sequence[int]) -> Iterator[Slots]:
        yield slots[::-1]
        if len(slots) <= FEW_STAGES:
            for a, b in itertools.combinations(range(len(slots)), 2):
                yield (*slots[:a], slots[b], *slots[a + 1 : b], slots[a], *slots[b + 1 :])
        for s, slot in enumerate(slots):
            before, after = slots[:s], slots[s + 1 :]
            if len(slots) > 1:
                yield before + after
            for other in self._slots(slot.kind, 1, slot.gpus + spare[slot.kind]):
                yield (*before, other, *after)
                rest = slot.gpus - other.gpus
                yield from ((*before, other, cut, *after) for cut in self._slots(slot.kind, rest, rest) if rest)
            if after and after[0].kind == slot.kind:
                both = slot.gpus + after[0].gpus
                yield from ((*before, joined, *after[1:]) for joined in self._slots(slot.kind, both, both))
            for to in range(len(slots)):
                others = before + after
                if to != s:
                    yield (*others[:to], slot, *others[to:])
        for kind in self._candidates.usable_kinds:
            for new in self._slots(kind.index, 1, spare[kind.index]):
                for s in range(len(slots) + 1):
                    yield (*slots[:s], new, *slots[s:])

    def _slots(self, kind: int, least: int, most: int) -> Iterator[Slot]:
        """All slots of a kind with a power of two of devices, from ``least`` to ``most``."""
        gpus = 1
        while gpus <= min(most, self._problem.kinds[kind].gpus_per_node):
            if gpus >= least:
                yield from (Slot(kind, gpus, tp) for tp in self._candidates.degrees(gpus))
            gpus *= 2

    def _template(self, slots: Slots, samples: int, room: Sequence[int]) -> Template | None:
        key = slots, samples
        if key not in self._known:
            seats = _placed(slots, self._problem.kinds)
            self._known[key] = None if seats is None else self._factory.balanced(seats, samples)
        template = self._known[key]
        if template is None or any(n > most for n, most in zip(template.devices, room, strict=True)):
            return None
        return template


def _placed(slots: Slots, kinds: Sequence[NodeKind]) -> tuple[Seat, ...] | None:
    """Seats in order, the nodes of each kind filled one after the other; ``None`` if a stage lay across two nodes.

    Of a kind with several nodes a replica takes whole nodes and one half, quarter ... at most: such parts of several
    replicas can be packed without gaps.
    """
    taken = [0] * len(kinds)
    seats = []
    for slot in slots:
        kind = kinds[slot.kind]
        node, offset = divmod(taken[slot.kind], kind.gpus_per_node)
        if offset + slot.gpus > kind.gpus_per_node:
            return None
        seats.append(Seat(slot, node, offset))
        taken[slot.kind] += slot.gpus
    for kind, count in zip(kinds, taken, strict=True):
        part = count % kind.gpus_per_node
        halved = part and kind.gpus_per_node % part == 0 and math.log2(kind.gpus_per_node // part).is_integer()
        if count > kind.num_devices or (kind.count > 1 and part and not halved):
            return None
    return tuple(seats)


def shared_anew(copies: Sequence[tuple[Template, int]], batch: int, within_s: float) -> Cover | None:
    """``batch`` samples divided among (template, copies) so that the last ends as early as a bisection finds.

    Returns:
        ``None`` if that is not before ``within_s``, or if whole microbatches cannot add up to the batch.
    """
    if within_s == float("inf") or sum(_samples(t, n, within_s) for t, n in copies) < batch:
        return None
    low_s, high_s = 0.0, within_s
    while high_s - low_s > 1e-4 * high_s:
        middle_s = (low_s + high_s) / 2
        if sum(_samples(t, n, middle_s) for t, n in copies) < batch:
            low_s = middle_s
        else:
            high_s = middle_s
    microbatches = [n * t.most_microbatches(high_s) for t, n in copies]
    if 0 in microbatches:
        return None
    surplus = sum(t.samples * m for (t, _), m in zip(copies, microbatches, strict=True)) - batch
    for i in sorted(range(len(copies)), key=lambda i: -copies[i][0].samples):
        template, number = copies[i]
        taken = min(surplus // template.samples, microbatches[i] - number)
        microbatches[i] -= taken
        surplus -= taken * template.samples
    if surplus:
        return None
    return tuple(Copies(t, n, m) for (t, n), m in zip(copies, microbatches, strict=True))


def _samples(template: Template, copies: int, seconds: float) -> int:
    return copies * template.samples * template.most_microbatches(seconds)
