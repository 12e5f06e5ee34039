"""Creates the process groups of a plan, in place of megatron-core's uniform ``initialize_model_parallel``.

Which there are, and in which order all ranks make them, says :mod:`hetero.plan.communicators`. Each is connected here:
libraries connect two ranks at their first message, and NCCL holds the host up in that call until the other rank has
come to it as well. In a step, where receives are posted early, ranks would come to it in different orders and wait for
one another for ever.
"""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist

from hetero.distributed.closed_listeners import closed_when_connected
from hetero.distributed.p2p import Channel
from hetero.distributed.standstill import StepProgress
from hetero.distributed.timing import Timing
from hetero.plan.communicators import BoundaryCommunicators, Communicator, PlanCommunicators
from hetero.plan.ir import Placement, Plan, Ranks, Stage

ProcessGroups = Mapping[Communicator, dist.ProcessGroup]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryGroups:
    """The two directions of the boundary after a stage. NCCL runs the transfers of one communicator in order."""

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StageContext:
    """What a working rank knows of its place in a stage. ``before`` and ``after`` are ``None`` at a replica's ends."""

    placement: Placement
    stage: Stage
    previous_stage: Stage | None
    next_stage: Stage | None
    num_microbatches: int
    tp: dist.ProcessGroup
    alone: dist.ProcessGroup
    before: BoundaryGroups | None
    after: BoundaryGroups | None

    @property
    def is_first(self) -> bool:
        return self.previous_stage is None

    @property
    def is_last(self) -> bool:
        return self.next_stage is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelContext:
    """A rank's view of a running plan.

    stages: those that this rank holds, in order; several where they interleave, none on an idle rank.
    losses: the last stages of all replicas, ``None`` if that is one rank.
    gradients: by the ranks of a gradient bucket; groups of one rank are absent, they have nothing to exchange, and so
        are buckets that are summed hierarchically.
    hierarchical: the groups of those, by the ranks of a domain's holders or of a rail. No bucket's sum in one
        collective uses them, so that the two sorts of sums need no order among each other.
    timing: when things happen.
    progress: where this rank is in a step.
    """

    plan: Plan
    rank: int
    device: torch.device
    world: dist.ProcessGroup
    stages: tuple[StageContext, ...]
    losses: dist.ProcessGroup | None
    gradients: Mapping[Ranks, dist.ProcessGroup]
    hierarchical: Mapping[Ranks, dist.ProcessGroup] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    progress: StepProgress = field(default_factory=StepProgress)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Every group of this rank, each once."""
        boundaries = (each for work in self.stages for each in (work.before, work.after) if each is not None)
        found = (
            self.world,
            *(work.tp for work in self.stages),
            *(group for both in boundaries for group in (both.forward, both.backward)),
            *([self.losses] if self.is_last and self.losses is not None else []),
            *(group for ranks, group in self.gradients.items() if self.rank in ranks),
            *(group for ranks, group in self.hierarchical.items() if self.rank in ranks),
        )
        return tuple(dict.fromkeys(found))

    @property
    def work(self) -> StageContext | None:
        """The first of :attr:`stages`, ``None`` on an idle rank.

        Samples, microbatches, tensor and data parallelism are the same in all of them.
        """
        return next(iter(self.stages), None)

    @property
    def is_first(self) -> bool:
        """This rank holds a replica's first stage, which reads tokens."""
        return any(work.is_first for work in self.stages)

    @property
    def is_last(self) -> bool:
        """This rank holds a replica's last stage, which reads labels."""
        return any(work.is_last for work in self.stages)


def create_groups(plan: Plan, *, device: torch.device, timing: Timing | None = None) -> ParallelContext:
    """Create and connect every group of ``plan``.

    Collective over the world, which must be initialised with ``plan.world_size`` ranks: each rank creates every
    group, its own or not, in the one order that the plan gives. Groups have one backend, the world's for ``device``.
    """
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None, "init_process_group comes first"
    communicators = PlanCommunicators(plan)
    backend = backend_of_config(dist.get_backend_config(world), device)
    groups: dict[Communicator, dist.ProcessGroup] = {communicators.world: world}
    for each in communicators.ordered:
        if each not in groups:
            groups[each] = create_group(each.ranks, backend=backend)
    # Also the tensor-parallel group of a rank that has no other, over which megatron-core's cross entropy reduces. An
    # idle rank makes its own too: torch 2.15 counts it in the names of later groups, which are the same on all ranks.
    alone = create_group([rank], backend=backend, by_members_alone=True)
    context = ParallelContext(
        plan=plan,
        rank=rank,
        device=device,
        world=world,
        stages=_stage_contexts(communicators, plan, rank, groups, alone),
        losses=groups[communicators.losses] if communicators.losses is not None else None,
        gradients={ranks: groups[each] for ranks, each in communicators.gradients.items()},
        hierarchical={ranks: groups[each] for ranks, each in communicators.hierarchical.items()},
        timing=timing or Timing(),
    )
    connect(context, communicators, groups)
    return context


