"""Wheels of every megatron-core that ``setup.py`` accepts, as pip downloads them; none of them is installed.

``python -m tests.helpers.megatron_core_wheels`` fetches them all, 15 MB, once per environment.
"""

import subprocess
import sys
from pathlib import Path

VERSIONS = ("0.16.1", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2")
"""Every release from 0.16.1 to below 0.20 that PyPI had on 2026-11-27."""

NEWEST = tuple({version.rpartition(".")[0]: version for version in VERSIONS}.values())
"""The last release of each minor version, the oldest one first."""

FOLDER = Path(sys.prefix) / "megatron_core_wheels"


def fetch(version: str) -> Path:
    """Return the wheel of this version for Python 3.12 on Linux, of which all of them have one.

    Raises:
        subprocess.CalledProcessError: pip could not download it.
    """
    pattern = f"megatron_core-{version}-*.whl"
    if not (wheel := next(FOLDER.glob(pattern), None)):
        target = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp"]
        platform = ["--platform", "manylinux_2_28_x86_64", "--dest", str(FOLDER)]
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", *quiet, *target, *platform, f"megatron-core=={version}"],
            check=True,
            timeout=100,
        )
        wheel = next(FOLDER.glob(pattern))
    return wheel


if __name__ == "__main__":
    for version in VERSIONS:
        fetch(version)
