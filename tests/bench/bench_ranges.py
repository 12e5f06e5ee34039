"""Computes how far predictions have been off, by what they rest on: the figures of ranges.

    python tests/bench/bench_ranges.py                              the table
    python tests/bench/bench_ranges.py --write docs/cost_model.md   and puts it between the markers of the page

The factors go into ``hetero/cost/layers/confidence.py``; ``test_measured_errors.py`` and ``test_published_runs.py`` in
``tests/unit/cost`` compare the two.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.layers.confidence import LAYER_ERRORS, ORDER_ERROR, RUN_ERROR, Confidence
from tests.bench.bench_cost_model import put_between_markers
from tests.helpers.cost_comparison import predicted_runs
from tests.helpers.measured_errors import (
    COVERED,
    factor,
    layer_errors,
    layer_factors,
    order_errors,
    run_errors,
    within_range,
)


def errors_table() -> str:
    """A row for each figure of a range, and how many runs lie in theirs."""
    runs, layers, factors = predicted_runs(), layer_errors(), layer_factors()
    rows = [
        _row(f"layers, {_name(confidence)}", layers[confidence], factors[confidence], LAYER_ERRORS[confidence].source)
        for confidence in Confidence
        if layers[confidence]
    ]
    measured, ratios = run_errors(runs)[Confidence.MEASURED], order_errors(runs)
    rows.append(_row("a step whose layers were measured", measured, factor(measured), RUN_ERROR.source))
    rows.append(_row("ratio of two steps", ratios, factor(ratios), ORDER_ERROR.source))
    lines = [f"| error | cases | factor for {COVERED:.0%} | worst | cases are |", "|---|--:|--:|--:|---|", *rows, ""]
    for confidence in Confidence:
        own = [each for each in runs if each.simulation.confidence == confidence]
        if own:
            inside = sum(within_range(each) for each in own)
            lines.append(f"Steps, {_name(confidence)}: {inside} of {len(own)} published runs are within their range.  ")
    return "\n".join(lines)


def _row(name: str, errors: Sequence[float], held: float, source: str) -> str:
    return f"| {name} | {len(errors)} | {held:.2f} | {math.exp(max(map(abs, errors))):.2f} | {source} |"


def _name(confidence: Confidence) -> str:
    return confidence.name.lower().replace("_", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    args = parser.parse_args()
    table = errors_table()
    print(table)
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        args.write.write_text(put_between_markers(page, "ranges", table), encoding="utf-8")


if __name__ == "__main__":
    main()
