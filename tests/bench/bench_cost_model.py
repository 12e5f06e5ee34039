"""Holds the cost model against whole training runs and layers that others measured.

    python tests/bench/bench_cost_model.py                           all published runs, one table by family
    python tests/bench/bench_cost_model.py --details                 every run beside it
    python tests/bench/bench_cost_model.py --folder FOLDER           other runs, in tables of the same names and columns
    python tests/bench/bench_cost_model.py --leave-one-source-out    the calibrated constants, each family left out
    python tests/bench/bench_cost_model.py --estimates               layers of models whose profile is left out
    python tests/bench/bench_cost_model.py --write docs/cost_model.md

Prints tables in Markdown. ``--write`` puts them between the markers of the page; that of ``--leave-one-source-out``,
which takes minutes, only together with it.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.cost_model import CostModel
from hetero.cost.runtime_model import HETERO
from hetero.data import shipped_profiles
from hetero.data.sailor import MODELS
from hetero.spec.profile import LayerKind, Profile, ProfileStore
from hetero.units import GB
from tests.bench.calibrated_constants import CONSTANTS, Calibration, constants_table
from tests.helpers.cost_comparison import (
    APART,
    Comparison,
    ErrorSummary,
    by_family,
    compare,
    errors_of,
    pairs_apart,
    recompute_of,
    wrong_pairs,
)
from tests.helpers.published_runs import FOLDER, read_all
from tests.helpers.published_runs.opt350m import published_model
from tests.helpers.published_runs.published_run import PublishedRun


def families_table(comparisons: Sequence[Comparison]) -> str:
    """Mean, worst and signed error of every quantity by family, and the checks of order and verdict."""
    rows = [
        f"| {family if i == 0 else ''} | {quantity} | {(found := ErrorSummary.of(errors)).count} | {found.cells()} |"
        for family, own in by_family(comparisons).items()
        for i, (quantity, errors) in enumerate(errors_of(own).items())
    ]
    return "\n".join(
        [
            "| runs | of | count | mean error | worst | with signs |",
            "|---|---|--:|--:|--:|--:|",
            *rows,
            "",
            *order_lines(comparisons),
            *verdict_lines(comparisons),
        ]
    )


def order_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """How many pairs of plans are predicted in the measured order, and which are not."""
    pairs, wrong = pairs_apart(comparisons), wrong_pairs(comparisons)
    lines = [
        f"Order: of {len(pairs)} pairs of plans of the same model, batch and devices that differ by more than "
        f"{APART:.0%}, {len(pairs) - len(wrong)} are predicted in the measured order.  "
    ]
    lines += [
        f"Wrong: {a.run.family}: {a.run.label} ({a.run.step_s:.3f} s, predicted {a.step_s:.3f}) before {b.run.label} "
        f"({b.run.step_s:.3f} s, predicted {b.step_s:.3f}).  "
        for a, b in wrong
    ]
    recomputed = [pair for pair in pairs if len({recompute_of(each.run) for each in pair}) > 1]
    right = sum(pair not in wrong for pair in recomputed)
    return [*lines, f"Full against selective recomputation: {right} of {len(recomputed)} in the measured order.  "]


def verdict_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """Which runs are rejected as too large although they ran."""
    rejected = [each for each in comparisons if each.verdict is not None]
    lines = [f"Verdict: {len(rejected)} of {len(comparisons)} runs are rejected as too large, and all ran.  "]
    return lines + [
        f"Rejected: {each.run.family}: {each.run.label}, predicted {each.peak_bytes / GB:.1f} GB.  "
        for each in rejected
    ]


def runs_table(comparisons: Sequence[Comparison]) -> str:
    """Every run by family, the fastest first; the number in brackets is the rank that the prediction gives it."""
    lines = []
    for family, own in by_family(comparisons).items():
        by_prediction = sorted(own, key=lambda each: each.step_s)
        lines += [
            f"**{family}**",
            "",
            "| | plan | step s, measured | predicted | error | peak GB, measured | predicted | error |",
            "|--:|---|--:|--:|--:|--:|--:|--:|",
        ]
        for rank, each in enumerate(sorted(own, key=lambda each: each.run.step_s), start=1):
            measured = "" if each.run.peak_bytes is None else f"{each.run.peak_bytes / GB:.1f}"
            error = "" if each.memory_error is None else f"{each.memory_error:+.1%}"
            lines.append(
                f"| {rank} | {each.run.label} | {each.run.step_s:.3f} | {each.step_s:.3f} "
                f"[{by_prediction.index(each) + 1}] | {each.time_error:+.1%} | {measured} "
                f"| {each.peak_bytes / GB:.1f} | {error} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def stages_table(comparisons: Sequence[Comparison]) -> str:
    """Every stage that was measured alone: measured and predicted seconds of a step."""
    lines = [
        "| plan | stage | forward | predicted | backward | predicted | sum | predicted | optimizer | predicted |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in comparisons:
        for s, (ours, theirs) in enumerate(zip(each.stages, each.run.stages, strict=True)):
            summed = "" if theirs.all_reduce_s is None else f"{theirs.all_reduce_s:.4f}"
            lines.append(
                f"| {each.run.label if s == 0 else ''} | {s} | {theirs.forward_s:.3f} | {ours.forward_s:.3f} "
                f"| {theirs.backward_s:.3f} | {ours.backward_s:.3f} | {summed} | {ours.all_reduce_s:.4f} "
                f"| {theirs.update_s:.4f} | {ours.update_s:.4f} |"
            )
    return "\n".join(lines)


def estimate_errors(profile: Profile, store: ProfileStore, kind: LayerKind, *, data_sheets: bool) -> list[float]:
    """Relative errors of forward + backward in a step of every measured time of ``profile``, estimated from ``store``.

    What is estimated is the layer that was measured, in a machine whose links are known.
    """
    estimated, measured = (
        CostModel(
            model=published_model(next(key for key, (name, _, _) in MODELS.items() if name == profile.model)),
            seq_length=profile.seq_length,
            precision=profile.precision,
            profiles=ProfileStore(profiles, all_reduce={profile.device: profile.all_reduce}),
            arithmetic=profile.arithmetic,
            data_sheets=data_sheets,
            runtime=dataclasses.replace(HETERO, implementation=profile.implementation),
        )
        for profiles in (store, [profile])
    )
    errors = []
    for time in profile.times:
        if time.kind == kind:
            ours, theirs = (
                costs.layer(kind, device=profile.device, tp=time.tp, micro_batch_size=time.micro_batch_size)
                for costs in (estimated, measured)
            )
            errors.append((ours.forward_s + ours.backward_s) / (theirs.forward_s + theirs.backward_s) - 1)
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


def left_out_table(runs: Sequence[PublishedRun]) -> str:
    """Constants calibrated on all families but one, and the errors of that one."""
    of_family: dict[str, list[PublishedRun]] = {}
    for run in runs:
        of_family.setdefault(run.family, []).append(run)
    lines = ["| left out | of | mean error | worst | with signs | constants |", "|---|---|--:|--:|--:|---|"]
    for decides in dict.fromkeys(constant.decides for constant in CONSTANTS):
        calibration = Calibration(runs=of_family, decides=decides)
        for family in of_family:
            values = calibration.best([other for other in of_family if other != family])
            chosen = ", ".join(f"{name} {value:.3g}" for name, value in values.items()) or "as they ship"
            if errors := calibration.errors(family, values):
                lines.append(f"| {family} | {decides} | {ErrorSummary.of(errors).cells()} | {chosen} |")
        values = calibration.best(list(of_family))
        chosen = ", ".join(f"{name} {value:.3g}" for name, value in values.items()) or "as they ship"
        errors = [error for family in of_family for error in calibration.errors(family, values)]
        lines.append(f"| none | {decides} | {ErrorSummary.of(errors).cells()} | {chosen} |")
    return "\n".join(lines)


def put_between_markers(page: str, name: str, table: str) -> str:
    """``page`` with ``table`` between ``<!-- name -->`` and ``<!-- /name -->``."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no markers <!-- {name} --> and <!-- /{name} -->")
    return pattern.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--estimates", action="store_true")
    parser.add_argument("--leave-one-source-out", action="store_true")
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    args = parser.parse_args()
    tables: dict[str, str] = {}
    if args.leave_one_source_out:
        tables["left out"] = left_out_table(read_all(args.folder))
    if args.estimates or args.write is not None:
        tables["estimates"] = estimates_table()
    if args.write is not None or not tables:
        comparisons = [compare(run) for run in read_all(args.folder)]
        tables["families"], tables["constants"] = families_table(comparisons), constants_table()
        if args.details or args.write is not None:
            tables["runs"], tables["stages"] = runs_table(comparisons), stages_table(comparisons)
    print("\n\n".join(tables.values()))
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        for name, table in tables.items():
            page = put_between_markers(page, name, table)
        args.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
