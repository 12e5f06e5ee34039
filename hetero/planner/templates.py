"""Replica templates: pipelines over kinds of node, of which the cluster is then covered by copies.

A template is an ordered list of blocks. A block is one kind of node, ``num_stages`` consecutive stages of ``gpus``
devices each, all with one tp; it covers whole nodes, or a half, a quarter ... of one node. So there are as many
templates as ways to combine kinds, however many nodes of a kind there are.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetero.planner.balance import Balanced, Share, balance
from hetero.planner.boundaries import Boundaries, Crossing, Seat
from hetero.planner.candidates import Candidates, Slot
from hetero.planner.problem import NodeKind, Problem


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """Consecutive stages on one kind of node."""

    kind: int
    num_stages: int
    gpus: int
    tp: int

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.gpus

    @property
    def slot(self) -> Slot:
        return Slot(self.kind, self.gpus, self.tp)


@dataclass(frozen=True, slots=True)
class Held:
    """Positions on one node of a template; -1 is the embedding and ``num_layers`` the head.

    runs: intervals ``[first, end)`` in ascending order. More than one where a replica comes back to a node.

    inside: several devices of the node hold the same layers.
    whole: the node has no place for another replica.
    hidden_s: seconds from the last backward of its first run until the replica's: time in which its gradients are
        summed at no cost.
    """

    kind: int
    node: int
    runs: tuple[tuple[int, int], ...]
    inside: bool
    whole: bool
    hidden_s: float

    def holds(self, position: int) -> bool:
        return any(first <= position < end for first, end in self.runs)


@dataclass(frozen=True)
class Template:
    """A replica without ranks: who holds what, and the seconds of M microbatches of ``samples`` each.

        T(M) = fill_s + (M - 1) period_s + update_s

    devices: how many of each kind it takes.
    """

    seats: tuple[Seat, ...]
    shares: tuple[Share, ...]
    samples: int
    fill_s: float
    period_s: float
    update_s: float
    devices: tuple[int, ...]
    held: tuple[Held, ...]

    def seconds(self, num_microbatches: int) -> float:
        """T(M)."""
        return self.fill_s + (num_microbatches - 1) * self.period_s + self.update_s

    def most_microbatches(self, seconds: float) -> int:
        """The largest M with T(M) <= ``seconds``, 0 if not even one microbatch is done by then."""
        spare = seconds - self.fill_s - self.update_s
        return int(spare / self.period_s + 1e-9) + 1 if spare >= 0 else 0

    @property
    def rate(self) -> float:
        """Samples per second in the steady state."""
        return self.samples / self.period_s

    @cached_property
    def cuts(self) -> tuple[tuple[int, int, int], ...]:
        """(kind, first layer, end layer) per run of stages of one kind: what other replicas' gradients meet."""
        runs: list[tuple[int, int, int]] = []
        layer = 0
        for seat, share in zip(self.seats, self.shares, strict=True):
            if runs and runs[-1][0] == seat.slot.kind:
                runs[-1] = (seat.slot.kind, runs[-1][1], layer + share.num_layers)
            else:
                runs.append((seat.slot.kind, layer, layer + share.num_layers))
            layer += share.num_layers
        return tuple(runs)


