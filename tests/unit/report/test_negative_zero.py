"""What rounding leaves of a difference is not printed as less than nothing."""

from hetero.planner.reference.yardsticks import best_uniform
from hetero.report.tables.measurement import stage_times_table
from tests.unit.planner.random_problems import random_problem


def test_no_bubble_is_negative() -> None:
    """One device computes all the time; busy seconds and update together are now and then more than the step."""
    rounded = 0
    for seed in range(20):
        best = best_uniform(random_problem(seed, gpus=(1,), num_layers=1, batch=6 + 6 * (seed % 5))).best
        if best is None:
            continue
        simulation = best.simulation
        times = simulation.stages[0, 0]
        rounded += simulation.step_s - times.busy_s - times.update_s < 0
        assert simulation.bubble_share >= 0
        assert f"{simulation.bubble_share:z.1%}" == "0.0%"
    assert rounded, "no sum is rounded, and nothing was tested"


def test_tables_of_seconds_have_none_below_0() -> None:
    best = best_uniform(random_problem(1, gpus=(2,), num_layers=2, batch=8)).best
    assert best is not None
    simulation = best.simulation
    for residue in (-1.4e-17, -0.0, 1e-12):
        columns = {"busy": lambda _, seconds=residue: seconds}
        table = stage_times_table(simulation.plan, {"predicted": simulation.stages}, columns)
        *_, cells = (list(column.cells) for column in table.columns)
        assert set(cells) == {"0"}
