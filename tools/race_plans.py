#!/usr/bin/env python3
"""Runs several plans of one model on an emulated cluster, and tells who is faster and whether that was predicted.

    torchrun --nproc-per-node 4 tools/race_plans.py --plans ours.json uniform.json --report race.html \\
        --hetero-emulate cluster.yaml <the other flags of pretrain_gpt.py>

Every plan trains the same steps on the same data from the same weights; the first plan is the one that the others are
compared with. Losses have to agree to rounding, else the exit code is 1.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# The code of this checkout, whatever is installed.
if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from hetero.distributed.environment import set_cuda_environment
from megatron.pretrain.start_check import exit_if_unusable

# Before torch is imported by anyone.
exit_if_unusable("race_plans.py")
set_cuda_environment(os.environ)

import numpy as np

from hetero.command_line import Parser
from hetero.commands.report import PAGE_SUFFIXES
from hetero.console import console
from hetero.cost.memory import plan_memory
from hetero.cost.network import Topology
from hetero.cost.simulation.simulator import simulate
from hetero.distributed.process_exit import bounded_exit
from hetero.emulation.records import EmulatedRun
from hetero.emulation.timeline import executed
from hetero.errors import ConfigError, HeteroError
from hetero.output_files import write_bytes
from hetero.printable import printable_output
from hetero.progress import WorkProgress
from hetero.report.content import Execution, Report
from hetero.report.tables.fitting_table import FittingTable
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.standard_output import check_output
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.cli.parallel_config import EmulationConfig
from megatron.pretrain.error_file import exit_code

if TYPE_CHECKING:
    import torch

    from hetero.distributed.failure_detector import FailureDetector

SAME = 1e-4
"""Largest difference of two losses, relative: plans sum in another order, in fp32."""


@printable_output()
def main(argv: Sequence[str]) -> int:
    """Exit code 0 if all plans learn the same, 1 if not, 2 for wrong input."""
    try:
        # What is wrong with the command line is told before torch is imported, which takes seconds.
        own, flags = _parser().parse_known_args(argv)
        configs = [parse_args([*flags, "--hetero-plan", str(path)]) for path in own.plans]
        _check(configs[0], own.report)
        return _race(own.plans, configs, own.report)
    except HeteroError as error:
        return exit_code(error, os.environ)


def _race(plans: Sequence[Path], configs: Sequence[PretrainConfig], report: Path | None) -> int:
    """Run the plans and compare; collective over the world of the launch. The exit code of this rank.

    Raises:
        HeteroError: a plan, the data or the launch is wrong.
    """
    from hetero.runtime import cpu_backend

    # Before megatron.core is imported by anyone.
    cpu_backend.install()
    from megatron.pretrain.launch import joined, launch_from
    from megatron.pretrain.training import memory_errors

    launch = launch_from(os.environ)
    with contextlib.ExitStack() as stack:
        total = sum(config.run.train_iters for config in configs)
        shown = None
        if launch.rank == 0:
            shown = stack.enter_context(WorkProgress("racing", total=total, text="starting"))
        with joined(launch, configs[0].parallel) as (device, detector), memory_errors(detector, launch.rank):
            runs: list[EmulatedRun] = []
            for path, config in zip(plans, configs, strict=True):
                done = sum(len(run.losses) for run in runs)

                def told(step: int, path: Path = path, done: int = done) -> None:
                    if shown is not None:
                        shown.show(done + step, f"step {done + step} of {total}, {path.stem}")

                runs.append(_run(config, device, detector, told=told))
    if launch.rank != 0:
        return 0
    executions = [_execution(path, run, config) for path, run, config in zip(plans, runs, configs, strict=True)]
    agrees = _print(executions, max(run.lateness_s for run in runs))
    if report is not None:
        _write_report(report, configs[0], executions)
    return 0 if agrees else 1


def _check(config: PretrainConfig, report: Path | None) -> None:
    """
    Raises:
        ConfigError: nothing would be emulated, a flag has no effect here, or the report cannot be written.
    """
    if config.emulation is None:
        raise ConfigError("race_plans.py: plans race on an emulated cluster; add --hetero-emulate CLUSTER.yaml")
    if config.run.train_iters < 2:
        raise ConfigError("race_plans.py: the first step only warms up; give --train-iters 2 or more")
    without_effect = {
        "--save": config.checkpoint.save,
        "--load": config.checkpoint.load,
        "--eval-iters": config.run.eval_iters,
        "--tensorboard-dir": config.scalars.tensorboard_dir,
        "--wandb-project": config.scalars.wandb_project,
        "--hetero-metrics-port": config.scalars.port,
        "--profile": config.profiler.enabled,
    }
    if given := [flag for flag, value in without_effect.items() if value]:
        raise ConfigError(f"race_plans.py: {given[0]} has no effect in a race; leave it out")
    if report is not None:
        check_output(report, asked_by="race_plans.py: --report", suffixes=PAGE_SUFFIXES)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="race_plans.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, passes_on=True
    )
    parser.add_argument("--plans", type=Path, nargs="+", required=True, metavar="PLAN.json")
    parser.add_argument("--report", type=Path, metavar="OUT.html", help="write a page on the first plan and the race")
    return parser


def _run(
    config: PretrainConfig, device: "torch.device", detector: "FailureDetector", *, told: Callable[[int], None]
) -> EmulatedRun:
    """Train the steps of ``config``; collective over the world.

    Args:
        told: called after every step with its number, from 1.
    """
    import torch.distributed as dist

    from hetero.distributed.process_groups import create_groups
    from megatron.pretrain.emulation import emulated_config, start_emulation
    from megatron.pretrain.training import agree_on_plan_and_tokenizer, build_datasets, start_session

    detector.doing = f"racing {config.parallel.hetero_plan}"
    plan, tokenizer = agree_on_plan_and_tokenizer(config, device)
    emulation = start_emulation(config, plan, tokenizer, present=lambda cluster: cluster)
    config = emulated_config(config, emulation)
    dataset, _ = build_datasets(config, emulation.plan, tokenizer)
    context = create_groups(emulation.plan, device=device, timing=emulation.timing)
    session = start_session(config, context, dataset)
    losses = []
    for step in range(1, config.run.train_iters + 1):
        losses.append(session.step().loss)
        told(step)
    own = tuple(emulation.timing.steps)
    ranks = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return EmulatedRun(plan=plan, time_scale=emulation.timing.time_scale, ranks=tuple(ranks), losses=tuple(losses))


def _emulated(config: PretrainConfig) -> EmulationConfig:
    assert config.emulation is not None, "main checks it"
    return config.emulation


def _cluster(config: PretrainConfig) -> ClusterSpec:
    return load(ClusterSpec, _emulated(config).cluster)


def _execution(path: Path, run: EmulatedRun, config: PretrainConfig) -> Execution:
    from megatron.pretrain.emulation import emulated_costs

    costs = emulated_costs(config, run.plan)
    return Execution(
        name=path.stem,
        predicted=simulate(run.plan, _cluster(config), costs),
        executed=executed(run, costs),
        losses=run.losses,
    )


def _print(executions: Sequence[Execution], lateness_s: float) -> bool:
    from megatron.pretrain.training import LOG_COLUMNS

    out = console(width=LOG_COLUMNS, highlight=False)
    ours = executions[0]
    table = FittingTable(title="EMULATED: steps of the described cluster on this processor")
    table.add_column("plan")
    headers = ("predicted s", "executed s", "prediction off by", f"times {ours.name}", "loss, first step", "last step")
    for header in headers:
        table.add_column(header, justify="right")
    for each in executions:
        predicted_s, executed_s = each.predicted.step_s, each.executed.step_s
        table.add_row(
            each.name,
            f"{predicted_s:.3f}",
            f"{executed_s:.3f}",
            f"{predicted_s / executed_s - 1:+z.2%}",
            f"{executed_s / ours.executed.step_s:.2f}x",
            f"{each.losses[0]:.6f}",
            f"{each.losses[-1]:.6f}",
        )
    out.print(table)
    losses = np.array([each.losses for each in executions])
    # What is no number differs from everything, itself too; max() would pass over it.
    worst = float(np.abs(losses / losses[0] - 1).max())
    agrees = worst <= SAME
    verdict = "the same" if agrees else "NOT the same"
    out.print(f"losses of all {len(ours.losses)} steps are {verdict}: they differ by {worst:.1e} at most (relative)")
    out.print(f"this machine was late by {lateness_s * 1e3:.0f} ms of emulated time at most")
    return agrees


def _write_report(path: Path, config: PretrainConfig, executions: Sequence[Execution]) -> None:
    from hetero.planner.certainty import certainty_of
    from hetero.report.page.html_page import html_page
    from megatron.pretrain.emulation import emulated_costs

    simulation, cluster = executions[0].predicted, _cluster(config)
    costs = emulated_costs(config, simulation.plan)
    report = Report(
        model_name=f"{simulation.plan.model.num_layers} layers of hidden size {simulation.plan.model.hidden_size}",
        cluster_name=_emulated(config).cluster.stem,
        cluster=cluster,
        costs=costs,
        simulation=simulation,
        memory=plan_memory(simulation.plan, costs),
        certainty=certainty_of(simulation, Topology(cluster), costs),
        executions=tuple(executions),
    )
    write_bytes(path, html_page(report).encode())
    print(f"report written to {path}")


if __name__ == "__main__":
    with bounded_exit():
        sys.exit(main(sys.argv[1:]))
