"""Holds the cost model against whole training runs that others measured.

    python tests/bench/bench_cost_model.py                       the shipped runs
    python tests/bench/bench_cost_model.py --runs OTHER.csv      other runs, see tests/data/published_runs/README.md
    python tests/bench/bench_cost_model.py --leave-one-out       the calibrated constants, each run left out in turn
    python tests/bench/bench_cost_model.py --estimates           estimates of models whose profile is left out
    python tests/bench/bench_cost_model.py --write docs/cost_model.md

Prints tables in Markdown. With ``--write`` they replace what the page has between its markers.
"""

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.latency import CostModel
from hetero.cost.memory import plan_memory
from hetero.cost.simulator import simulate
from hetero.cost.traits import DEEPSPEED, RuntimeTraits
from hetero.data import shipped_profiles
from hetero.spec.profile import ProfileStore
from hetero.units import GB
from tests.helpers.published_runs import FOLDER, PublishedRun, read_runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What is calibrated on whole runs; everything else is measured elsewhere or counted."""

    isolation_s: float
    sync_host_gb_per_s: float
    context_gib: float
    allocator_slack: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One run: measured and predicted."""

    run: PublishedRun
    step_s: float
    peak_bytes: float

    @property
    def time_error(self) -> float:
        return self.step_s / self.run.step_s - 1

    @property
    def memory_error(self) -> float:
        return self.peak_bytes / self.run.peak_bytes - 1


def shipped_constants() -> Constants:
    profile = next(iter(shipped_profiles()))
    return Constants(
        isolation_s=profile.isolation_s,
        sync_host_gb_per_s=DEEPSPEED.sync_host_gb_per_s,
        context_gib=dict(DEEPSPEED.context_gib)["GH200"],
        allocator_slack=DEEPSPEED.allocator_slack,
    )


def compare(run: PublishedRun, constants: Constants) -> Comparison:
    """Predict ``run`` as DeepSpeed executes it."""
    model = cost_model(run, constants)
    predicted = simulate(run.plan, run.cluster, model)
    peak = max(parts.total for parts in plan_memory(run.plan, model).values())
    return Comparison(run=run, step_s=predicted.step_s, peak_bytes=peak)


def cost_model(run: PublishedRun, constants: Constants) -> CostModel:
    profiles = ProfileStore(dataclasses.replace(p, isolation_s=constants.isolation_s) for p in shipped_profiles())
    traits: RuntimeTraits = dataclasses.replace(
        DEEPSPEED,
        sync_host_gb_per_s=constants.sync_host_gb_per_s,
        context_gib=tuple((name, constants.context_gib) for name, _ in DEEPSPEED.context_gib),
        allocator_slack=constants.allocator_slack,
    )
    return CostModel(
        model=run.plan.model,
        seq_length=run.plan.seq_length,
        precision=run.plan.precision,
        profiles=profiles,
        traits=traits,
    )


ISOLATIONS_S = [i * 1e-5 for i in range(0, 13)]
HOSTS_GB_PER_S = [4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 9.0, 10.0, 12.0, 16.0]
CONTEXTS_GIB = [3.0 + 0.1 * i for i in range(21)]
SLACKS = [0.01 * i for i in range(16)]


class Calibration:
    """Errors of every run on grids of the two constants of time and the two of memory, computed once."""

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        start = shipped_constants()
        self.times = {
            (isolation_s, host): [
                compare(
                    run, dataclasses.replace(start, isolation_s=isolation_s, sync_host_gb_per_s=host)
                ).time_error
                for run in runs
            ]
            for isolation_s, host in itertools.product(ISOLATIONS_S, HOSTS_GB_PER_S)
        }
        self.memories = {
            (context, slack): [
                compare(run, dataclasses.replace(start, context_gib=context, allocator_slack=slack)).memory_error
                for run in runs
            ]
            for context, slack in itertools.product(CONTEXTS_GIB, SLACKS)
        }

    def best(self, chosen: Iterable[int]) -> tuple[tuple[float, float], tuple[float, float]]:
        """The constants with the least sum of squared relative errors over the runs with these numbers."""
        numbers = list(chosen)

        def squares(errors: Sequence[float]) -> float:
            return sum(errors[i] ** 2 for i in numbers)

        return (
            min(self.times, key=lambda key: squares(self.times[key])),
            min(self.memories, key=lambda key: squares(self.memories[key])),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=FOLDER / "opt350m_gh200.csv")
    parser.add_argument("--leave-one-out", action="store_true")
    args = parser.parse_args()
    runs = read_runs(args.runs)
    if args.leave_one_out:
        calibration = Calibration(runs)
        print("all", calibration.best(range(len(runs))))
        te=[];me=[]
        for left_out in range(len(runs)):
            time, memory = calibration.best(i for i in range(len(runs)) if i != left_out)
            te.append(calibration.times[time][left_out]); me.append(calibration.memories[memory][left_out])
            print(runs[left_out].label, time, memory, te[-1], me[-1])
        print(sum(map(abs,te))/15,max(map(abs,te)),sum(map(abs,me))/15,max(map(abs,me)))


if __name__ == "__main__":
    main()
