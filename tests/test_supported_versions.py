"""Pages, scripts and the doctor name the versions that setup.py accepts and constraints.txt pins."""

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from hetero.doctor.host_checks import OLDEST_PYTHON
from tests.helpers.lanes import NEWEST_PYTHON, pinned_versions
from tests.helpers.sources import ROOT


def facts() -> dict[str, str]:
    """Return what is supported and pinned, by the names that ``SAID`` uses."""
    classifiers = metadata.metadata("megatron-hetero").get_all("Classifier", [])
    minors = sorted(int(found[1]) for each in classifiers if (found := re.fullmatch(r"Programming .* 3\.(\d+)", each)))
    pythons = [f"3.{minor}" for minor in minors]
    (core,) = {
        requirement.specifier
        for requirement in map(Requirement, metadata.requires("megatron-hetero") or ())
        if requirement.name == "megatron-core"
    }
    oldest, newest = pinned_versions(pythons[0]), pinned_versions()
    return {
        "core": ",".join(sorted(map(str, core), reverse=True)),
        "first": pythons[0],
        "second": ".".join(map(str, NEWEST_PYTHON)),
        "last": pythons[-1],
        "each": f"{', '.join(pythons[:-1])} or {pythons[-1]}",
        "from": f"3, {minors[0]}",
        "below": f"3, {minors[-1] + 1}",
        "old": oldest["megatron-core"],
        "new": newest["megatron-core"],
        "old_torch": oldest["torch"],
        "new_torch": newest["torch"],
    }


SAID = [
    ("README.md", "nothing but Python {each} and a shell"),
    ("README.md", "megatron-core {old} on Python {first} and {new} on Python {second}."),
    ("CONTRIBUTING.md", "-m venv .venv # Python {each} "),
    ("CONTRIBUTING.md", "`constraints.txt` gives Python {first} megatron-core {old}, newer ones {new}."),
    ("CONTRIBUTING.md", "only the tests on Python {second} and megatron-core {new}"),
    ("docs/architecture.md", "**megatron-core is unmodified**, `{core}`"),
    ("docs/install.md", "Python {first} to {last}, and of everything else the newest that pip finds"),
    ("docs/install.md", "| megatron-core | {old} | {first} to {last} |"),
    (
        "docs/testing.md",
        "| 1 | `.venv` | {first} (else `python3`, {second}, {last}) | {old} ({new} on {second} and newer) |",
    ),
    ("docs/testing.md", "| {old_torch} ({new_torch}) | all |"),
    ("docs/testing.md", "| 2 | `.venv-newest` | {second} | {new} | {new_torch}, Triton removed |"),
    ("scripts/test.sh", "Python {first} and megatron-core {old}"),
    ("scripts/test.sh", "Python {second}, megatron-core {new}"),
    ("scripts/test_gpu.sh", "this project needs {each}:"),
    ("scripts/environment.sh", "({from}) <= sys.version_info < ({below})"),
]
"""A page or script, and words of it."""


@pytest.mark.parametrize(("file", "words"), SAID)
def test_it_is_said_as_it_is(file: str, words: str) -> None:
    text = re.sub(r"[\s#]+", " ", (ROOT / file).read_text(encoding="utf-8"))
    assert re.sub(r"[\s#]+", " ", words).format(**facts()) in text


def test_the_doctor_accepts_the_oldest_python_that_pip_does() -> None:
    assert metadata.metadata("megatron-hetero")["Requires-Python"] == f">={'.'.join(map(str, OLDEST_PYTHON))}"
