"""Lists the communicators of a plan: which ranks talk in one, what for, and in which order all ranks make them.

A communicator runs what is given to it in one order, on a CUDA stream of its own, and every rank must give it the same
things in the same order. So two uses share one only where that order is certain:

* The world, the losses and gradients that are summed in one collective are one use, ``sums``: a rank launches the sum
  of the losses' tokens, then its REDUCEs, then the world's decision, then its GATHERs. Equal sets of ranks share.
* A boundary has a communicator per direction. In one alone, a receive that is posted early would stand before a send
  that its peer needs first. Boundaries between the same two device groups, as interleaved stages have, share one per
  direction where both sides come to their slices in the same order.
* Tensor parallelism shares with nobody: its collectives are launched inside of computes, between sums whose place
  there differs from rank to rank, and a layer should not stand behind a bucket.
* Domains and rails share with nobody: a phase is launched when the one before is over, in no order with others.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hetero.errors import PlanError
from hetero.plan.gradient_holders import gradient_groups
from hetero.plan.ir import Plan, Ranks, Replica, StageKey
from hetero.plan.lowering import evaluation_rows, step_rows
from hetero.plan.stream_roles import other_streams
from hetero.plan.sync_domains import Domains, rails_of
from hetero.schedule.actions import RECEIVE, SEND, Action, ActionKind, Schedule
from hetero.schedule.program import Program
from hetero.text import in_halves

CommunicatorUse = Literal["sums", "tensor parallelism", "activations", "activation gradients", "domains and rails"]

HARDWARE_QUEUES = 32
"""Of a device at most (``CUDA_DEVICE_MAX_CONNECTIONS``), and the streams in a pool of torch (CUDAStream.h). Streams
beyond share them: what waits on one then holds up the other, which is how ranks come to wait for each other."""

Direction = tuple[int, int, bool]
"""The device group that sends, by its first stage, the one that receives, and whether it is activations, which go
forward."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """Ranks that talk to one another, in ascending order, about one thing.

    sender: of a boundary, the stage that sends; ``None`` for all boundaries from the same ranks to the same.
    senders: the ranks of that stage.
    """

    use: CommunicatorUse
    ranks: Ranks
    sender: StageKey | None = None
    senders: Ranks = ()


@dataclass(frozen=True, slots=True)
class BoundaryCommunicators:
    """The two directions of the boundary after a stage."""

    forward: Communicator
    backward: Communicator


class PlanCommunicators:
    """The communicators of two or more ranks of ``plan``, by what they are for, and all of them in one order.

    The world comes first, which exists before the plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @cached_property
    def world(self) -> Communicator:
        """Of all ranks, idle ones too."""
        return Communicator("sums", tuple(sorted(self._plan.ranks())))

    @cached_property
    def tp(self) -> Mapping[Ranks, Communicator]:
        """By the ranks of a tensor-parallel group."""
        sets = dict.fromkeys(ranks for _, _, stage in self._plan.stages() if stage.tp > 1 for ranks in stage.tp_groups)
        return {ranks: Communicator("tensor parallelism", ranks) for ranks in sets}

    @cached_property
    def boundaries(self) -> Mapping[StageKey, BoundaryCommunicators]:
        """By replica and the stage before the boundary."""
        found = {}
        known: dict[Replica, frozenset[Direction]] = {}
        for r, replica in enumerate(self._plan.replicas):
            shared: frozenset[Direction] = frozenset()
            if replica.is_interleaved:
                # Of many replicas most are alike.
                shape = replica.shape
                shared = known[shape] if shape in known else known.setdefault(shape, _shared_directions(shape))
            for s in range(len(replica.stages) - 1):
                found[r, s] = BoundaryCommunicators(
                    _of_direction(replica, (r, s), s + 1, shared), _of_direction(replica, (r, s + 1), s, shared)
                )
        return found

    @cached_property
    def losses(self) -> Communicator | None:
        """The last stages of all replicas; ``None`` if that is one rank."""
        ranks = tuple(sorted(rank for replica in self._plan.replicas for rank in replica.stages[-1].ranks))
        return Communicator("sums", ranks) if len(ranks) > 1 else None

    @cached_property
    def gradients(self) -> Mapping[Ranks, Communicator]:
        """By the ranks of a gradient group that sums in one collective."""
        flat = (ranks for ranks, parts in self._gradient_groups if not parts)
        return {ranks: Communicator("sums", ranks) for ranks in flat}

    @cached_property
    def hierarchical(self) -> Mapping[Ranks, Communicator]:
        """By the ranks of a domain's holders, or of a rail, of a gradient group that sums hierarchically."""
        sets = (ranks for _, parts in self._gradient_groups for ranks in (*parts, *rails_of(parts)))
        return {ranks: Communicator("domains and rails", ranks) for ranks in sets if len(ranks) > 1}

    @cached_property
    def _gradient_groups(self) -> tuple[tuple[Ranks, tuple[Ranks, ...]], ...]:
        """With their ranks by domain, where they sum hierarchically."""
        domains = Domains(self._plan.gradient_sync.domains)
        return tuple((ranks, domains.parts(ranks)) for ranks in gradient_groups(self._plan))

    @cached_property
    def ordered(self) -> tuple[Communicator, ...]:
        """All, in the order in which every rank makes those it is in.

        Every second boundary comes first: those have no rank in common, and are made at the same time.
        """
        boundaries = sorted(self.boundaries, key=lambda key: (key[1] % 2, key))
        directions = (
            each for key in boundaries for each in (self.boundaries[key].forward, self.boundaries[key].backward)
        )
        found = (
            self.world,
            *self.tp.values(),
            *directions,
            *([self.losses] if self.losses is not None else []),
            *self.gradients.values(),
            *self.hierarchical.values(),
        )
        return tuple(dict.fromkeys(found))

    def of(self, rank: int) -> tuple[Communicator, ...]:
        """Those of ``rank``."""
        return tuple(each for each in self.ordered if rank in each.ranks)

    def counts(self) -> Counter[int]:
        """How many each rank is in."""
        return Counter(rank for each in self.ordered for rank in each.ranks)


