"""Holds the cost model against whole training runs and layers that others measured.

    python tests/bench/bench_cost_model.py                           the shipped runs, step time and peak memory
    python tests/bench/bench_cost_model.py --runs OTHER.csv          other runs in a table of the same columns
    python tests/bench/bench_cost_model.py --estimates               layers of models whose profile is left out
    python tests/bench/bench_cost_model.py --leave-one-out           the calibrated constants, each run left out in turn
    python tests/bench/bench_cost_model.py --write docs/cost_model.md

Prints tables in Markdown. ``--write`` puts the first two between the markers of the page; the third takes minutes.
"""

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.cost_model import CostModel
from hetero.cost.memory import plan_memory
from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.cost.simulation.simulator import simulate
from hetero.data import shipped_profiles
from hetero.data.sailor import MODELS
from hetero.spec.profile import LayerKind, Profile, ProfileStore
from hetero.units import GB
from tests.helpers.published_runs import FOLDER, PublishedRun, published_model, read_runs

RUNS = FOLDER / "opt350m_gh200.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What is calibrated on whole runs; everything else is measured elsewhere or counted."""

    isolation_s: float
    sync_host_gb_per_s: float
    context_gib: float
    allocator_slack: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One run: measured and predicted. Errors are relative to the measured."""

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
    """The constants as the package has them."""
    profile = next(iter(shipped_profiles()))
    return Constants(
        isolation_s=profile.isolation_s,
        sync_host_gb_per_s=DEEPSPEED.sync_host_gb_per_s,
        context_gib=dict(DEEPSPEED.context_gib)["GH200"],
        allocator_slack=DEEPSPEED.allocator_slack,
    )


def cost_model(run: PublishedRun, constants: Constants) -> CostModel:
    """The model under ``constants``, of the runtime that made the runs."""
    return CostModel(
        model=run.plan.model,
        seq_length=run.plan.seq_length,
        precision=run.plan.precision,
        profiles=ProfileStore(dataclasses.replace(p, isolation_s=constants.isolation_s) for p in shipped_profiles()),
        runtime=dataclasses.replace(
            DEEPSPEED,
            sync_host_gb_per_s=constants.sync_host_gb_per_s,
            context_gib=tuple((name, constants.context_gib) for name, _ in DEEPSPEED.context_gib),
            allocator_slack=constants.allocator_slack,
        ),
    )


def predicted_step_s(run: PublishedRun, constants: Constants) -> float:
    return simulate(run.plan, run.cluster, cost_model(run, constants)).step_s


def predicted_peak_bytes(run: PublishedRun, constants: Constants) -> float:
    """The fullest device's."""
    return max(parts.total for parts in plan_memory(run.plan, cost_model(run, constants)).values())


def compare(run: PublishedRun, constants: Constants) -> Comparison:
    return Comparison(run=run, step_s=predicted_step_s(run, constants), peak_bytes=predicted_peak_bytes(run, constants))


def runs_table(comparisons: Sequence[Comparison]) -> str:
    """Fastest measured run first; the number in brackets is the rank that the prediction gives it."""
    by_prediction = sorted(comparisons, key=lambda c: c.step_s)
    rows = [
        f"| {rank} | {c.run.label} | {c.run.step_s:.3f} | {c.step_s:.3f} [{by_prediction.index(c) + 1}] "
        f"| {c.time_error:+.1%} | {c.run.peak_bytes / GB:.1f} | {c.peak_bytes / GB:.1f} | {c.memory_error:+.1%} |"
        for rank, c in enumerate(sorted(comparisons, key=lambda c: c.run.step_s), start=1)
    ]
    return "\n".join(
        [
            "| | plan | step s, measured | predicted | error | peak GB, measured | predicted | error |",
            "|--:|---|--:|--:|--:|--:|--:|--:|",
            *rows,
            "",
            _summary("Step time", [c.time_error for c in comparisons]),
            _summary("Peak memory", [c.memory_error for c in comparisons]),
            ordered_pairs(comparisons),
        ]
    )


