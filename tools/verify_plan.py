#!/usr/bin/env python3
"""Show that a plan trains what one process trains: the same loss, gradient norm and weights, step by step.

    torchrun --nproc-per-node 8 tools/verify_plan.py --verify-steps 5 <the flags of pretrain_gpt.py>

All ranks train the first steps under the plan; then rank 0 trains them again alone, on the same data from the same
initial weights, and compares. In fp64 (the default) any disagreement beyond rounding is an error in the plan's
execution; in fp32 it also shows what the order of summation does. The whole model has to fit on rank 0.

Two terms of training depend on the plan and not on rounding. Dropout draws its numbers per rank: both trainings leave
it out. The auxiliary loss aux_loss is a mean over each microbatch: the one process has the plan's microbatches, and
where these differ in size, both trainings have seq_aux_loss instead. A line says so.
"""

import argparse
import contextlib
import dataclasses
import functools
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
exit_if_unusable("verify_plan.py")
set_cuda_environment(os.environ)

import numpy as np
from rich.table import Table

from hetero.command_line import COUNT, Parser
from hetero.console import console
from hetero.distributed.process_exit import bounded_exit
from hetero.errors import ConfigError, HeteroError
from hetero.plan.ir import Plan, Precision
from hetero.plan.rank_description import describe_rank
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.printable import printable_output
from hetero.progress import WorkProgress
from hetero.spec.parameters import Parameter, parameters, shard_intervals
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.error_file import exit_code

if TYPE_CHECKING:
    import torch

    from hetero.runtime.optimizer import StepResult
    from megatron.pretrain.data import SampleDataset

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3}
"""Largest difference of a weight, relative to the largest weight of its tensor. AdamW's first steps turn a rounding
error of a tiny gradient into a whole step of the learning rate, so fp32 cannot be held to much."""

Weights = dict[str, "torch.Tensor"]


@dataclasses.dataclass(frozen=True)
class Shards:
    """The weights of one rank by canonical name, and which shard of them it holds."""

    tp: int
    tp_rank: int
    weights: Weights


@printable_output()
def main(argv: Sequence[str]) -> int:
    """Exit code 0 if they agree, 1 if not, 2 for wrong input."""
    try:
        # What is wrong with the command line is told before torch is imported, which takes seconds.
        own, flags = _parser().parse_known_args(argv)
        config = parse_args(flags)
        if config.emulation is not None:
            raise ConfigError("verify_plan.py: nothing is emulated here; leave --hetero-emulate out")
        return _verify(config, num_steps=own.verify_steps, precisions=own.verify_precision)
    except HeteroError as error:
        return exit_code(error, os.environ)


def _verify(config: PretrainConfig, *, num_steps: int, precisions: Sequence[Precision]) -> int:
    """Train and compare; collective over the world of the launch. The exit code of this rank.

    Raises:
        HeteroError: the plan, the data or the launch is wrong.
    """
    from hetero.runtime import cpu_backend

    # Before megatron.core is imported by anyone.
    cpu_backend.install()
    import torch.distributed as dist

    from megatron.pretrain.launch import joined, launch_from
    from megatron.pretrain.training import agree_on_plan_and_tokenizer, build_datasets, memory_errors

    launch = launch_from(os.environ)
    with contextlib.ExitStack() as stack:
        told = _untold if launch.rank != 0 else stack.enter_context(_Steps(2 * num_steps * len(precisions))).count
        with joined(launch, config.parallel) as (device, detector), memory_errors(detector, launch.rank):
            plan, tokenizer = agree_on_plan_and_tokenizer(config, device)
            detector.describe = functools.partial(describe_rank, plan)
            detector.doing = "building the dataset"
            dataset, _ = build_datasets(config, plan, tokenizer)
            config, notes = _comparable(_first_steps(config, num_steps), plan)
            plans = [plan.with_precision(precision) for precision in precisions]
            detector.doing = "training the steps to verify"
            together = [
                _gathered(*_train(config, each, dataset, device, told=functools.partial(told, "under the plan")))
                for each in plans
            ]
        if launch.rank != 0:
            return 0
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        size = plan.micro_batch_sizes[0] if config.stage.aux_loss_is_per_microbatch else 1
        alone = [
            _train(config, _one_process(each, size), dataset, device, told=functools.partial(told, "in one process"))
            for each in plans
        ]
        dist.destroy_process_group()
    for note in notes:
        print(note)
    agrees = True
    for each, (results, shards), (expected, whole) in zip(plans, together, alone, strict=True):
        assert whole is not None
        agrees &= _report(each, results, expected, shards, whole.weights)
    return 0 if agrees else 1


class _Steps(WorkProgress):
    """Counts the steps of all trainings that are compared."""

    def __init__(self, total: int) -> None:
        super().__init__("verifying", total=total, text="starting")
        self._total = total
        self._done = 0

    def count(self, how: str) -> None:
        """Another step is done, ``how`` says by whom."""
        self._done += 1
        self.show(self._done, f"step {self._done} of {self._total}, {how}")


def _untold(how: str) -> None:
    """Say nothing: another rank does."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="verify_plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, passes_on=True
    )
    parser.add_argument("--verify-steps", type=COUNT, default=5, help="steps to train and compare (default 5)")
    parser.add_argument("--verify-precision", nargs="+", choices=list(TOLERANCES), default=["fp64"])
    return parser


def _first_steps(config: PretrainConfig, num_steps: int) -> PretrainConfig:
    """The same run, cut short; the learning rate follows the schedule of the whole run."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, train_iters=num_steps))


