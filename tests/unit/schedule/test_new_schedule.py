"""The worked example of docs/architecture.md: a schedule is a function in a table, and everything else follows."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from hetero.cost.memory import plan_memory
from hetero.cost.simulation.simulator import simulate
from hetero.plan.ir import Plan
from hetero.plan.lowering import lower, step_rows
from hetero.plan.validate import validate
from hetero.schedule import orders
from hetero.schedule.actions import COMPUTE, Action, ActionKind, format_schedule
from hetero.schedule.dry_run import check_no_deadlock
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

PAGE = Path(__file__).parents[3] / "docs/architecture.md"
NAME = "gpipe-recompute-last"
MODEL = gpt2_model(num_layers=4, tied_embeddings=False)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The golden rows of the page; its schedule is in the table."""
    (code,) = re.findall(r"```python\n(def gpipe_recompute_last.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (golden,) = re.findall(r"```\n(0F0 0F1.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {**vars(orders)}
    exec(code, names)
    assert list(names["ORDERS"]) == [*orders.ORDERS, NAME]
    monkeypatch.setitem(orders.ORDERS, NAME, names["ORDERS"][NAME])  # type: ignore[arg-type]
    assert isinstance(golden, str)
    return golden


def under(schedule: str) -> Plan:
    stages = [stage(layers=(2 * s, 2 * s + 2), ranks=(s,), device="A100-40", depth=3) for s in range(2)]
    return plan(MODEL, [dataclasses.replace(replica(*stages, num_samples=3), schedule=schedule)])


def test_its_rows_are_the_golden_ones_and_come_to_an_end(example: str) -> None:
    made = under(NAME)
    validate(made)
    rows = step_rows(made.replicas[0])
    check_no_deadlock(rows, num_microbatches=[3, 3])
    assert format_schedule([[action for action in row if action.kind in COMPUTE] for row in rows]) == example
    assert Action(0, ActionKind.R, 2) in lower(made, [])[0].host_order


def test_it_takes_a_forward_longer_and_keeps_an_activation_less(example: str) -> None:
    costs = cost_model(MODEL, [profile(MODEL, block_s=(1.0, 2.0))])
    whole, again = (simulate(under(name), nodes(2, gb_per_s=1e9), costs) for name in ("gpipe", NAME))
    # The last stage runs its forward again in front of its last backward, the first one while it waits for that.
    assert again.step_s == pytest.approx(whole.step_s + 2.0)
    kept, dropped = (plan_memory(under(name), costs)[0, 0].activations for name in ("gpipe", NAME))
    assert dropped < kept


def test_without_it_the_plan_is_refused_by_name() -> None:
    with pytest.raises(Exception, match=f"there is no schedule '{NAME}'; choose one of 1f1b, gpipe"):
        validate(under(NAME))