class TemplateFactory:
    """Builds templates from blocks."""

    def __init__(self, problem: Problem, candidates: Candidates) -> None:
        self.problem = problem
        self.candidates = candidates
        self._boundaries = Boundaries(problem)

    def build(self, blocks: Sequence[Block], samples: int, *, least_rate: float = 0.0) -> Template | None:
        """The balanced replica of ``blocks``.

        Returns:
            ``None`` if it does not fit, a dp does not divide ``samples``, or it is below ``least_rate`` samples per
            second.
        """
        return self.balanced(tuple(_seats(blocks, self.problem.kinds)), samples, least_rate=least_rate)

    def balanced(self, seats: tuple[Seat, ...], samples: int, *, least_rate: float = 0.0) -> Template | None:
        """As :meth:`build`, for seats in any order."""
        options = [self.candidates.options(seat.slot, samples) for seat in seats]
        if not all(options) or len(options) > self.problem.model.num_layers:
            return None
        crossings = self.crossings(seats, samples)
        found = balance(
            options,
            crossings,
            num_layers=self.problem.model.num_layers,
            port_s=self.port_s(seats, crossings),
            worth_s=samples / least_rate if least_rate else float("inf"),
        )
        return None if found is None else self.template(seats, found, samples)

    def crossings(self, seats: Sequence[Seat], samples: int) -> list[Crossing]:
        """The boundary after each seat but the last."""
        return [self._boundaries.crossing(a, b, samples=samples) for a, b in itertools.pairwise(seats)]

    def port_s(self, seats: Sequence[Seat], crossings: Sequence[Crossing]) -> float:
        """Seconds per microbatch that the busiest network interface of the replica sends.

        Replicas that share a node share its interfaces: if a replica takes half of a node, it counts double.
        """
        busy: dict[tuple[int, int], float] = defaultdict(float)
        taken: dict[tuple[int, int], int] = defaultdict(int)
        for seat in seats:
            taken[seat.slot.kind, seat.node] += seat.slot.gpus
        for (here, after), crossing in zip(itertools.pairwise(seats), crossings, strict=True):
            busy[here.slot.kind, here.node] += crossing.forward_port_s
            busy[after.slot.kind, after.node] += crossing.backward_port_s
        return max(
            (
                seconds * max(1, self.problem.kinds[kind].gpus_per_node // taken[kind, node])
                for (kind, node), seconds in busy.items()
            ),
            default=0.0,
        )

    def template(self, seats: tuple[Seat, ...], balanced: Balanced, samples: int) -> Template:
        """A template of ``seats`` that hold the shares of ``balanced``."""
        crossings = self.crossings(seats, samples)
        devices = [0] * len(self.problem.kinds)
        for seat in seats:
            devices[seat.slot.kind] += seat.slot.gpus
        return Template(
            seats=seats,
            shares=balanced.shares,
            samples=samples,
            fill_s=balanced.fill_s,
            period_s=balanced.period_s,
            update_s=max(
                share.option.update_s(share.num_layers, first=s == 0, last=s + 1 == len(seats))
                for s, share in enumerate(balanced.shares)
            ),
            devices=tuple(devices),
            held=tuple(_held(seats, balanced.shares, crossings, self.problem)),
        )


def _seats(blocks: Iterable[Block], kinds: Sequence[NodeKind]) -> Iterator[Seat]:
    """Stages in order, the nodes of each kind filled one after the other."""
    taken: dict[int, int] = defaultdict(int)
    for block in blocks:
        per_node = kinds[block.kind].gpus_per_node
        for _ in range(block.num_stages):
            yield Seat(block.slot, *divmod(taken[block.kind], per_node))
            taken[block.kind] += block.gpus


def _held(
    seats: Sequence[Seat], shares: Sequence[Share], crossings: Sequence[Crossing], problem: Problem
) -> Iterator[Held]:
    """One entry per node."""
    num_layers = problem.model.num_layers
    nodes: dict[tuple[int, int], Held] = {}
    taken: dict[tuple[int, int], int] = defaultdict(int)
    layer, hidden_s = 0, 0.0
    for s, (seat, share) in enumerate(zip(seats, shares, strict=True)):
        end = layer + share.num_layers
        is_first, is_last = layer == 0, end == num_layers
        run = -1 if is_first else layer, num_layers + 1 if is_last else end
        slot, node = seat.slot, (seat.slot.kind, seat.node)
        taken[node] += slot.gpus
        if (held := nodes.get(node)) is None:
            nodes[node] = Held(*node, (run,), slot.dp > 1, False, hidden_s)
        elif held.runs[-1][1] == run[0]:
            runs = (*held.runs[:-1], (held.runs[-1][0], run[1]))
            nodes[node] = replace(held, runs=runs, inside=held.inside or slot.dp > 1)
        else:
            nodes[node] = replace(held, runs=(*held.runs, run), inside=held.inside or slot.dp > 1)
        hidden_s += share.option.backward_s(share.num_layers, first=is_first, last=is_last)
        hidden_s += crossings[s].seconds if s < len(crossings) else 0.0
        layer = end
    for node, held in nodes.items():
        per_node = problem.kinds[held.kind].gpus_per_node
        yield replace(held, inside=held.inside or taken[node] < per_node, whole=taken[node] >= per_node)
