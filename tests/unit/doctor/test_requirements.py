"""What installed packages ask for and do not get is found in their metadata."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero.doctor.requirements import UnmetRequirement, unmet_requirements


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def install(site: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


OWN = [
    'megatron-core<0.20,>=0.16.1; extra == "train"',
    'transformer-engine>=2.9; extra == "transformer-engine"',
    "numpy",
]


def test_packages_that_accept_one_another(site: Path) -> None:
    install(site, "megatron-hetero", "0.3.0", [*OWN, 'ruff>=99; extra == "test"'])
    install(site, "megatron-core", "0.19.2", ["numpy", 'nvidia-cudnn-frontend==1.26.0; extra == "dev"'])
    install(site, "nvidia-cudnn-frontend", "1.32.0")
    install(site, "numpy", "2.4.6")
    install(site, "ruff", "0.17.5")
    assert unmet_requirements() == ()


def test_what_the_newest_transformer_engine_needs_and_the_extra_dev_of_megatron_core_took_away(site: Path) -> None:
    """megatron-core 0.19.2 with its extra pins 1.26.0; whichever of the two pip installed last had its way."""
    install(site, "megatron-hetero", "0.3.0", OWN)
    install(site, "transformer-engine", "2.20.2", ['transformer-engine-torch==2.20.2; extra == "pytorch"'])
    install(site, "transformer-engine-torch", "2.20.2", ["nvidia-cudnn-frontend>=1.29.0", "torch"])
    install(site, "nvidia-cudnn-frontend", "1.26.0")
    assert unmet_requirements() == (
        UnmetRequirement(
            asked_by="transformer-engine-torch 2.20.2",
            package="nvidia-cudnn-frontend",
            accepted=">=1.29.0",
            installed="1.26.0",
        ),
    )


def test_versions_outside_of_our_own_bounds(site: Path) -> None:
    install(site, "megatron-hetero", "0.3.0", OWN)
    install(site, "megatron-core", "0.20.0")
    install(site, "transformer-engine", "2.8.0")
    assert [(each.package, each.accepted) for each in unmet_requirements()] == [
        ("megatron-core", "<0.20,>=0.16.1"),
        ("transformer-engine", ">=2.9"),
    ]
