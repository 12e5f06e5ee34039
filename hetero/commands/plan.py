"""``hetero plan`` chooses a plan for a cluster, ``hetero simulate`` predicts what a plan takes."""

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.status import Status

from hetero.command_line import BELOW_1, COUNT
from hetero.commands.again import GOAL, PRECISION, plan_again, simulate_again
from hetero.commands.measure import add_measure, check_measure, measured
from hetero.commands.report import add_outputs, outputs, written
from hetero.commands.show import legal_plan
from hetero.console import console
from hetero.cost.capacity import memory_error
from hetero.cost.memory import plan_memory
from hetero.cost.model_flops import utilizations
from hetero.cost.network import Topology
from hetero.cost.prediction_range import StepRange
from hetero.cost.runtime_model import HETERO
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.data.cost_models import model_costs, plan_costs
from hetero.emulation.timeline import executed
from hetero.errors import ConfigError, PlanError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import DEFAULT_DROPOUT
from hetero.planner.certainty import RunnerUp, certainty_of
from hetero.planner.plan_provenance import with_provenance
from hetero.planner.problem import Offloading, Problem
from hetero.planner.reference.yardsticks import Yardstick, choose_uniform, uniform_yardsticks, yardsticks
from hetero.planner.replica.feasibility import check_problem
from hetero.planner.scoring import goal_value
from hetero.planner.siblings import USUAL_PROCESSES, usual_processes
from hetero.report.content import Execution, Report
from hetero.report.plan_wording import range_of
from hetero.report.prediction_json import bounds_json, prediction_json
from hetero.report.tables.certainty import certainty_lines, every_command, utilization_lines
from hetero.report.tables.host_memory import host_memory_table
from hetero.report.tables.measurement import measurement_lines, measurement_table
from hetero.report.tables.plan import plan_picture
from hetero.report.tables.planner_result import comparison_table, result_lines, unusable_lines
from hetero.report.tables.prediction import prediction_table
from hetero.report.trace import chrome_trace
from hetero.serialization import load, to_json
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model_import import load_model, precision_of
from hetero.standard_output import answer, check_output, output_file, write_output
from hetero.units import BYTES_OF_PRECISION

if TYPE_CHECKING:
    from hetero.planner.cover.search import SearchProgress
    from hetero.planner.plan_cluster import PlanResult


def add_plan(commands: Any) -> None:
    """Add the parser of ``hetero plan``."""
    parser = commands.add_parser("plan", help="find the plan with the shortest step for a cluster and a model")
    parser.add_argument(
        "--cluster",
        type=Path,
        required=True,
        metavar="CLUSTER.yaml",
        help="devices, nodes and links: written by hand or by hetero discover",
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="MODEL",
        help="model.yaml, or a Hugging Face model: its config.json, its folder, or its name in the local cache",
    )
    parser.add_argument("--global-batch-size", type=int, required=True, metavar="N", help="samples of a step")
    parser.add_argument(
        "--seq-length", type=int, help="tokens of a sample (default: as many as the model has positions)"
    )
    parser.add_argument(
        "--precision", choices=list(BYTES_OF_PRECISION), help=f"default: what a config.json says, else {PRECISION}"
    )
    parser.add_argument(
        "--fp8", action="store_true", help="with bf16: stages on devices that have fp8 multiply in it (an estimate)"
    )
    parser.add_argument(
        "--out", type=output_file, metavar="PLAN.json", help="write the plan into this file; - for standard output"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=Problem.time_limit_s,
        metavar="S",
        help=f"seconds (default: {Problem.time_limit_s:g})",
    )
    parser.add_argument(
        "--objective", choices=["time", "money"], default=GOAL, help="shortest step, or least money per token"
    )
    parser.add_argument("--budget-per-hour", type=float, metavar="X", help="most that the nodes in use may cost")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices of the planner")
    parser.add_argument(
        "--processes",
        type=COUNT,
        metavar="N",
        help="search in so many at once, each with a seed of its own: what one finds in a time limit is partly luck "
        f"(default: one on each core, {USUAL_PROCESSES} at most)",
    )
    parser.add_argument(
        "--uniform-out",
        type=output_file,
        metavar="UNIFORM.json",
        help="write the best uniform plan, on all GPUs or on those of some node types, to this file; - for standard "
        "output; without such a plan nothing is planned",
    )
    parser.add_argument(
        "--use-distributed-optimizer",
        action="store_true",
        help="plans share optimizer state among all ranks that hold the same weights (ZeRO-1)",
    )
    dropouts = {"--hidden-dropout": "outputs of attention and MLP", "--attention-dropout": "attention weights"}
    for flag, dropped in dropouts.items():
        parser.add_argument(
            flag,
            type=BELOW_1,
            default=DEFAULT_DROPOUT,
            metavar="P",
            help=f"share of {dropped} that the launch drops; what it keeps takes memory (default: %(default)s)",
        )
    parser.add_argument(
        "--no-split-backward", action="store_true", help="whole backwards only, as TransformerEngine's layers need them"
    )
    parser.add_argument(
        "--no-interleave", action="store_true", help="one stage of a replica per GPU, and never several in turns"
    )
    parser.add_argument(
        "--offload",
        choices=get_args(Offloading),
        default=Problem.offload,
        help="with --use-distributed-optimizer, auto leaves optimizer state, gradients, weights and activations to "
        "hosts that the cluster file describes, where memory is short (default: %(default)s)",
    )
    parser.add_argument(
        "--host-memory-gib",
        type=COUNT,
        metavar="GIB",
        help="memory of every host that training may use, in place of what the cluster file says",
    )
    parser.add_argument("--compare", action="store_true", help="plan in four other manners as well, and compare")
    add_outputs(parser)
    _add_profiles(parser)
    parser.set_defaults(run=_plan)


