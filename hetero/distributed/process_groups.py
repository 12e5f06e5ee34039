"""Creates the process groups of a plan, in place of megatron-core's uniform ``initialize_model_parallel``.

A group exists per tensor-parallel group, per direction of each boundary, and per distinct set of ranks that sum
gradients, be it all holders or, where they are summed hierarchically, those of a domain or a rail: their
number grows with the edges and holders of the plan, not with the paths through it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist

from hetero.distributed.timing import Timing
from hetero.plan.gradient_groups import gradient_buckets
from hetero.plan.ir import Placement, Plan, Ranks, Stage
from hetero.plan.sync_domains import rails_of


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
    losses: the last stages of all replicas.
    gradients: by the ranks of a gradient bucket; groups of one rank are absent, they have nothing to exchange, and so
        are buckets that are summed hierarchically.
    hierarchical: the groups of those, by the ranks of a domain's holders or of a rail. No bucket's sum in one
        collective uses them, so that the two sorts of sums need no order among each other.
    timing: when things happen.
    """

    plan: Plan
    rank: int
    device: torch.device
    world: dist.ProcessGroup
    stages: tuple[StageContext, ...]
    losses: dist.ProcessGroup
    gradients: Mapping[Ranks, dist.ProcessGroup]
    hierarchical: Mapping[Ranks, dist.ProcessGroup] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)

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
    """Create every group of ``plan``.

    Collective over the world, which must be initialised with ``plan.world_size`` ranks: each rank creates every
    group, its own or not, in the one order that the plan gives. On CUDA each group's communicator is set up here by
    an all-reduce of its members: NCCL wants all of them at its first call, and a transfer has only some.
    """
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None, "init_process_group comes first"

    def new_group(ranks: Iterable[int]) -> dist.ProcessGroup:
        members = sorted(ranks)
        group: dist.ProcessGroup = dist.new_group(members)
        if device.type == "cuda" and rank in members:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group

    # Stages that interleave share their groups.
    tp_sets = dict.fromkeys(ranks for _, _, stage in plan.stages() for ranks in stage.tp_groups)
    tp_groups = {ranks: new_group(ranks) for ranks in tp_sets}
    boundaries = {
        (r, s): BoundaryGroups(
            forward=new_group(here.ranks + after.ranks), backward=new_group(here.ranks + after.ranks)
        )
        for r, replica in enumerate(plan.replicas)
        for s, (here, after) in enumerate(pairwise(replica.stages))
    }
    losses = new_group(rank for replica in plan.replicas for rank in replica.stages[-1].ranks)
    gradients = {ranks: new_group(ranks) for ranks in flat_sync_ranks(plan)}
    hierarchical = {ranks: new_group(ranks) for ranks in hierarchical_sync_ranks(plan)}

    return ParallelContext(
        plan=plan,
        rank=rank,
        device=device,
        world=world,
        stages=_stage_contexts(plan, rank, tp_groups, boundaries),
        losses=losses,
        gradients=gradients,
        hierarchical=hierarchical,
        timing=timing or Timing(),
    )


def _stage_contexts(
    plan: Plan,
    rank: int,
    tp_groups: Mapping[Ranks, dist.ProcessGroup],
    boundaries: Mapping[tuple[int, int], BoundaryGroups],
) -> tuple[StageContext, ...]:
    if not (placements := plan.placements(rank)):
        return ()
    alone = dist.new_group([rank], use_local_synchronization=True)
    contexts = []
    for place in placements:
        r, s = place.replica, place.stage
        stages = plan.replicas[r].stages
        tp = tp_groups[stages[s].tp_groups[place.dp_rank]]
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
                before=boundaries.get((r, s - 1)),
                after=boundaries.get((r, s)),
            )
        )
    return tuple(contexts)


def flat_sync_ranks(plan: Plan) -> tuple[Ranks, ...]:
    """The distinct sets of two or more ranks that sum gradients in one collective, in the order of their creation."""
    buckets = gradient_buckets(plan, bucket_numel=1)
    return tuple(dict.fromkeys(bucket.ranks for bucket in buckets if len(bucket.ranks) > 1 and not bucket.domains))


def hierarchical_sync_ranks(plan: Plan) -> tuple[Ranks, ...]:
    """The distinct holders of a domain, and rails, of buckets summed hierarchically, in the order of their creation."""
    buckets = gradient_buckets(plan, bucket_numel=1)
    sets = (ranks for bucket in buckets for ranks in (*bucket.domains, *rails_of(bucket.domains)))
    return tuple(dict.fromkeys(ranks for ranks in sets if len(ranks) > 1))
