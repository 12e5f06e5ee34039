"""Packages that an environment lacks are found before a run, with those that they need."""

from pathlib import Path

import pytest

from tests.gpu_stages.missing_packages import PROJECT, missing_packages


def write_package(folder: Path, name: str, version: str, *needs: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = (
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {need}" for need in needs),
    )
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_what_is_missing_is_found_with_what_it_is_needed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a circle of packages, and not for an extra that was not asked for or another system."""
    write_package(
        tmp_path, "played_a", "1.0", "played_b>=2", "played_c; extra == 'more'", "played_d; sys_platform == 'x'"
    )
    write_package(tmp_path, "played_b", "1.5", "played_a", "played_e>=3")
    monkeypatch.syspath_prepend(tmp_path)
    assert sorted(missing_packages("played_a")) == ["played_b>=2, and version 1.5 is there", "played_e>=3"]
    assert "played_c" in list(missing_packages("played_a[more]"))


def test_what_torch_brings_is_its_own_affair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, "torch", "99.0", "played_cuda")
    write_package(tmp_path, "played_a", "1.0", "torch>=2.10")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(missing_packages("played_a")) == []


def test_the_environment_of_the_tests_is_complete() -> None:
    assert list(missing_packages(PROJECT)) == []
