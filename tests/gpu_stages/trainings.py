"""Trains with ``pretrain_gpt.py`` on one rank, or on two that share a device, and checks losses.

    python -m tests.gpu_stages.trainings {ramp-up,experts,two-ranks,precision} [--device cpu]

Prints a table; what the trainings themselves print goes to standard error as it comes. Exit code 1 if a check fails.
"""

import argparse
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.gpu_stages.target import Target, add_target_options, target_of
from tests.helpers.sources import ROOT

LOSS_BOUND_OF_RANKS = 1e-5
"""Relative, in fp32 over ten steps; an H200 had 1e-6."""

LOSS_BOUND_OF_HALF = 1e-2
"""Relative, of ten steps in half precision and in fp32; an H200 had 0.3 % in bf16."""

NUM_STEPS = 10

_STEP = re.compile(
    r"^step +\d+/\d+ \|(?: batch (?P<batch>\d+) \|)? loss (?P<loss>[\d.]+|nan|inf) .*\| step time (?P<ms>[\d.,]+) ms"
)
_RECOMPILED = re.compile(r"Recompiling function (\S+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One training.

    flags: of ``pretrain_gpt.py``.
    variables: added to its environment.
    """

    name: str
    flags: tuple[str, ...]
    num_ranks: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class TrainingRun:
    """What a training printed.

    batches: of each step, where the batch grows.
    seconds: of each step, from its log line.
    first_step_s: from the start of the process to the log line of its first step; None without one.
    recompiled: functions that torch compiled again after the first step.
    exit_codes: one for each rank.
    """

    training: Training
    losses: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_step_s: float | None = None
    recompiled: list[str] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def read(self, line: str, *, at_s: float) -> None:
        """Add what ``line`` of a log says, which came ``at_s`` seconds after the start."""
        step = _STEP.match(line)
        if step is not None:
            self.batches += [int(step["batch"])] if step["batch"] else []
            self.losses.append(float(step["loss"]))
            self.seconds.append(float(step["ms"].replace(",", "")) / 1e3)
            if self.first_step_s is None:
                self.first_step_s = at_s
        recompilation = _RECOMPILED.search(line)
        if recompilation is not None and self.losses:
            self.recompiled.append(recompilation[1])

    @property
    def row(self) -> str:
        """Return its row of the table."""
        later = self.seconds[1:]
        cells = (
            self.training.name,
            str(self.training.num_ranks),
            str(len(self.losses)),
            f"{self.losses[0]:.6f} to {self.losses[-1]:.6f}" if self.losses else "-",
            f"{1e3 * statistics.median(later):.1f}" if later else "-",
            f"{1e3 * max(later):.1f}" if later else "-",
            f"{self.first_step_s:.1f}" if self.first_step_s is not None else "-",
            str(len(self.recompiled)),
        )
        return f"| {' | '.join(cells)} |"


HEAD = """| training | ranks | steps | loss | later steps, median ms | slowest ms | s to the first | recompiled later |
|---|--:|--:|---|--:|--:|--:|--:|"""


def model_flags(
    *, layers: int, hidden: int, heads: int, groups: int, seq: int, vocab: int, ffn: int | None = None
) -> tuple[str, ...]:
    """Return flags of a Llama-style model with ``vocab`` tokens, on mock data and without dropout."""
    words = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --group-query-attention "
        f"--num-query-groups {groups} --seq-length {seq} --max-position-embeddings {seq} --vocab-size {vocab - 1} "
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--untie-embeddings-and-output-weights --mock-data --tokenizer-type NullTokenizer --attention-dropout 0 "
        f"--hidden-dropout 0 --lr 3e-4 --seed 7 --log-interval 1 --eval-iters 0 --train-iters {NUM_STEPS}"
    )
    return (*words.split(), *(("--ffn-hidden-size", str(ffn)) if ffn is not None else ()))


def small_flags(target: Target) -> tuple[str, ...]:
    """Return flags of the model of all stages whose step time means nothing."""
    if target.device == "cuda":
        return model_flags(layers=4, hidden=256, heads=8, groups=4, seq=128, vocab=4096)
    return model_flags(layers=2, hidden=64, heads=4, groups=2, seq=16, vocab=256)


def run_training(training: Training) -> TrainingRun:
    """Train, and return what was printed. All ranks are processes of this host."""
    run = TrainingRun(training=training)
    port = _free_port()
    begin = time.monotonic()
    processes = [_start_rank(training, rank, port) for rank in range(training.num_ranks)]
    readers = [
        threading.Thread(target=_read_log, args=(process, rank, run, begin)) for rank, process in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    run.exit_codes = [process.wait() for process in processes]
    return run


def _start_rank(training: Training, rank: int, port: int) -> "subprocess.Popen[str]":
    variables: dict[str, str] = {**os.environ, **training.variables, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if training.num_ranks > 1:
        count = str(training.num_ranks)
        variables |= {"RANK": str(rank), "WORLD_SIZE": count, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": count}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "pretrain_gpt.py", *training.flags],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _read_log(process: "subprocess.Popen[str]", rank: int, run: TrainingRun, begin: float) -> None:
    """Pass on what a rank prints; rank 0 logs the steps."""
    assert process.stdout is not None
    for line in process.stdout:
        if rank == 0:
            run.read(line, at_s=time.monotonic() - begin)
        sys.stderr.write(f"{run.training.name} rank {rank}: {line}")
        sys.stderr.flush()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def check_finished(run: TrainingRun, num_steps: int | None = NUM_STEPS) -> Iterator[str]:
    """Yield what is wrong with a run that should have taken ``num_steps``; None: as many as it takes."""
    if any(run.exit_codes):
        yield f"{run.training.name}: exit codes {', '.join(map(str, run.exit_codes))}"
    elif not run.losses or (num_steps is not None and len(run.losses) != num_steps):
        yield f"{run.training.name}: {len(run.losses)} steps instead of {num_steps}"


def check_losses(runs: Sequence[TrainingRun], bound: float) -> Iterator[str]:
    """Yield the runs whose losses are farther than ``bound`` from those of the first one, relatively."""
    expected, *others = runs
    for run in others:
        distances = [abs(loss - exact) / abs(exact) for loss, exact in zip(run.losses, expected.losses, strict=False)]
        farthest = max(distances, default=math.nan, key=lambda distance: (math.isnan(distance), distance))
        print(f"\n{run.training.name}: losses within {farthest:.1e} of {expected.training.name}'s, bound {bound:.0e}")
        if not farthest <= bound:
            yield f"{run.training.name}: losses are {farthest:.1e} from {expected.training.name}'s, bound {bound:.0e}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """Trainings that run at the same time, and the check of what they printed."""

    trainings: tuple[Training, ...]
    check: Callable[[Sequence[TrainingRun]], Iterator[str]]


def make_ramp_up(target: Target) -> Experiment:
    """Return a training whose batch grows from 4 over 8 to 16."""
    flags = list(small_flags(target))
    place = flags.index("--train-iters")
    flags[place : place + 2] = ["--train-samples", "44", "--rampup-batch-size", "4", "4", "16"]
    batch = ("--micro-batch-size", "2", "--global-batch-size", "16", f"--{target.half}")
    return Experiment(trainings=(Training(name="ramp-up", flags=(*flags, *batch)),), check=check_ramp_up)


def check_ramp_up(runs: Sequence[TrainingRun]) -> Iterator[str]:
    """Yield what is wrong with a training whose batch should have grown to 16."""
    (run,) = runs
    yield from check_finished(run, num_steps=None)
    if run.batches[:1] + run.batches[-1:] != [4, 16]:
        yield f"the batches were {run.batches}, instead of 4 at first and 16 at last"


def make_experts(target: Target) -> Experiment:
    """Return a training of experts, whose numbers of tokens differ from step to step."""
    batch = ("--micro-batch-size", "2", "--global-batch-size", "8", f"--{target.half}")
    experts = ("--num-experts", "8", "--moe-router-topk", "2")
    training = Training(
        name="experts", flags=(*small_flags(target), *batch, *experts), variables={"TORCH_LOGS": "recompiles"}
    )
    return Experiment(trainings=(training,), check=check_experts)


def check_experts(runs: Sequence[TrainingRun]) -> Iterator[str]:
    """Yield what was compiled in the middle of a training."""
    (run,) = runs
    yield from check_finished(run)
    if run.recompiled:
        yield f"{len(run.recompiled)} recompilations after the first step: {', '.join(sorted(set(run.recompiled)))}"


def make_two_ranks(target: Target) -> Experiment:
    """Return one rank, and the same in three layouts of two ranks."""
    common = (*small_flags(target), "--micro-batch-size", "2", "--global-batch-size", "16")
    layouts = {
        "pp2": "--pipeline-model-parallel-size 2",
        "dp2": "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
        "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    }
    sharing = ("--distributed-backend", "nccl", "--hetero-share-devices") if target.device == "cuda" else ()
    two = (
        Training(name=name, flags=(*common, *words.split(), *sharing), num_ranks=2) for name, words in layouts.items()
    )
    return Experiment(trainings=(Training(name="one rank", flags=common), *two), check=check_two_ranks)


def check_two_ranks(runs: Sequence[TrainingRun]) -> Iterator[str]:
    """Yield the layouts whose losses are not those of one rank."""
    for run in runs:
        yield from check_finished(run)
    yield from check_losses(runs, LOSS_BOUND_OF_RANKS)


def make_precision(target: Target) -> Experiment:
    """Return a training in fp32 and the same in half precision."""
    common = (*small_flags(target), "--micro-batch-size", "4", "--global-batch-size", "16")
    half = Training(name=target.half, flags=(*common, f"--{target.half}"))
    return Experiment(trainings=(Training(name="fp32", flags=common), half), check=check_precision)


def check_precision(runs: Sequence[TrainingRun]) -> Iterator[str]:
    """Yield what is wrong with losses in half precision."""
    for run in runs:
        yield from check_finished(run)
    yield from check_losses(runs, LOSS_BOUND_OF_HALF)


EXPERIMENTS: Mapping[str, Callable[[Target], Experiment]] = {
    "ramp-up": make_ramp_up,
    "experts": make_experts,
    "two-ranks": make_two_ranks,
    "precision": make_precision,
}


def run_experiment(experiment: Experiment) -> int:
    """Train, print the table and what is wrong, and return the exit code."""
    trainings = experiment.trainings
    with ThreadPoolExecutor(len(trainings)) as pool:
        runs = list(pool.map(run_training, trainings))
    print("\n".join((HEAD, *(run.row for run in runs))))
    problems = list(experiment.check(runs))
    for problem in problems:
        print(f"\n**{problem}**")
    return int(bool(problems))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment that ``argv`` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    add_target_options(parser)
    arguments = parser.parse_args(argv)
    target = target_of(arguments)
    return run_experiment(EXPERIMENTS[arguments.experiment](target))


if __name__ == "__main__":
    sys.exit(main())