def create_group(
    ranks: Sequence[int], *, backend: str | None = None, by_members_alone: bool = False
) -> dist.ProcessGroup:
    """Create a group whose members wait for one another as long as those of the world do.

    Without a limit of its own torch gives a group 30 minutes, whatever the world has. Collective over the world, in the
    same order on all ranks.

    Args:
        backend: that of its tensors' device; all of the world's, if ``None``.
        by_members_alone: collective over ``ranks`` instead.
    """
    world = dist.group.WORLD
    assert world is not None, "init_process_group comes first"
    with closed_when_connected():
        group = dist.new_group(  # noqa: TID251  (the one place)
            list(ranks), timeout=time_limit(world), backend=backend, use_local_synchronization=by_members_alone
        )
    # Ranks outside of it get a mark of torch's instead, and do nothing with it.
    return cast(dist.ProcessGroup, group)


def require_started(works: Iterable[dist.Work | None]) -> list[dist.Work]:
    """Return the ``works`` of collectives that this rank has started with ``async_op=True``.

    Raises:
        RuntimeError: torch gave none for one of them, as it does to a rank outside of the group.
    """
    started = []
    for work in works:
        if work is None:
            raise RuntimeError("a rank that is no member of a group has started a collective of it")
        started.append(work)
    return started


def time_limit(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Return how long the ranks of ``group`` wait for one another, ``None`` for a backend that knows no limit."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    limit: datetime.timedelta | None = getattr(options, "_timeout", None)
    return limit


def connect(context: ParallelContext, communicators: PlanCommunicators, groups: ProcessGroups) -> None:
    """Let every communicator of this rank, and every pair of ranks that exchange slices, have their first contact.

    Collective over the world. Communicator by communicator in the one order: an all-reduce of all its ranks, since NCCL
    wants all of them at its first call and a transfer has only some; on those of a boundary then a message per pair
    and direction, all of them in one batch. A communicator is done before the next begins, so that ranks in several
    come to each in the same order. Before all, the group that a rank is in alone.
    """
    channels = _channels(context, communicators)
    if context.work is not None:
        dist.all_reduce(torch.zeros(1, device=context.device), group=context.work.alone)
    for each in communicators.of(context.rank):
        # As the decisions of a step, which are the smallest of its sums.
        dist.all_reduce(torch.zeros(1, dtype=torch.float64, device=context.device), group=groups[each])
        for sender, receiver in channels.get(each, ()):
            Channel(
                sender=sender,
                receiver=receiver,
                rank=context.rank,
                seq_length=context.plan.seq_length,
                group=groups[each],
            ).connect(context.device)


def _channels(
    context: ParallelContext, communicators: PlanCommunicators
) -> Mapping[Communicator, list[tuple[Stage, Stage]]]:
    """By communicator, the senders and receivers of the boundaries that use it, of this rank's replica."""
    found: dict[Communicator, list[tuple[Stage, Stage]]] = {}
    replicas = {work.placement.replica for work in context.stages}
    for (r, s), both in communicators.boundaries.items():
        if r in replicas:
            here, after = context.plan.replicas[r].stages[s : s + 2]
            found.setdefault(both.forward, []).append((here, after))
            found.setdefault(both.backward, []).append((after, here))
    return found


def backend_of_config(config: str, device: torch.device) -> str:
    """The one backend of a group's ``config``, such as ``cpu:gloo,cuda:nccl``, that serves ``device``.

    A group that is made without it gets all backends of the world.
    """
    backend: str = dist.BackendConfig(dist.Backend(config)).get_device_backend_map()[device.type]
    return backend


def _stage_contexts(
    communicators: PlanCommunicators, plan: Plan, rank: int, groups: ProcessGroups, alone: dist.ProcessGroup
) -> tuple[StageContext, ...]:
    contexts = []
    for place in plan.placements(rank):
        r, s = place.replica, place.stage
        stages = plan.replicas[r].stages
        tp = groups[communicators.tp[stages[s].tp_groups[place.dp_rank]]] if stages[s].tp > 1 else alone
        # megatron-core asks the group for the rank's position, weights and boundaries ask the plan.
        assert dist.get_rank(tp) == place.tp_rank, "torch numbers the ranks of a group in ascending order"
        contexts.append(
            StageContext(
                placement=place,
                stage=stages[s],
                previous_stage=stages[s - 1] if s > 0 else None,
                next_stage=stages[s + 1] if s + 1 < len(stages) else None,
                num_microbatches=plan.replicas[r].num_microbatches(s),
                tp=tp,
                alone=alone,
                before=_boundary_groups(communicators.boundaries.get((r, s - 1)), groups),
                after=_boundary_groups(communicators.boundaries.get((r, s)), groups),
            )
        )
    return tuple(contexts)


def _boundary_groups(both: BoundaryCommunicators | None, groups: ProcessGroups) -> BoundaryGroups | None:
    return None if both is None else BoundaryGroups(forward=groups[both.forward], backward=groups[both.backward])
