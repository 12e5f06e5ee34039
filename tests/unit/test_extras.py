"""The distribution asks for the packages that its code imports, and says which extra brings one that is missing."""

import ast
import csv
import datetime
import importlib.metadata
import itertools
import runpy
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from hetero import extras
from hetero.doctor.host_checks import TRANSFORMER_ENGINES
from hetero.errors import ConfigError
from hetero.extras import EXTRAS, exit_without, require
from tests.helpers.lanes import pinned_versions

ROOT = Path(__file__).parents[2]

OWN = {"docs", "hetero", "megatron", "pretrain_gpt", "tests", "tools", "_typeshed"}
"""Packages of the repository, though ``megatron.core`` is megatron-core's, and the one that only type checkers see."""

CALLED = {"griffe": "griffelib", "yaml": "pyyaml", "PIL": "pillow"}
"""Distributions that are not called like the package that they bring."""

ONLY_ASKED_FOR = {
    "transformer-engine",  # megatron-core imports it
    "tensorboard",  # torch imports it
    "mkdocs-material", "mkdocstrings", "pymdown-extensions",  # mkdocs imports them
    "hypothesis", "import-linter", "mypy", "pytest-timeout", "ruff",  # programs and plugins
    "types-psutil", "types-pyyaml",  # mypy reads them
}  # fmt: skip
"""Distributions that no line of the repository imports by itself, or not in the sources."""


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """What ``setup.py`` says of the distribution."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **given: found.update(given))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return found


@pytest.fixture(scope="module")
def asked_for(described: dict[str, Any]) -> dict[str, set[str]]:
    """The distributions that ``setup.py`` asks for, by extra; those without one under the empty name."""
    wanted = {"": described["install_requires"], **described["extras_require"]}
    return {extra: {canonicalize_name(Requirement(each).name) for each in each_of} for extra, each_of in wanted.items()}


def modules_imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def distributions_imported(*folders: str) -> set[str]:
    """The distributions of other people that the Python files below ``folders`` import."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in paths for name in modules_imported(path)}
    others = {name.split(".")[0] for name in names} - OWN - set(sys.stdlib_module_names)
    with_core = {"megatron-core"} if any(name.startswith("megatron.core") for name in names) else set()
    return with_core | {CALLED.get(name, canonicalize_name(name)) for name in others}


@pytest.mark.slow
def test_every_package_that_the_sources_import_is_asked_for(asked_for: dict[str, set[str]]) -> None:
    without_test = set().union(*(names for extra, names in asked_for.items() if extra not in ("test", "test-gpu")))
    assert (
        distributions_imported("docs/site", "hetero", "megatron", "tools", "examples") == without_test - ONLY_ASKED_FOR
    )


@pytest.mark.slow
def test_every_package_that_the_tests_import_is_asked_for(asked_for: dict[str, set[str]]) -> None:
    # The first builds, the next come with pytest and matplotlib; the last two are measured in a place of their own.
    imported = distributions_imported("tests") - {"setuptools", "packaging", "pillow", "s3torchconnector", "torchft"}
    assert imported <= asked_for[""] | asked_for["test"]


def test_the_extra_for_tests_brings_what_is_tested(asked_for: dict[str, set[str]]) -> None:
    """All of it but TransformerEngine, which is built for a GPU."""
    assert set(EXTRAS) == set(asked_for) - {"", "test", "test-gpu", "docs"}, "no command needs the last three"
    assert asked_for["docs"] <= asked_for["test"]
    for extra in set(EXTRAS) - {"transformer-engine"}:
        assert asked_for[extra] <= asked_for["test"], extra


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_the_modules_that_are_looked_for(extra: str, asked_for: dict[str, set[str]]) -> None:
    names = {module.replace(".", "-").replace("_", "-") for module in EXTRAS[extra]}
    assert names <= asked_for[extra]
    assert names.isdisjoint(asked_for[""]), "what is always there is in no extra"