def _comparable(config: PretrainConfig, plan: Plan) -> tuple[PretrainConfig, list[str]]:
    """Leave out what one process cannot compute as the plan does; returns a line about each change."""
    stage, notes = config.stage, []
    if stage.hidden_dropout or stage.attention_dropout:
        stage = dataclasses.replace(stage, hidden_dropout=0.0, attention_dropout=0.0)
        notes.append("compared without dropout, whose random numbers are per rank")
    if stage.aux_loss_is_per_microbatch and len(plan.micro_batch_sizes) > 1:
        stage = dataclasses.replace(stage, moe_router_load_balancing="seq_aux_loss")
        sizes = " and ".join(map(str, plan.micro_batch_sizes))
        notes.append(
            "compared with seq_aux_loss in place of aux_loss, which is a mean over each microbatch: the plan has them "
            f"of {sizes} samples, so no single process computes that loss"
        )
    return dataclasses.replace(config, stage=stage), notes


def _train(
    config: PretrainConfig,
    plan: Plan,
    dataset: "SampleDataset",
    device: "torch.device",
    *,
    told: Callable[[], None],
) -> "tuple[list[StepResult], Shards | None]":
    """Train the steps of ``config``; collective over the world. An idle rank returns no shards.

    Args:
        told: called after every step.
    """
    from hetero.distributed.process_groups import create_groups
    from megatron.pretrain.training import start_session

    context = create_groups(plan, device=device)
    session = start_session(config, context, dataset)
    results = []
    for _ in range(config.run.train_iters):
        results.append(session.step())
        told()
    if context.work is None:
        return results, None
    weights = {name: tensor.cpu() for name, tensor in session.weights().items()}
    return results, Shards(context.work.stage.tp, context.work.placement.tp_rank, weights)


def _gathered(results: "list[StepResult]", shards: Shards | None) -> "tuple[list[StepResult], list[Shards]]":
    """The results, and on rank 0 the shards of all working ranks; collective over the world."""
    import torch.distributed as dist

    everyone: list[Shards | None] = [None] * dist.get_world_size()
    dist.gather_object(shards, everyone if dist.get_rank() == 0 else None)
    return results, [held for held in everyone if held is not None]


def _one_process(plan: Plan, micro_batch_size: int) -> Plan:
    return uniform_plan(
        UniformLayout(
            model=plan.model,
            world_size=1,
            micro_batch_size=micro_batch_size,
            global_batch_size=plan.global_batch_size,
            seq_length=plan.seq_length,
            device=plan.replicas[0].stages[0].device,
            precision=plan.precision,
        )
    )


def _report(
    plan: Plan, results: "list[StepResult]", alone: "list[StepResult]", shards: list[Shards], whole: Weights
) -> bool:
    from megatron.pretrain.training import LOG_COLUMNS

    by_name = {parameter.name: parameter for parameter in parameters(plan.model)}
    name, error = _worst_weight(by_name, shards, whole)
    tolerance = TOLERANCES[plan.precision]
    table = Table(title=f"the plan against one process, {plan.precision}", title_justify="left")
    for header in ("step", "loss, plan", "loss, one process", "difference", "grad norm, plan", "difference"):
        table.add_column(header, justify="right")
    for step, (ours, theirs) in enumerate(zip(results, alone, strict=True), start=1):
        table.add_row(
            str(step),
            f"{ours.loss:.9f}",
            f"{theirs.loss:.9f}",
            f"{abs(ours.loss - theirs.loss):.1e}",
            f"{ours.grad_norm:.6f}",
            f"{abs(ours.grad_norm - theirs.grad_norm):.1e}",
        )
    worst_loss, largest_loss = _worst([r.loss for r in results], [r.loss for r in alone])
    worst_norm, largest_norm = _worst([r.grad_norm for r in results], [r.grad_norm for r in alone])
    agrees = error <= tolerance and worst_loss <= tolerance * largest_loss and worst_norm <= tolerance * largest_norm
    out = console(width=LOG_COLUMNS, highlight=False)
    out.print(table)
    out.print(
        f"largest difference after {len(results)} steps: loss {worst_loss:.1e}, grad norm {worst_norm:.1e}, "
        f"weights {error:.1e} of the largest "
        f"in {name} (limit {tolerance:.0e}): {'they agree' if agrees else 'THEY DO NOT AGREE'}",
        soft_wrap=True,
    )
    return agrees


def _worst(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The largest difference, and the largest value. What is no number differs from everything, itself too; ``max()``
    would pass over it."""
    return float(np.abs(np.array(ours) - np.array(theirs)).max()), float(np.abs(np.array(theirs)).max())


def _worst_weight(by_name: dict[str, Parameter], shards: list[Shards], whole: Weights) -> tuple[str, float]:
    """The tensor that differs most, one with a NaN before others, and by how much relative to its largest weight."""
    from hetero.runtime.named_parameters import take_shard

    names, errors = [], []
    for held in shards:
        for name, weight in held.weights.items():
            intervals = shard_intervals(by_name[name], tp=held.tp, tp_rank=held.tp_rank)
            expected = take_shard(whole[name], by_name[name], intervals)
            difference = (weight - expected).abs().max()
            names.append(name)
            # Biases may all be 0 still.
            errors.append(float(difference / expected.abs().max()) if difference != 0 else 0.0)
    worst = int(np.argmax(errors))
    return names[worst], errors[worst]


if __name__ == "__main__":
    with bounded_exit():
        sys.exit(main(sys.argv[1:]))