def add_simulate(commands: Any) -> None:
    """Add the parser of ``hetero simulate``."""
    parser = commands.add_parser("simulate", help="predict the step time and the memory of a plan on a cluster")
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument("--cluster", type=Path, required=True, metavar="CLUSTER.yaml")
    parser.add_argument(
        "--trace", type=output_file, metavar="OUT.json", help="write a Chrome/Perfetto trace; - for standard output"
    )
    add_measure(parser)
    add_outputs(parser)
    _add_profiles(parser)
    parser.set_defaults(run=_simulate)


def _add_profiles(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        type=Path,
        action="append",
        default=[],
        metavar="P.json",
        help="a profile beside the shipped ones; may be repeated",
    )
    parser.add_argument(
        "--data-sheets", action="store_true", help="price devices without any profile by their data sheets"
    )


def _plan(args: argparse.Namespace) -> int:
    """Plan in the precision that is asked for, else that of the model's file.

    Raises:
        ConfigError: the input is wrong.
        PlanError: no plan is possible. Where a precision is why, either says whether the model's file asks for it.
    """
    if args.precision is not None:
        return _planned(args)
    said = precision_of(args.model)
    args.precision = said or PRECISION
    try:
        return _planned(args)
    except (ConfigError, PlanError) as error:
        if said is None or said not in str(error):
            raise
        raise type(error)(f"{error}; {said} is what {args.model} says, --precision chooses another") from None


