"""The shortest step of a small problem by looking at every plan, to hold the solver against.

Every replica is a sequence of stages, each with a kind, devices, tp and layers; every way to divide the devices among
replicas and the samples among them is tried, by the same formula as the solver's (:mod:`hetero.planner.cover`).
Microbatches are equal along a replica, as in the template space, and recomputation and depths follow from the layers.

Sets of replicas are left out only if they cannot finish the global batch within the best step so far: with w_t the
samples that replica t finishes by then, any prices p_k with sum_k d[t, k] p_k >= w_t for all t bound what devices are
worth; a set that wastes more of it than is to spare is too slow. The work grows without mercy: up to 8 devices.
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

RESTART = 0.98
"""Covers that are better by this factor make it worth beginning again."""


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
    best = _best_alone(replicas, problem, rings)
    looked_at = len(replicas)
    improved = True
    while improved:
        # A better cover allows less waste: begin again with tighter prices.
        improved = False
        for chosen in _sets(replicas, problem, best.step_s):
            looked_at += 1
            shares = _shortest_shares(chosen, problem.global_batch_size, best.step_s)
            if shares is None:
                continue
            cover = tuple(Copies(template, 1, share) for template, share in zip(chosen, shares, strict=True))
            step_s = score(cover, problem, rings).step_s
            if step_s < best.step_s:
                improved = step_s < RESTART * best.step_s
                best = Best(cover, step_s, looked_at)
                if improved:
                    break
    return Best(best.cover, best.step_s, looked_at)


def _best_alone(replicas: Sequence[Template], problem: Problem, rings: Rings) -> Best:
    best = Best((), float("inf"), 0)
    for template in replicas:
        microbatches, rest = divmod(problem.global_batch_size, template.samples)
        if not rest and template.seconds(microbatches) < best.step_s:
            cover = (Copies(template, 1, microbatches),)
            if (step_s := score(cover, problem, rings).step_s) < best.step_s:
                best = Best(cover, step_s, 0)
    return best


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


def _sets(replicas: Sequence[Template], problem: Problem, limit_s: float) -> Iterator[tuple[Template, ...]]:
    """Every multiset of replicas that fits the devices and can finish the global batch within ``limit_s``."""
    able = [(t, t.samples * t.most_microbatches(limit_s)) for t in replicas]
    able = [(t, samples) for t, samples in able if samples]
    if not able:
        return
    prices = [
        max((samples / sum(t.devices) for t, samples in able if t.devices[kind.index] == sum(t.devices)), default=0.0)
        for kind in problem.kinds
    ]
    prices = [price or max(samples / sum(t.devices) for t, samples in able) for price in prices]

    def worth(t: Template) -> float:
        return sum(n * price for n, price in zip(t.devices, prices, strict=True))

    scale = max(samples / worth(t) for t, samples in able)
    wasted = sorted(((scale * worth(t) - samples, i) for i, (t, samples) in enumerate(able)))
    spare = scale * sum(k.num_devices * p for k, p in zip(problem.kinds, prices, strict=True))
    spare -= problem.global_batch_size

    def extend(
        chosen: tuple[Template, ...], start: int, left: Sequence[int], spare: float
    ) -> Iterator[tuple[Template, ...]]:
        if chosen:
            yield chosen
        for position in range(start, len(wasted)):
            waste, i = wasted[position]
            if waste > spare:
                return
            rest = [have - n for have, n in zip(left, able[i][0].devices, strict=True)]
            if min(rest) >= 0:
                yield from extend((*chosen, able[i][0]), position, rest, spare - waste)

    yield from extend((), 0, [kind.num_devices for kind in problem.kinds], spare + 1e-9)


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