def test_transformer_engine_is_as_new_as_megatron_core_asks(described: dict[str, Any]) -> None:
    """megatron-core imports whichever version is there. Its 0.16 asks for 2.9, later ones for any."""
    theirs = [Requirement(each) for each in importlib.metadata.requires("megatron-core") or []]
    (accepted,) = [each for each in theirs if canonicalize_name(each.name) == "transformer-engine"]
    ours = [Requirement(each) for each in described["extras_require"]["transformer-engine"]]
    (wanted,) = [each for each in ours if canonicalize_name(each.name) == "transformer-engine"]
    (oldest,) = [bound.version for bound in wanted.specifier if bound.operator == ">="]
    assert all(bound.contains(oldest) for bound in accepted.specifier if bound.operator == ">=")
    assert wanted.extras == accepted.extras


def test_the_doctor_installs_the_transformer_engines_that_the_extra_accepts(described: dict[str, Any]) -> None:
    ours = [Requirement(each) for each in described["extras_require"]["transformer-engine"]]
    (wanted,) = [each for each in ours if canonicalize_name(each.name) == "transformer-engine"]
    assert wanted.specifier == SpecifierSet(TRANSFORMER_ENGINES)


def test_every_file_of_the_packages_is_installed(described: dict[str, Any]) -> None:
    patterns = {package: ["*.py"] for package in described["packages"]}
    for package, others in described["package_data"].items():
        patterns[package] = [*patterns[package], *others]
    installed = {
        path
        for package, each_of in patterns.items()
        for pattern in each_of
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = {path for folder in ("hetero", "megatron") for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert {str(path.relative_to(ROOT)) for path in files - installed if "__pycache__" not in path.parts} == set()


def test_nothing_is_said_of_what_is_installed() -> None:
    require("train", asked_by="--measure")
    exit_without("train", program="pretrain_gpt.py")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra whose packages nobody has."""
    monkeypatch.setattr(extras, "EXTRAS", {"train": ("torch", "no_such_package.core", "no_such_module")})


@pytest.mark.usefixtures("without")
def test_what_is_missing_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError) as caught:
        require("train", asked_by="--measure")
    assert str(caught.value) == (
        "--measure needs no_such_package.core, no_such_module, which are not installed; "
        "run: pip install 'megatron-hetero[train]'"
    )


@pytest.mark.usefixtures("without")
def test_a_program_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        exit_without("train", program="pretrain_gpt.py")
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("hetero: pretrain_gpt.py needs no_such_package.core, ")
    assert said.count("\n") == 1


def looked_up() -> dict[str, dict[str, str]]:
    """By package, what OSV and PyPI's list of advisories say of it.

    first_clean: the first version without a known advisory; empty if none was found.
    advisories: those that it mends, with other versions that mended some.
    not_reached: why an older version is accepted all the same.
    looked_up: the day.
    """
    with (ROOT / "tests/data/advisories.tsv").open(encoding="utf-8", newline="") as file:
        return {row["package"]: row for row in csv.DictReader(file, delimiter="\t")}


def is_below(version: str, row: Mapping[str, str]) -> bool:
    """Whether a version has an advisory that counts here."""
    return bool(row["first_clean"]) and not row["not_reached"] and Version(version) < Version(row["first_clean"])


def test_no_version_that_is_accepted_has_a_known_advisory(described: dict[str, Any]) -> None:
    rows, oldest = looked_up(), dict[str, str]()
    for each in itertools.chain(described["install_requires"], *described["extras_require"].values()):
        requirement = Requirement(each)
        floors = [bound.version for bound in requirement.specifier if bound.operator == ">="]
        oldest[canonicalize_name(requirement.name)] = min(floors, key=Version, default="0")
    assert rows.keys() == oldest.keys()
    assert {name: version for name, version in oldest.items() if is_below(version, rows[name])} == {}
    building = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert building == [f"setuptools>={oldest['setuptools']}"]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_no_pinned_version_has_a_known_advisory(python: str) -> None:
    pins = {canonicalize_name(name): version for name, version in pinned_versions(python).items()}
    rows = looked_up()
    assert {name: pins[name] for name in pins.keys() & rows if is_below(pins[name], rows[name])} == {}


def test_what_is_known_of_advisories_says_when_and_why() -> None:
    for name, row in looked_up().items():
        assert datetime.date.fromisoformat(row["looked_up"]) >= datetime.date(2026, 11, 28), name
        assert bool(row["first_clean"]) == bool(row["advisories"]), name
        assert not row["not_reached"] or row["first_clean"], name