def communicators_of(plan: Plan, rank: int) -> tuple[Communicator, ...]:
    """Those of ``plan`` that ``rank`` is in with others, in the order in which it makes them."""
    return PlanCommunicators(plan).of(rank)


def max_communicators(plan: Plan) -> int:
    """Return in how many communicators a rank of ``plan`` may be, so that each of its streams has a queue of its own
    and is not handed out twice by torch."""
    return HARDWARE_QUEUES - other_streams(plan)


def check_communicators(plan: Plan) -> None:
    """No rank is in more communicators than it has streams and hardware queues for.

    Raises:
        PlanError: one is; the message says by which replicas' cuts and tensor parallelism.
    """
    limit = max_communicators(plan)
    if _at_most(plan) <= limit:
        return
    counts = PlanCommunicators(plan).counts()
    rank, count = max(counts.items(), key=lambda each: (each[1], -each[0]))
    if count <= limit:
        return
    sums = sum(each.use in ("sums", "domains and rails") for each in communicators_of(plan, rank))
    r, s = next((r, s) for r, s, stage in plan.stages() if rank in stage.ranks)
    raise PlanError(
        f"replica {r} stage {s}: rank {rank} would be in {count} communicators, at most {limit} have a "
        f"stream and a hardware queue of their own; {sums} of them sum gradients, one for each set of ranks that holds "
        f"the same layers and shards: {_unlike_cuts(plan, rank)}; cut these replicas at the same layers, give their "
        "stages the same tp, or make fewer of them"
    )


def _at_most(plan: Plan) -> int:
    """A number that no rank's count exceeds, found without making a list of what thousands of ranks are in."""
    stages = [stage for _, _, stage in plan.stages()]
    runs = len({edge for stage in stages for edge in (stage.start, stage.end)})  # One more for a tied embedding.
    cells = math.lcm(*{stage.tp for stage in stages})
    of_gradients = runs * (1 if cells == 1 else 1 + cells) * (2 if plan.gradient_sync.domains else 1)
    held = max(len(group) for replica in plan.replicas for group in replica.device_groups)
    of_world_losses_and_tp = 3
    return of_world_losses_and_tp + 4 * held + of_gradients