def _summary(what: str, errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    signed = f"mean of the signed errors {mean(errors):+.1%}"
    return f"{what}: mean error {mean(sizes):.1%}, worst {max(sizes):.1%}, {signed}.  "


def ordered_pairs(comparisons: Sequence[Comparison]) -> str:
    """How many pairs of plans for the same GPUs and batch the prediction puts in the measured order."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(comparisons, 2)
        if a.run.plan.world_size == b.run.plan.world_size
        and a.run.plan.global_batch_size == b.run.plan.global_batch_size
    ]
    right = sum((a.run.step_s < b.run.step_s) == (a.step_s < b.step_s) for a, b in pairs)
    return f"Of {len(pairs)} pairs of plans for the same GPUs and batch, {right} are in the measured order."


def estimate_errors(profile: Profile, store: ProfileStore, kind: LayerKind, *, data_sheets: bool) -> list[float]:
    """Relative errors of forward + backward of every measured time of ``profile``, estimated from ``store``."""
    costs = CostModel(
        model=published_model(next(key for key, (name, _, _) in MODELS.items() if name == profile.model)),
        seq_length=profile.seq_length,
        precision=profile.precision,
        profiles=store,
        arithmetic=profile.arithmetic,
        data_sheets=data_sheets,
    )
    errors = []
    for time in profile.times:
        if time.kind == kind:
            cost = costs.layer(kind, device=profile.device, tp=time.tp, micro_batch_size=time.micro_batch_size)
            measured_s = time.forward_s + time.backward_s - 2 * profile.isolation_s
            errors.append((cost.forward_s + cost.backward_s) / measured_s - 1)
    return errors


def estimates_table() -> str:
    """Blocks and heads of each profile, estimated without it: from other models on the device, from other devices."""
    store = shipped_profiles()
    rows = []
    for profile in store:
        others = ProfileStore(other for other in store if other.model != profile.model)
        elsewhere = ProfileStore(other for other in store if other.device != profile.device)
        has_others = profile.device in others.devices()
        cells = [
            _errors(profile, others, "block") if has_others else "no other model",
            _errors(profile, others, "head") if has_others and profile.head_has_projection else "",
            _errors(profile, elsewhere, "block", data_sheets=True),
        ]
        rows.append(f"| {profile.device} | {profile.model} | {profile.arithmetic} | {' | '.join(cells)} |")
    return "\n".join(
        [
            "| device | model left out | arithmetic | block | head | block, device left out too |",
            "|---|---|---|---|---|---|",
            *sorted(rows),
        ]
    )


def _errors(profile: Profile, store: ProfileStore, kind: LayerKind, *, data_sheets: bool = False) -> str:
    errors = [abs(error) for error in estimate_errors(profile, store, kind, data_sheets=data_sheets)]
    return f"{mean(errors):.0%}, worst {max(errors):.0%}"


Pair = tuple[float, float]

TIME_GRID = tuple(
    itertools.product([i * 1e-5 for i in range(13)], [4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 8.0, 10.0, 14.0])
)
MEMORY_GRID = tuple(itertools.product([3.0 + 0.1 * i for i in range(21)], [0.01 * i for i in range(13)]))


def time_errors(runs: Sequence[PublishedRun], constants: Pair) -> list[float]:
    isolation_s, host = constants
    changed = dataclasses.replace(shipped_constants(), isolation_s=isolation_s, sync_host_gb_per_s=host)
    return [predicted_step_s(run, changed) / run.step_s - 1 for run in runs]


def memory_errors(runs: Sequence[PublishedRun], constants: Pair) -> list[float]:
    context_gib, slack = constants
    changed = dataclasses.replace(shipped_constants(), context_gib=context_gib, allocator_slack=slack)
    return [predicted_peak_bytes(run, changed) / run.peak_bytes - 1 for run in runs]


def leave_one_out(runs: Sequence[PublishedRun]) -> str:
    """Constants with the least sum of squared errors over all runs but one, and the error of that one."""
    lines = []
    kinds: list[tuple[str, Iterable[Pair], Callable[[Sequence[PublishedRun], Pair], list[float]]]] = [
        ("Step time", TIME_GRID, time_errors),
        ("Peak memory", MEMORY_GRID, memory_errors),
    ]
    for name, grid, errors_of in kinds:
        table = {constants: errors_of(runs, constants) for constants in grid}

        def best(left_out: int | None, table: dict[Pair, list[float]] = table) -> Pair:
            return min(table, key=lambda key: sum(e * e for i, e in enumerate(table[key]) if i != left_out))

        errors = [table[best(i)][i] for i in range(len(runs))]
        chosen = {best(i) for i in range(len(runs))}
        ranges = ", ".join(f"{min(values):.3g} to {max(values):.3g}" for values in zip(*chosen, strict=True))
        lines.append(_summary(f"{name}, each run left out", errors))
        lines.append(
            f"Constants: {', '.join(f'{value:.3g}' for value in best(None))} on all runs; {ranges} on the rest."
        )
    return "\n".join(lines)


def put_between_markers(page: str, name: str, table: str) -> str:
    """``page`` with ``table`` between ``<!-- name -->`` and ``<!-- /name -->``."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no markers <!-- {name} --> and <!-- /{name} -->")
    return pattern.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--estimates", action="store_true")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    args = parser.parse_args()
    if args.leave_one_out:
        print(leave_one_out(read_runs(args.runs)))
    elif args.estimates:
        print(estimates_table())
    else:
        print(runs_table([compare(run, shipped_constants()) for run in read_runs(args.runs)]))
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        page = put_between_markers(page, "runs", runs_table([compare(r, shipped_constants()) for r in read_runs()]))
        page = put_between_markers(page, "estimates", estimates_table())
        args.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
