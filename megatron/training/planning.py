"""Plans at start: rank 0 asks the planner, and all ranks get its answer."""

import shlex
import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

from hetero.cost.runtime_model import LaunchedRuntime
from hetero.distributed.rank_consensus import from_rank_0
from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.runtime.layer_choice import may_split_backward
from hetero.serialization import check_can_be_written, from_json, load, save, to_json
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from hetero.spec.profile import Profile
from megatron.training.cli.config import PretrainConfig
from megatron.training.cli.parallel_config import PlannerConfig

if TYPE_CHECKING:
    from hetero.elastic.planning_problem import PlanningProblem


def plan_on_rank_0(config: PretrainConfig, planner: PlannerConfig, model: ModelSpec) -> Plan:
    """Plan for the cluster file on rank 0 and hand the plan to every rank; collective over the world (broadcast).

    Raises:
        ConfigError: rank 0 found no plan, or cannot read the cluster or a profile; on every rank.
    """
    text = from_rank_0(lambda: to_json(_planned(config, planner, model)))
    return from_json(Plan, text, source="plan of rank 0")


def planning_problem(config: PretrainConfig, planner: PlannerConfig, model: ModelSpec) -> "PlanningProblem":
    """What the flags ask the planner, for whatever nodes of the cluster file are there.

    Raises:
        ConfigError: the cluster or a profile cannot be read.
    """
    # The planner takes a second to load, which the other ranks need not spend.
    from hetero.elastic.planning_problem import PlanningProblem  # noqa: PLC0415

    return PlanningProblem(
        cluster=load(ClusterSpec, planner.cluster).with_host_memory_gib(planner.host_memory_gib),
        model=model,
        seq_length=config.data.seq_length,
        precision=config.parallel.precision or "fp32",
        global_batch_size=config.parallel.global_batch_size,
        distributed_optimizer=config.parallel.use_distributed_optimizer,
        splits_backward=may_split_backward(config.stage),
        runtime=launched_runtime(config),
        profiles=tuple(load(Profile, path) for path in planner.profiles),
        data_sheets=planner.data_sheets,
        time_limit_s=planner.time_limit_s,
        offload=planner.offload,
    )


def _planned(config: PretrainConfig, planner: PlannerConfig, model: ModelSpec) -> Plan:
    # OR-Tools and the profiles take a second to load as well.
    from hetero.cost.model_flops import utilizations  # noqa: PLC0415
    from hetero.planner.certainty import certainty_of  # noqa: PLC0415
    from hetero.planner.plan_cluster import plan_cluster  # noqa: PLC0415
    from hetero.planner.plan_provenance import with_provenance  # noqa: PLC0415
    from hetero.report.tables.planner_result import result_lines  # noqa: PLC0415

    if planner.out is not None:
        check_can_be_written(planner.out, asked_by="--hetero-plan-out")
    asked = planning_problem(config, planner, model)
    if asked.cluster.num_devices != dist.get_world_size():
        raise PlanError(
            f"{planner.cluster}: it describes {asked.cluster.num_devices} devices, the launch has "
            f"{dist.get_world_size()} ranks; start one process per device, or correct gpus_per_node and count"
        )
    problem = asked.on(asked.cluster, previews=True)
    result = plan_cluster(problem)
    certainty = certainty_of(result.simulation, problem.topology, problem.costs, result.runners_up)
    if planner.out is not None:
        command = shlex.join(sys.argv)
        save(with_provenance(result.simulation, certainty.step, cluster=asked.cluster, command=command), planner.out)
    found = utilizations(result.simulation, problem.costs)
    for line in result_lines(result, certainty, found, "the same launch with --hetero-profile {}".format):
        print(line)
    sys.stdout.flush()
    return result.plan


def launched_runtime(config: PretrainConfig) -> LaunchedRuntime:
    """Describe to the cost model how this launch executes a plan."""
    parallel = config.parallel
    return LaunchedRuntime(
        bucket_numel=parallel.bucket_size,
        overlaps_gradient_sync=parallel.overlap_grad_reduce,
        overlaps_param_gather=parallel.overlap_param_gather,
        fuses_attention=config.stage.attention_backend != "unfused",
        hidden_dropout=config.stage.hidden_dropout,
        attention_dropout=config.stage.attention_dropout,
    )
