"""Sets up the emulation of a cluster: the small model's plan, and the clock and links that a rank obeys."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hetero.cost.capacity import capacity_of_rank
from hetero.cost.cost_model import CostModel
from hetero.cost.gradient_volume import owned_parameters
from hetero.cost.host_memory import check_host_memory
from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.network import Topology
from hetero.cost.offload.host_rates import host_links, host_rates
from hetero.cost.simulation.copied_blocks import copies_blocks
from hetero.cost.simulation.simulated_plan import update_seconds
from hetero.cost.stage_memory import memory_of_stage
from hetero.distributed.rank_consensus import from_rank_0, on_all_ranks
from hetero.emulation.cluster.device_memory import DeviceMemory
from hetero.emulation.cluster.emulated_clock import EmulatedClock
from hetero.emulation.cluster.link_model import LinkModel
from hetero.emulation.cluster.shared_timetable import SharedTimetable
from hetero.emulation.cluster.timing import Device, EmulatedTiming, WarmUp
from hetero.emulation.options import EmulationOptions
from hetero.emulation.shrunk_model import small_plan
from hetero.errors import ConfigError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import Plan
from hetero.plan.lowering import step_rows
from hetero.plan.rank_description import describe_rank
from hetero.plan.validate import validate
from hetero.schedule.actions import COMPUTE
from hetero.schedule.activation_residency import Residency
from hetero.spec.cluster import ClusterSpec
from hetero.spec.parameters import parameters


@dataclass(frozen=True, slots=True)
class Emulation:
    """What a rank executes instead of the described plan, and in which time.

    described: the plan of the described model.
    bucket_numel: as many of the small model's gradients as are ``bucket_numel`` of the described model's blocks.
    """

    described: Plan
    plan: Plan
    timing: EmulatedTiming
    bucket_numel: int


def emulate(
    plan: Plan,
    cluster: ClusterSpec,
    costs: CostModel,
    *,
    options: EmulationOptions,
    vocab_size: int,
    bucket_numel: int,
) -> Emulation:
    """Set up the emulation of a legal ``plan`` on ``cluster``; collective over the world, on one machine.

    Args:
        costs: of the plan's model.
        vocab_size: of the small model: what the data can hold.
        bucket_numel: gradient elements of the described model that one collective reduces, about, unless the plan says.

    Raises:
        ConfigError: a device has no profile, ranks sit on several machines, or the plan fits neither cluster nor small
            model; on every rank.
    """
    rank = dist.get_rank()
    small = on_all_ranks(lambda: _checked(plan, cluster, costs, vocab_size=vocab_size, seq_length=options.seq_length))
    topology = Topology(cluster)
    bucket_numel = plan.gradient_sync.bucket_numel or bucket_numel
    small_numel = max(1, round(bucket_numel * _block_numel(small) / _block_numel(plan)))
    link_model = LinkModel(plan, small, topology, costs, bucket_numel=small_numel)
    path, epoch = _agree_on_timetable()
    try:
        _check_one_machine(path)
        timetable = SharedTimetable(path, meetings=link_model.meetings, wires=link_model.wires())
        dist.barrier()
    finally:
        if rank == 0:
            # The ranks have it open; nobody else needs its name.
            path.unlink()
    timing = EmulatedTiming(
        rank=rank,
        device=_device(plan, cluster, costs, rank),
        costs=costs,
        link_model=link_model,
        timetable=timetable,
        clock=EmulatedClock(scale=options.time_scale, epoch=epoch),
        all_gather=_all_gather,
    )
    return Emulation(plan, small, timing, small_numel)


def _all_gather(own: WarmUp) -> list[WarmUp]:
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def _checked(plan: Plan, cluster: ClusterSpec, costs: CostModel, *, vocab_size: int, seq_length: int) -> Plan:
    """The small model's plan, after a look at every device's price."""
    check_plan_on_cluster(plan, cluster)
    for _, _, stage in plan.stages():
        costs.of(stage)
        for rank in stage.ranks:
            if stage.offload.updates:
                host_rates(cluster.node_type_of_rank(rank))
            if copies_blocks(stage):
                host_links(cluster.node_type_of_rank(rank))
    check_host_memory(plan, cluster)
    small = small_plan(plan, vocab_size=vocab_size, seq_length=seq_length)
    validate(small)
    return small


def _agree_on_timetable() -> tuple[Path, float]:
    """A new file and a start of time, from rank 0."""

    def create() -> str:
        with tempfile.NamedTemporaryFile(prefix="hetero-emulation-", delete=False) as file:
            return f"{file.name} {time.monotonic()!r}"

    path, epoch = from_rank_0(create).rsplit(" ", 1)
    return Path(path), float(epoch)


def _check_one_machine(path: Path) -> None:
    here: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(here, path.exists())
    if not all(here):
        raise ConfigError("emulation: the ranks sit on several machines; emulate a cluster on one")


def _device(plan: Plan, cluster: ClusterSpec, costs: CostModel, rank: int) -> Device | None:
    places = plan.placements(rank)
    if not places:
        return None
    first = places[0]
    replica = plan.replicas[first.replica]
    stages = {place.stage: replica.stages[place.stage] for place in places}
    row = step_rows(replica)[replica.device_groups.index(tuple(stages))]
    return Device(
        stages=stages,
        costs={s: costs.of(stage) for s, stage in stages.items()},
        tp_group=stages[first.stage].tp_groups[first.dp_rank],
        memory=DeviceMemory(
            describe_rank(plan, rank),
            peak=device_memory(plan, plan_memory(plan, costs))[first.replica, first.stage],
            stages={s: memory_of_stage(stage, costs) for s, stage in stages.items()},
            residency=Residency.of_row(row),
            capacity_bytes=capacity_of_rank(rank, cluster),
        ),
        computes=[action for action in row if action.kind in COMPUTE],
        update_s=update_seconds(
            plan,
            costs,
            owned_parameters(plan) if plan.distributed_optimizer else None,
            stages=[(first.replica, s) for s in stages],
            rank=rank,
        ),
    )


def _block_numel(plan: Plan) -> int:
    """Elements of one block's parameters."""
    return sum(parameter.numel for parameter in parameters(plan.model) if 0 <= parameter.position < 1)
