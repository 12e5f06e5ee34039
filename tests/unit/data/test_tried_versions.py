"""The table of versions: what is said of a combination, and which faults of the table are refused."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero.data.tried_versions import VersionTable, shipped_versions
from hetero.errors import ConfigError
from hetero.installed_versions import InstalledVersions, combination_of
from hetero.serialization import checked, load
from tests.helpers import version_table
from tests.helpers.generated_parts import written

RUN = {"kind": "bits", "device": "CPU", "date": "2026-11-27", "command": "pytest", "result": "all equal"}
ON_GPU = RUN | {"kind": "GPU", "device": "NVIDIA H200"}


def tried(python: str, megatron_core: str, torch: str, *runs: Mapping[str, str], **others: str) -> dict[str, object]:
    return {"python": python, "megatron_core": megatron_core, "torch": torch, "runs": list(runs or [RUN]), **others}


BREAKING = {
    "versions": {"python": "<3.12", "megatron_core": ">=0.17"},
    "because": "pip refuses it",
    "fix": "make the environment with Python 3.12",
    "date": "2026-11-27",
    "command": "pip install megatron-core==0.17.1",
}

TRIED = [
    tried("3.11", "0.16.1", "2.13.0", ON_GPU),
    tried("3.12", "0.16.1", "2.13.0"),
    tried("3.12", "0.19.2", "2.15.0"),
    tried("3.12", "0.19.2", "2.15.0", RUN | {"kind": "mocked TransformerEngine"}, transformer_engine="2.20.2"),
    tried("3.13", "0.19.2", "2.15.0"),
]

TABLE = checked(VersionTable, {"tried": TRIED, "breaking": [BREAKING]}, source="the table")


def versions(python: str, megatron_core: str, torch: str, **others: str) -> InstalledVersions:
    return InstalledVersions(python=python, megatron_core=megatron_core, torch=torch, **others)


def test_a_combination_that_was_run_is_tried() -> None:
    verdict = TABLE.judge(versions("3.12", "0.19.2", "2.15.0", transformer_engine="2.20.2"))
    assert (verdict.kind, verdict.said, verdict.fix) == ("tried", "mocked TransformerEngine on CPU, 2026-11-27", "")


def test_on_a_gpu_it_matters_whether_one_ran_it() -> None:
    assert (
        TABLE.judge(versions("3.12", "0.16.1", "2.13.0"), on_gpu=True).said == "bits on CPU, 2026-11-27; not on a GPU"
    )
    assert TABLE.judge(versions("3.11", "0.16.1", "2.13.0"), on_gpu=True).said == "GPU on NVIDIA H200, 2026-11-27"


def test_a_build_whose_version_is_none_was_not_tried() -> None:
    verdict = TABLE.judge(versions("3.13", "core-main", "2.15.0"))
    assert (verdict.kind, verdict.fix) == ("not tried", "pip install megatron-core==0.19.2")


def test_versions_that_were_tried_each_by_itself_are_not_tried_together() -> None:
    verdict = TABLE.judge(versions("3.13", "0.16.1", "2.15.0"))
    assert verdict.kind == "not tried"
    assert verdict.said.startswith("each of these versions was tried, but not together; the nearest combination ")
    assert TABLE.judge(versions("3.13", "0.19.2", "2.15.0", transformer_engine="2.20.2")).kind == "not tried"


@pytest.mark.parametrize(
    ("installed", "new", "nearest", "fix"),
    [
        (
            versions("3.12", "0.19.1", "2.15.0"),
            "megatron-core 0.19.1",
            "Python 3.12, megatron-core 0.19.2, torch 2.15.0 (bits on CPU, 2026-11-27)",
            "pip install megatron-core==0.19.2",
        ),
        (
            versions("3.13", "0.19.2", "2.14.0"),
            "torch 2.14.0",
            "Python 3.13, megatron-core 0.19.2, torch 2.15.0 (",
            "pip install torch==2.15.0",
        ),
        (
            versions("3.13", "0.19.2", "built-here"),
            "torch built-here",
            "Python 3.13, megatron-core 0.19.2, torch 2.15.0 (",
            "pip install torch==2.15.0",
        ),
        (
            versions("3.14", "0.19.2", "2.15.0"),
            "Python 3.14",
            "Python 3.13, megatron-core 0.19.2, torch 2.15.0 (",
            "make the environment with Python 3.13",
        ),
        (
            versions("3.12", "0.19.2", "2.15.0", transformer_engine="2.19.0", apex="0.1"),
            "TransformerEngine 2.19.0 or apex 0.1",
            "Python 3.12, megatron-core 0.19.2, torch 2.15.0, TransformerEngine 2.20.2 (",
            "pip uninstall apex; pip install transformer-engine==2.20.2",
        ),
    ],
)
def test_what_was_never_tried_is_named_with_the_nearest(
    installed: InstalledVersions, new: str, nearest: str, fix: str
) -> None:
    verdict = TABLE.judge(installed)
    assert verdict.kind == "not tried"
    assert verdict.said.startswith(f"no run had {new}; the nearest combination that was: {nearest}")
    assert verdict.fix == fix


def test_a_combination_that_breaks_is_named_with_cause_and_fix() -> None:
    verdict = TABLE.judge(versions("3.11", "0.19.2", "2.15.0"))
    assert (verdict.kind, verdict.said) == ("known to break", "because pip refuses it")
    assert verdict.fix == "make the environment with Python 3.12"
    without_engine = {"transformer_engine": "<2.9"}
    table = checked(
        VersionTable, {"tried": TRIED, "breaking": [BREAKING | {"versions": without_engine}]}, source="the table"
    )
    assert table.judge(versions("3.12", "0.19.2", "2.15.0")).kind == "tried", "what is not installed cannot break"
    assert table.judge(versions("3.12", "0.19.2", "2.15.0", transformer_engine="2.8.0")).kind == "known to break"


def test_builds_of_one_version_are_one() -> None:
    packages = {"torch": "2.15.0+cu130", "megatron-core": "0.19.2", "transformer-engine": "2.20.2+abc", "numpy": "2"}
    found = combination_of("3.12.3", packages)
    assert found == versions("3.12", "0.19.2", "2.15.0", transformer_engine="2.20.2")
    assert str(found) == "Python 3.12, megatron-core 0.19.2, torch 2.15.0, TransformerEngine 2.20.2"
    assert combination_of("3.12.3", {"torch": "2.15.0"}) is None


def with_run(**changes: object) -> dict[str, Any]:
    return {"tried": [tried("3.12", "0.19.2", "2.15.0", {**RUN, **changes})]}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tried": [tried("3.12.1", "0.19.2", "2.15.0")]}, "python '3.12.1': must be major and minor version"),
        ({"tried": [tried("3.12", "newest", "2.15.0")]}, "megatron_core 'newest': is no version"),
        ({"tried": [tried("3.12", "0.19.2", "2.15.0") | {"runs": []}]}, "torch 2.15.0: has no runs"),
        ({"tried": [TRIED[1], TRIED[1]]}, "Python 3.12, megatron-core 0.16.1, torch 2.13.0: is listed twice"),
        (
            {"tried": TRIED, "breaking": [BREAKING | {"versions": {"torch": "==2.15.0"}}]},
            "was tried and breaks by torch",
        ),
        ({"tried": TRIED, "breaking": [BREAKING | {"versions": {}}]}, "versions: names no component"),
        (
            {"tried": TRIED, "breaking": [BREAKING | {"versions": {"torch": "2.15"}}]},
            "versions.torch '2.15': is no spec",
        ),
        ({"tried": TRIED, "breaking": [BREAKING | {"versions": {"numpy": ">=2"}}]}, "numpy"),
        ({"tried": TRIED, "breaking": [BREAKING | {"fix": " "}]}, "fix: is empty; say what it was"),
        (with_run(date="27.11.2026"), "date '27.11.2026': is no date"),
        (with_run(kind="a look"), "kind"),
        (with_run(command=""), "command: is empty"),
        (with_run(seen="yes"), "seen"),
        ({"tried": []}, "tried: is empty"),
    ],
)
def test_a_fault_of_the_table_is_one_message(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tried_versions.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(VersionTable, path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert said.count("\n") == 0


def test_the_shipped_table_says_of_each_of_its_combinations_that_it_was_tried() -> None:
    table = shipped_versions()
    assert len({each.combination for each in table.tried}) == len(table.tried)
    for each in table.tried:
        fields = {field.name for field in dataclasses.fields(InstalledVersions)}
        installed = InstalledVersions(**{name: getattr(each, name) for name in fields})
        assert table.judge(installed).kind == "tried", str(each)


@pytest.mark.parametrize("begin", version_table.TABLES)
def test_the_page_has_the_tables_of_the_file(begin: str) -> None:
    expected = version_table.TABLES[begin](shipped_versions())
    assert written(version_table.PAGE, begin) == expected, "run python -m tests.helpers.version_table"