def _planned(args: argparse.Namespace) -> int:
    wanted = outputs(args, compares=True)
    for flag, path in (("--out", args.out), ("--uniform-out", args.uniform_out)):
        if path is not None:
            check_output(path, asked_by=flag)
    model, cluster = load_model(args.model), load(ClusterSpec, args.cluster).with_host_memory_gib(args.host_memory_gib)
    costs = model_costs(
        model,
        seq_length=model.max_position_embeddings if args.seq_length is None else args.seq_length,
        precision=args.precision,
        profiles=args.profile,
        data_sheets=args.data_sheets,
        runtime=HETERO.with_dropout(hidden=args.hidden_dropout, attention=args.attention_dropout),
        where=cluster,
    )
    problem = Problem(
        cluster=cluster,
        costs=costs,
        global_batch_size=args.global_batch_size,
        distributed_optimizer=args.use_distributed_optimizer,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        goal=args.objective,
        budget_per_hour=args.budget_per_hour,
        time_limit_s=args.time_limit,
        seed=args.seed,
        splits_backward=not args.no_split_backward,
        fp8=args.fp8,
        interleaves=not args.no_interleave,
        offload=args.offload,
    )
    others = _yardsticks(problem, args, compares=args.compare or wanted.comparison)
    uniform = choose_uniform(others, problem)
    result = _with_progress(problem, others, args.processes or usual_processes())
    out = console()
    certainty = certainty_of(result.simulation, problem.topology, costs, result.runners_up)
    if args.out is not None:
        where = _save(result.simulation, certainty.step, problem, args.command_line, args.out)
    found, commands_of = utilizations(result.simulation, costs), partial(plan_again, args)
    out.print(prediction_table(result.simulation, result.memory, problem.cluster, certainty.step))
    if (on_hosts := host_memory_table(result.plan, problem.cluster)) is not None:
        out.print(on_hosts)
    print(f"\n{plan_picture(result.plan, room=out.width)}\n")
    for line in (*unusable_lines(problem), *result_lines(result, certainty, found, commands_of)):
        print(line)
    if args.out is not None:
        print(f"written to {where}")
    if args.uniform_out is not None:
        print(_save_uniform(problem, result, uniform, args))
    compared = others if args.compare or wanted.comparison else ()
    rivals = certainty_of(result.simulation, problem.topology, costs, _runners_up(result, compared, problem)).rivals
    if compared:
        print()
        out.print(comparison_table(result, compared, problem.cluster, rivals))
    if wanted.wanted:
        report = Report(
            model_name=_name_of(args.model),
            cluster_name=args.cluster.stem,
            cluster=problem.cluster,
            costs=costs,
            simulation=result.simulation,
            memory=result.memory,
            certainty=certainty,
            result=result,
            others=compared,
            rivals=rivals,
            plan_file=args.out,
            commands=every_command(certainty, commands_of),
        )
        for line in written(wanted, report):
            print(line)
    answer(
        args,
        lambda: {
            **prediction_json(result.simulation, result.memory, cluster, certainty, found, commands_of),
            "bounds": bounds_json(result),
        },
    )
    return 0


def _runners_up(result: "PlanResult", others: Sequence[Yardstick], problem: Problem) -> list[RunnerUp]:
    """The yardsticks that have a plan, beside the planner's."""
    goal = goal_value(result.scored, problem)
    return [
        RunnerUp(each.name, each.best.simulation, goal_value(each.best, problem) / goal)
        for each in others
        if each.best is not None
    ]


def _name_of(model: Path) -> str:
    """What the model's file is called; every file of Hugging Face's is called alike, its folder is not."""
    return model.absolute().parent.name if model.name == "config.json" else model.stem


def _yardsticks(problem: Problem, args: argparse.Namespace, *, compares: bool) -> tuple[Yardstick, ...]:
    """Search what others would plan, as far as the command line asks for it; the planner's plan is to be no worse.

    Raises:
        PlanError: no plan is possible at all.
        ConfigError: no uniform plan was found, and one is to be written; or a link or a profile is missing.
    """
    if not compares and args.uniform_out is None:
        return ()
    check_problem(problem)
    search = yardsticks if compares else uniform_yardsticks
    watched = console(stderr=True)
    status = Status("planning in other manners, to compare ...", console=watched)
    with status if watched.is_terminal else nullcontext():
        found = search(problem)
    if args.uniform_out is not None and (uniform := choose_uniform(found, problem)).best is None:
        raise ConfigError(f"--uniform-out {args.uniform_out}: {_why_no_uniform(uniform)}; leave it out")
    return found


def _why_no_uniform(uniform: Yardstick) -> str:
    if uniform.timed_out:
        return "time ran out before a uniform plan was found, which does not mean that none fits"
    return f"this model has no uniform plan on these devices: {uniform.why_none}"


def _save(simulation: Simulation, step: StepRange, problem: Problem, command: str, path: Path) -> str:
    """Write a plan with what is known of where it comes from; returns what to call the place."""
    plan = with_provenance(simulation, step, cluster=problem.cluster, command=command)
    return write_output(path, to_json(plan).encode("utf-8"))


