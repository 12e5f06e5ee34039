"""Puts commands into a folder of the PATH, in place of installed ones."""

import sys
from pathlib import Path

HETERO = f"""#!/usr/bin/env bash
exec {sys.executable} -m hetero "$@"
"""
"""``hetero`` of this Python, whose checkout ``PYTHONPATH`` has to name."""


def put_command(folder: Path, name: str, script: str) -> Path:
    """Write an executable script into a folder, which is made if it is missing; return the folder."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(script)
    path.chmod(0o755)
    return folder
