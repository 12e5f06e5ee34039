"""Asks the planner for a launch: at its start on rank 0 for all ranks, or before it for whoever wants to see."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from hetero.cost.runtime_model import LaunchedRuntime
from hetero.distributed.rank_consensus import from_rank_0
from hetero.elastic.records import RunFlags
from hetero.errors import PlanError
from hetero.output_files import check_can_be_written
from hetero.plan.ir import Plan
from hetero.runtime.layer_choice import may_split_backward
from hetero.serialization import from_json, load, save, to_json
from hetero.shown_secrets import shown_command
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from hetero.spec.profile import Profile
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.cli.model_config import model_spec
from megatron.pretrain.cli.parallel_config import PlannerConfig
from megatron.pretrain.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from hetero.cost.wanted_profile import WantedProfile
    from hetero.elastic.planning_problem import PlanningProblem
    from hetero.planner.certainty import Certainty
    from hetero.planner.plan_cluster import PlanResult


def plan_on_rank_0(config: PretrainConfig, planner: PlannerConfig, model: ModelSpec) -> Plan:
    """Plan for the cluster file on rank 0 and hand the plan to every rank; collective over the world (broadcast).

    Raises:
        ConfigError: rank 0 found no plan, or cannot read the cluster or a profile; on every rank.
    """
    text = from_rank_0(lambda: to_json(_planned(config, planner, model)))
    return from_json(Plan, text, source="plan of rank 0")


def described_model(config: PretrainConfig) -> tuple[ModelSpec, int]:
    """The model that the flags describe, and how many tokens their tokenizer has.

    Raises:
        ConfigError: the tokenizer cannot be read, or has more tokens than ``--vocab-size``.
    """
    tokenizer = build_tokenizer(
        tokenizer_type=config.data.tokenizer_type,
        tokenizer_model=config.data.tokenizer_model,
        vocab_size=config.model.vocab_size,
        vocab_file=config.data.vocab_file,
        merge_file=config.data.merge_file,
        null_eod=config.data.null_eod,
    )
    return model_spec(config.model, tokenizer_vocab_size=tokenizer.vocab_size), tokenizer.vocab_size


def planning_problem(config: PretrainConfig, planner: PlannerConfig, model: ModelSpec) -> "PlanningProblem":
    """What the flags ask the planner, for whatever nodes of the cluster file are there.

    Raises:
        ConfigError: the cluster or a profile cannot be read.
    """
    # The planner takes a second to load, which the other ranks need not spend.
    from hetero.elastic.planning_problem import PlanningProblem  # noqa: PLC0415

    checkpoint = config.checkpoint
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
        run=RunFlags(
            num_steps=config.run.train_iters,
            save=None if checkpoint.save is None else str(checkpoint.save),
            resumes=checkpoint.resumes,
        ),
    )


def planned(
    asked: "PlanningProblem", planner: PlannerConfig, *, world_size: int | None = None
) -> "tuple[PlanResult, Certainty]":
    """Plan for all nodes of the cluster, and write the plan with where it comes from to a file, if one is named.

    world_size: ranks that are there, if any are.

    Returns:
        The planner's answer, and how sure it is.

    Raises:
        PlanError: there are more or fewer ranks than devices.
        ConfigError: there is no plan, a profile is wrong, or the file cannot be written.
    """
    # OR-Tools and the profiles take a second to load as well.
    from hetero.planner.certainty import certainty_of  # noqa: PLC0415
    from hetero.planner.plan_cluster import plan_cluster  # noqa: PLC0415
    from hetero.planner.plan_provenance import with_provenance  # noqa: PLC0415

    out, num_devices = planner.out, asked.cluster.num_devices
    if out is not None:
        check_can_be_written(out, asked_by="--hetero-plan-out")
    if world_size is not None and num_devices != world_size:
        raise PlanError(
            f"{planner.cluster}: it describes {num_devices} devices, the launch has {world_size} ranks; start one "
            "process per device, or correct gpus_per_node and count"
        )
    problem = asked.on(asked.cluster, previews=True)
    result = plan_cluster(problem)
    certainty = certainty_of(result.simulation, problem.topology, problem.costs, result.runners_up)
    if out is not None:
        command = shown_command(sys.argv)
        save(with_provenance(result.simulation, certainty.step, cluster=asked.cluster, command=command), out)
    return result, certainty


def answer_lines(asked: "PlanningProblem", result: "PlanResult", certainty: "Certainty") -> Iterator[str]:
    """What the planner knows about its answer to a launch, in words."""
    from hetero.cost.model_flops import utilizations  # noqa: PLC0415
    from hetero.report.tables.planner_result import result_lines  # noqa: PLC0415

    found = utilizations(result.simulation, asked.on(asked.cluster).costs)
    return result_lines(result, certainty, found, _launch_again)


def _launch_again(wanted: "WantedProfile") -> tuple[str, str]:
    """What measures a profile, which wants the model as a file, and what to launch with it."""
    from hetero.commands.again import UNKNOWN_MODEL, profile_run  # noqa: PLC0415

    measuring, profile = profile_run(wanted, model=UNKNOWN_MODEL)
    return measuring, f"the same launch with --hetero-profile {profile}"


def _planned(config: PretrainConfig, planner: PlannerConfig, model: ModelSpec) -> Plan:
    asked = planning_problem(config, planner, model)
    result, certainty = planned(asked, planner, world_size=dist.get_world_size())
    for line in answer_lines(asked, result, certainty):
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
        fuses_gradient_sums=config.stage.gradient_accumulation_fusion,
        hidden_dropout=config.stage.hidden_dropout,
        attention_dropout=config.stage.attention_dropout,
    )
