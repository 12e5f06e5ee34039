"""Runs of four steps that stop after two, or go on from there."""

import dataclasses

from hetero.plan.ir import Plan
from tests.helpers.commands import command_line
from tests.helpers.ranks import run_ranks
from tests.helpers.sessions import Session, session

END = 4
HALF = 2
SHARDED = {"use_distributed_optimizer": "", "overlap_param_gather": ""}


def run(plan: Plan, *, sharded: bool, end_step: int, **flags: str | None) -> list[Session]:
    argv = command_line(
        global_batch_size=str(plan.global_batch_size),
        train_iters=str(END),
        hetero_plan="given.json",
        init_method_std="0.1",
        **(SHARDED if sharded else {}),
        **flags,
    )
    return run_ranks(session, plan.world_size, dataclasses.replace(plan, distributed_optimizer=sharded), argv, end_step)