def _save_uniform(problem: Problem, result: "PlanResult", uniform: Yardstick, args: argparse.Namespace) -> str:
    """Write the best uniform plan; returns what it is, in words."""
    best = uniform.best
    assert best is not None, "the command ends before it plans if there is none"
    step = certainty_of(best.simulation, problem.topology, problem.costs).step
    where = _save(best.simulation, step, problem, args.command_line, args.uniform_out)
    ratio = f"{goal_value(best, problem) / goal_value(result.scored, problem):.2f}x"
    if problem.goal == "money":
        ratio += " by money"
    return f"best uniform plan ({uniform.name}): {best.step_s:.4g} s per step, {ratio}; written to {where}"


def _with_progress(problem: Problem, others: Sequence[Yardstick], processes: int) -> "PlanResult":
    """Plan, with best and bound on stderr while it runs if somebody watches."""
    # OR-Tools takes a second to load; what is wrong with the question is told before.
    from hetero.planner.plan_cluster import plan_cluster

    watched = console(stderr=True)
    if not watched.is_terminal:
        return plan_cluster(problem, yardsticks=others, processes=processes)
    with Status("looking at replica templates ...", console=watched) as status:

        def report(progress: "SearchProgress") -> None:
            status.update(
                f"{progress.elapsed_s:.0f} s: best {progress.best_s:.4g} s per step, "
                f"none below {progress.bound_s:.4g} s"
            )

        return plan_cluster(problem, yardsticks=others, report=report, processes=processes)


def _simulate(args: argparse.Namespace) -> int:
    wanted = outputs(args, compares=False)
    if args.trace is not None:
        check_output(args.trace, asked_by="--trace")
    check_measure(args)
    plan = legal_plan(args.plan)
    cluster = load(ClusterSpec, args.cluster)
    check_plan_on_cluster(plan, cluster)
    costs = plan_costs(plan, cluster, profiles=args.profile, data_sheets=args.data_sheets)
    simulation = simulate(plan, cluster, costs)
    memory = plan_memory(plan, costs)
    too_large = memory_error(plan, cluster, costs, memory)
    certainty, found = certainty_of(simulation, Topology(cluster), costs), utilizations(simulation, costs)
    again = partial(simulate_again, args, plan)
    out = console()
    out.print(prediction_table(simulation, memory, cluster, certainty.step))
    if (on_hosts := host_memory_table(plan, cluster)) is not None:
        out.print(on_hosts)
    print(
        f"{simulation.step_s:.4g} s per step ({range_of(certainty.step)}), {simulation.samples_per_s:.4g} samples/s, "
        f"{simulation.tokens_per_s:.4g} tokens/s"
    )
    for line in (*utilization_lines(found), *certainty_lines(certainty, again)):
        print(line)
    ran = None
    executions: tuple[Execution, ...] = ()
    if args.measure and too_large is None:
        run = measured(args, simulation)
        ran = executed(run, costs)
        executions = (Execution(name=args.plan.stem, predicted=simulation, executed=ran, losses=run.losses),)
        out.print(measurement_table(simulation, ran))
        for line in measurement_lines(simulation, ran, time_scale=run.time_scale, lateness_s=run.lateness_s):
            print(line)
    if args.trace is not None:
        trace = json.dumps(chrome_trace(simulation, costs, executed=ran))
        print(f"trace written to {write_output(args.trace, trace.encode())}; open it in ui.perfetto.dev")
    report = Report(
        model_name=args.plan.name,
        cluster_name=args.cluster.stem,
        cluster=cluster,
        costs=costs,
        simulation=simulation,
        memory=memory,
        certainty=certainty,
        executions=executions,
        plan_file=args.plan,
        commands=every_command(certainty, again),
    )
    for line in written(wanted, report):
        print(line)
    answer(args, lambda: prediction_json(simulation, memory, cluster, certainty, found, again))
    if too_large is not None:
        # What it would take is told all the same, and then that it cannot be.
        raise too_large
    return 0
