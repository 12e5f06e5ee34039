"""What the last version wrote still loads, also inside of other files; what a later one wrote is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero.checkpoint.state import CheckpointState
from hetero.errors import ConfigError
from hetero.format_versions import upgraded
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.serialization import from_json, load, to_json
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage

VERSION_1 = Path(__file__).parents[1] / "golden" / "format_1"
"""Written by the last version whose plans had that format."""

DELAYS = [[None, 0], [None, 0, 2]]
"""Of the stages of its plan."""


def delays(of: Plan) -> list[list[int | None]]:
    return [[stage.wgrad_delay for stage in replica.stages] for replica in of.replicas]


def todays_plan() -> str:
    return to_json(plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,)))]))


def test_a_plan_of_version_1_is_read() -> None:
    read = load(Plan, VERSION_1 / "plan.json")
    validate(read)
    assert read.format_version == 5
    assert delays(read) == DELAYS


def test_a_plan_of_version_1_is_read_from_yaml_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(json.loads((VERSION_1 / "plan.json").read_text())))
    assert load(Plan, path) == load(Plan, VERSION_1 / "plan.json")


def test_a_checkpoint_of_version_1_is_read_with_its_plan() -> None:
    state = load(CheckpointState, VERSION_1 / "state.json")
    assert state.plan == load(Plan, VERSION_1 / "plan.json")


def test_a_plan_without_a_version_may_have_the_keys_of_version_1() -> None:
    data = json.loads((VERSION_1 / "plan.json").read_text())
    del data["format_version"]
    assert delays(from_json(Plan, json.dumps(data), source="plan.json")) == DELAYS


def test_what_is_written_has_todays_version_and_is_read_as_it_is() -> None:
    read = load(Plan, VERSION_1 / "plan.json")
    text = to_json(read)
    assert "weight_lag" not in text
    assert from_json(Plan, text, source="plan.json") == read


def test_a_key_of_version_1_is_unknown_in_later_ones() -> None:
    text = todays_plan().replace('"wgrad_delay"', '"weight_lag"')
    with pytest.raises(ConfigError, match=r"unknown key .*weight_lag"):
        from_json(Plan, text, source="plan.json")


def test_a_plan_of_version_2_has_no_fp8_and_describes_no_device() -> None:
    data = json.loads(todays_plan())
    del data["devices"]
    for stage_data in data["replicas"][0]["stages"]:
        del stage_data["fp8"]
    assert from_json(Plan, json.dumps({**data, "format_version": 2}), source="plan.json") == from_json(
        Plan, todays_plan(), source="plan.json"
    )


def test_a_plan_of_version_3_leaves_dropout_to_the_launch() -> None:
    data = json.loads(todays_plan())
    del data["hidden_dropout"], data["attention_dropout"]
    read = from_json(Plan, json.dumps({**data, "format_version": 3}), source="plan.json")
    assert read == from_json(Plan, todays_plan(), source="plan.json")
    assert (read.hidden_dropout, read.attention_dropout) == (None, None)


def test_a_plan_of_version_4_leaves_nothing_to_hosts() -> None:
    data = json.loads(todays_plan())
    del data["replicas"][0]["stages"][0]["offload"]
    assert from_json(Plan, json.dumps({**data, "format_version": 4}), source="plan.json") == from_json(
        Plan, todays_plan(), source="plan.json"
    )


def test_a_plan_of_version_4_does_not_say_where_it_comes_from() -> None:
    data = json.loads(todays_plan())
    del data["provenance"]
    read = from_json(Plan, json.dumps({**data, "format_version": 4}), source="plan.json")
    assert read == from_json(Plan, todays_plan(), source="plan.json")
    assert read.provenance is None


@pytest.mark.parametrize("version", [6, 10**30])
def test_a_later_version_is_refused_by_name(version: int) -> None:
    text = todays_plan().replace('"format_version": 5', f'"format_version": {version}')
    with pytest.raises(ConfigError, match=rf"plan\.json: format_version is {version}, .* up to 5; a later version"):
        from_json(Plan, text, source="plan.json")


@pytest.mark.parametrize("version", ["true", "null", '"2"', "0", "-1", "1.0", "[]"])
def test_what_is_no_version_is_refused(version: str) -> None:
    text = todays_plan().replace('"format_version": 5', f'"format_version": {version}')
    with pytest.raises(ConfigError, match="format_version: Input should be 5, got"):
        from_json(Plan, text, source="plan.json")


@pytest.mark.parametrize(
    "broken",
    [{"replicas": None}, {"replicas": [None]}, {"replicas": [{"stages": 1}]}, {"replicas": [{"stages": [None]}]}, {}],
)
def test_a_broken_plan_of_version_1_is_told_as_any_other(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"plan\.json: .*(missing key|Input should be)"):
        from_json(Plan, json.dumps({"format_version": 1, **broken}), source="plan.json")


def test_upgrading_changes_nothing_of_what_it_was_given() -> None:
    text = (VERSION_1 / "plan.json").read_text()
    data = json.loads(text)
    upgraded(Plan, data, source="plan.json")
    assert data == json.loads(text)
