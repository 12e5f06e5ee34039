#!/usr/bin/env python3
"""Plans for a cluster what the flags of pretrain_gpt.py train, before any process of the training is there.

    python tools/plan_flags.py --hetero-cluster cluster.yaml --hetero-plan-out plan.json <the flags of pretrain_gpt.py>
    hetero launch plan.json --run -- <the flags that a plan does not imply>

It is the plan that the launch itself would make with ``--hetero-cluster``: model, batch, precision, dropout and
optimizer are those of the flags, so that nobody writes a model file. Plan, prediction and memory are printed.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# The code of this checkout, whatever is installed.
if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from hetero.distributed.environment import set_cuda_environment
from megatron.pretrain.start_check import exit_if_unusable

# Before torch is imported by anyone.
exit_if_unusable("plan_flags.py")
set_cuda_environment(os.environ)

from hetero.console import console
from hetero.errors import ConfigError, HeteroError
from hetero.printable import printable_output
from hetero.report.tables.host_memory import host_memory_table
from hetero.report.tables.plan import plan_picture
from hetero.report.tables.prediction import prediction_table
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.error_file import exit_code
from megatron.pretrain.given_files import file_problems


@printable_output()
def main(argv: Sequence[str]) -> int:
    """Exit code 0 with a plan, 2 for wrong input."""
    try:
        _plan(argv)
    except HeteroError as error:
        return exit_code(error, os.environ)
    return 0


def _plan(argv: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: flags or a file that they name are wrong, nothing is to be planned, or there is no plan.
    """
    config = parse_args(argv, file_problems=file_problems)
    planner = config.parallel.planner
    if planner is None or config.emulation is not None:
        raise ConfigError(
            "plan_flags.py: plans for a described cluster; give --hetero-cluster CLUSTER.yaml, and leave "
            "--hetero-plan, --hetero-emulate and Megatron's degrees of parallelism out"
        )
    from hetero.runtime import cpu_backend

    # Before megatron.core is imported by anyone. It takes seconds, after which nobody wants to hear of a wrong flag.
    cpu_backend.install()
    from megatron.pretrain.planning import answer_lines, described_model, planned, planning_problem

    model, _ = described_model(config)
    asked = planning_problem(config, planner, model)
    result, certainty = planned(asked, planner)
    out = console()
    out.print(prediction_table(result.simulation, result.memory, asked.cluster, certainty.step))
    if (on_hosts := host_memory_table(result.plan, asked.cluster)) is not None:
        out.print(on_hosts)
    print(f"\n{plan_picture(result.plan, room=out.width)}\n")
    for line in answer_lines(asked, result, certainty):
        print(line)
    if planner.out is not None:
        print(f"written to {planner.out}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