def _unlike_cuts(plan: Plan, rank: int) -> str:
    """Where other replicas cut what ``rank`` holds, and with which tensor parallelism they hold it; three at most."""
    (own, *_), held = plan.placements(rank), [stage for _, _, stage in plan.stages() if rank in stage.ranks]
    found = []
    for r, replica in enumerate(plan.replicas):
        if r == own.replica:
            continue
        beside = [stage for stage in replica.stages if any(stage.start < h.end and h.start < stage.end for h in held)]
        cuts = [stage.end for stage in beside[:-1]]
        tps = sorted({stage.tp for stage in beside})
        where = f"cuts at {', '.join(map(in_halves, cuts))}; " if cuts else ""
        parts = (1 + len(cuts)) * max(1, max(tps) // held[0].tp)
        found.append((parts, f"replica {r} ({where}tp {', '.join(map(str, tps))})"))
    worst = sorted(found, key=lambda each: -each[0])[:3]
    layers = " and ".join(f"[{in_halves(stage.start)}, {in_halves(stage.end)})" for stage in held)
    return f"beside layers {layers} with tp {held[0].tp}, " + ", ".join(text for _, text in worst)


def gradient_communicators(plan: Plan) -> set[Ranks]:
    """The ranks of every communicator for gradients: gradient groups, or their domains and rails."""
    found = PlanCommunicators(plan)
    return {*found.gradients, *found.hierarchical}


def _of_direction(replica: Replica, sender: StageKey, receiver: int, shared: frozenset[Direction]) -> Communicator:
    here, there = replica.stages[sender[1]].ranks, replica.stages[receiver].ranks
    use: CommunicatorUse = "activations" if sender[1] < receiver else "activation gradients"
    is_shared = bool(shared) and _direction(_firsts_of_groups(replica), sender[1], receiver) in shared
    return Communicator(use, tuple(sorted(here + there)), None if is_shared else sender, here)


def _shared_directions(replica: Replica) -> frozenset[Direction]:
    """Between which device groups both sides come to the slices of all boundaries in the same order, in steps and in
    evaluations."""
    same: dict[Direction, bool] = {}
    firsts = _firsts_of_groups(replica)
    for rows in (step_rows(replica), evaluation_rows(replica)):
        sent: dict[Direction, list[tuple[int, int]]] = {}
        received: dict[Direction, list[tuple[int, int]]] = {}
        for action in _host_order(replica, rows):
            if action.kind in SEND | RECEIVE:
                forward = 1 if action.kind in (ActionKind.SEND_F, ActionKind.RECV_F) else -1
                sender = action.stage if action.kind in SEND else action.stage - forward
                direction = _direction(firsts, sender, sender + forward)
                (sent if action.kind in SEND else received).setdefault(direction, []).append((sender, action.number))
        for direction, slices in sent.items():
            same[direction] = same.get(direction, True) and slices == received[direction]
    return frozenset(direction for direction, is_same in same.items() if is_same)


def _host_order(replica: Replica, rows: Schedule) -> Iterator[Action]:
    """What the hosts of all device groups issue, one group after the other."""
    counts = [replica.num_microbatches(s) for s in range(len(replica.stages))]
    for stages, row in zip(replica.device_groups, rows, strict=True):
        yield from Program.of_row(row, replica=0, stages=stages, num_microbatches=counts, updates=False).host_order


def _direction(firsts: Sequence[int], sender: int, receiver: int) -> Direction:
    return firsts[sender], firsts[receiver], sender < receiver


def _firsts_of_groups(replica: Replica) -> list[int]:
    """Of each stage the first one on its device group."""
    firsts: dict[Ranks, int] = {}
    return [firsts.setdefault(stage.ranks, s) for s, stage in enumerate(replica.stages)]
