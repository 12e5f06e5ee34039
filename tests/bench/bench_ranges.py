"""Computes how far predictions have been off, by what they rest on: the figures of ranges.

    python tests/bench/bench_ranges.py                              the table
    python tests/bench/bench_ranges.py --write docs/cost_model.md   and puts it between the markers of the page

The factors go into ``hetero/cost/layers/confidence.py``; ``tests/unit/cost/test_measured_errors.py`` compares the two.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.layers.confidence import LAYER_ERRORS, ORDER_ERROR, RUN_ERROR
from hetero.cost.network import Topology
from hetero.cost.prediction_range import step_range
from tests.bench.bench_cost_model import put_between_markers
from tests.helpers.measured_errors import (
    COVERED,
    PredictedRun,
    factor,
    layer_errors,
    order_errors,
    predicted_runs,
    run_errors,
)


def errors_table(runs: Sequence[PredictedRun]) -> str:
    """A row for each sort of error."""
    layers = layer_errors()
    named = [
        (f"layers, {confidence.name.lower().replace('_', ' ')}", layers[confidence], error)
        for confidence, error in LAYER_ERRORS.items()
        if layers[confidence]
    ]
    named += [("whole steps, layers measured", run_errors(runs), RUN_ERROR)]
    named += [("ratio of two such steps", order_errors(runs), ORDER_ERROR)]
    rows = [
        f"| {name} | {len(errors)} | {factor(errors):.2f} | {math.exp(max(map(abs, errors))):.2f} | {error.source} |"
        for name, errors, error in named
    ]
    head = f"| error | cases | factor that holds {COVERED:.0%} | worst | cases are |"
    return "\n".join([head, "|---|--:|--:|--:|---|", *rows, "", coverage(runs)])


def coverage(runs: Sequence[PredictedRun]) -> str:
    """How many runs were measured within their range."""
    inside = 0
    for each in runs:
        found = step_range(each.simulation, Topology(each.run.cluster), each.costs)
        inside += found.low_s <= each.run.step_s <= found.high_s
    return f"Of {len(runs)} published runs {inside} were measured within their range."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    args = parser.parse_args()
    table = errors_table(predicted_runs())
    print(table)
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        args.write.write_text(put_between_markers(page, "ranges", table), encoding="utf-8")


if __name__ == "__main__":
    main()
