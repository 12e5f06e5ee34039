"""The shortest step of a small problem by looking at every plan, to hold the solver against.

Every replica is a sequence of stages, each with a kind, devices, tp, layers and recomputation; every way to divide
the devices among replicas and the samples among them is tried, by the same formula as the solver's
(:mod:`hetero.planner.cover`). Nothing is pruned but sets of replicas of which one alone is already too slow.
Microbatches are equal along a replica, as in the template space. The work grows without mercy: up to 8 devices.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.planner.balance import settle
from hetero.planner.boundaries import Seat
from hetero.planner.candidates import Candidates, Slot
from hetero.planner.cover import Copies, Cover, score
from hetero.planner.problem import Problem
from hetero.planner.rings import Rings
from hetero.planner.templates import Template, TemplateFactory


@dataclass(frozen=True, slots=True)
class Best:
    """The best cover and its seconds by the formula; ``looked_at`` counts replicas and covers."""

    cover: Cover
    step_s: float
    looked_at: int


def every_replica(problem: Problem, *, sizes: Sequence[int], samples: Sequence[int]) -> Iterator[Template]:
    """Every replica on the nodes of ``problem``, one node per kind, with stages of ``sizes`` devices.

    Stages of a kind take its devices in order, which loses nothing: devices of a node are alike.
    """
    candidates = Candidates(problem)
    factory = TemplateFactory(problem, candidates)
    slots = [
        Slot(kind.index, size, tp)
        for kind in candidates.usable_kinds
        for size in sizes
        if size <= kind.gpus_per_node
        for tp in candidates.degrees(size)
    ]
    for seats in _sequences(slots, problem):
        for per_microbatch in samples:
            options = [candidates.options(seat.slot, per_microbatch) for seat in seats]
            if not all(options):
                continue
            crossings = factory.crossings(seats, per_microbatch)
            port_s = factory.port_s(seats, crossings)
            for layers in _compositions(problem.model.num_layers, len(seats)):
                settled = settle(options, crossings, layers=layers, port_s=port_s)
                if settled is not None:
                    yield factory.template(seats, settled, per_microbatch)


def best_by_force(problem: Problem, *, sizes: Sequence[int], samples: Sequence[int]) -> Best:
    """The best of all covers by :func:`every_replica`, with every division of the samples that can be best.

    For a set of replicas, a time for compute allows each a number of microbatches; the least time at which these can
    add up to the global batch is the set's.
    """
    rings = Rings(problem)
    replicas = list(every_replica(problem, sizes=sizes, samples=samples))
    best = Best((), float("inf"), len(replicas))
    looked_at = len(replicas)
    limits = [kind.num_devices for kind in problem.kinds]
    for chosen in _sets(replicas, limits, problem.global_batch_size):
        looked_at += 1
        shares = _shortest_shares(chosen, problem.global_batch_size, best.step_s)
        if shares is None:
            continue
        cover = tuple(Copies(template, 1, share) for template, share in zip(chosen, shares, strict=True))
        step_s = score(cover, problem, rings).step_s
        if step_s < best.step_s:
            best = Best(cover, step_s, looked_at)
    return Best(best.cover, best.step_s, looked_at)


def _sequences(slots: Sequence[Slot], problem: Problem) -> Iterator[tuple[Seat, ...]]:
    """Every sequence of slots that the nodes have room for."""

    def extend(seats: tuple[Seat, ...], used: tuple[int, ...]) -> Iterator[tuple[Seat, ...]]:
        if seats:
            yield seats
        if len(seats) == problem.model.num_layers:
            return
        for slot in slots:
            taken = used[slot.kind] + slot.gpus
            if taken <= problem.kinds[slot.kind].gpus_per_node:
                more = (*used[: slot.kind], taken, *used[slot.kind + 1 :])
                yield from extend((*seats, Seat(slot, 0, used[slot.kind])), more)

    yield from extend((), (0,) * len(problem.kinds))


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def _sets(replicas: Sequence[Template], limits: Sequence[int], batch: int) -> Iterator[tuple[Template, ...]]:
    """Every multiset of replicas that fits the devices."""

    def extend(chosen: tuple[Template, ...], start: int, left: Sequence[int]) -> Iterator[tuple[Template, ...]]:
        if chosen:
            yield chosen
        for i in range(start, len(replicas)):
            rest = [have - n for have, n in zip(left, replicas[i].devices, strict=True)]
            if min(rest) >= 0:
                yield from extend((*chosen, replicas[i]), i, rest)

    yield from extend((), 0, limits)


def _shortest_shares(chosen: Sequence[Template], batch: int, limit_s: float) -> tuple[int, ...] | None:
    """Microbatches of each replica, at least one, that add up to ``batch`` with the least longest time."""
    best: tuple[float, tuple[int, ...]] | None = None

    def extend(shares: tuple[int, ...], left: int, longest_s: float) -> None:
        nonlocal best
        if longest_s >= (best[0] if best else limit_s):
            return
        template = chosen[len(shares)]
        if len(shares) + 1 == len(chosen):
            microbatches, rest = divmod(left, template.samples)
            if not rest and microbatches:
                seconds = max(longest_s, template.seconds(microbatches))
                if seconds < (best[0] if best else limit_s):
                    best = seconds, (*shares, microbatches)
            return
        for microbatches in range(1, left // template.samples + 1):
            seconds = max(longest_s, template.seconds(microbatches))
            extend((*shares, microbatches), left - microbatches * template.samples, seconds)

    extend((), batch, 0.0)
    return best[1] if best else None
