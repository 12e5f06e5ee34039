"""Finds files of installed packages that do not fit together. Imports none of the packages.

Up to 0.2.0.dev0 the harness of megatron-hetero was ``megatron/training``, a folder that the wheel of megatron-core has
since 0.17.0. pip overwrites files of another package and deletes them with the one that it uninstalls.
"""

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from hetero.extras import pip_install
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT

OLD_HARNESS = Path("megatron/training")
OLD_FILES = ("emulation.py", "planning.py")
"""Files that the old harness had in every version, and that no megatron-core has."""

OWN, MEGATRON = "megatron-hetero", "megatron-core"


@dataclass(frozen=True, kw_only=True, slots=True)
class OldCopy:
    """A copy of megatron-hetero from before its harness moved to ``megatron/pretrain``.

    where: the folder or the file that shows it.
    fix: what removes it, an order to the user.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    where: AnyText
    fix: AnyText

    @property
    def said(self) -> str:
        """What it is, for the user."""
        return f"{self.where} is of an earlier megatron-hetero, whose harness was megatron/training"

    def __str__(self) -> str:
        return f"{self.said}; {self.fix}"


def old_copies(environment: Mapping[str, str]) -> tuple[OldCopy, ...]:
    """Return the old copies that this interpreter finds: installed ones, then those that lie on its path.

    Args:
        environment: to say whether ``PYTHONPATH`` names one.
    """
    found: dict[str, OldCopy] = {}
    for copy in (*_installed_copies(), *_copies_on_path(environment)):
        found.setdefault(copy.where, copy)
    return tuple(found.values())


def changed_files(distribution: str = MEGATRON) -> tuple[str, ...]:
    """Return the Python files of ``distribution`` that are missing, or not as its wheel brought them."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(
        path
        for path, recorded in _recorded_hashes(found).items()
        if path.endswith(".py") and recorded and _hash_of(found.locate_file(path), recorded) != recorded
    )


def reinstall_megatron_core(version: str) -> str:
    """Return the command that restores the files of the installed megatron-core."""
    return f"pip install --force-reinstall --no-deps {MEGATRON}=={version}"


def install_this() -> str:
    """Return the command that installs the megatron-hetero which is running, with what training needs."""
    root = Path(__file__).parents[2]
    return f"pip install -e '{root}[train]'" if (root / "setup.py").is_file() else pip_install("train")


def _installed_copies() -> Iterator[OldCopy]:
    for index, distribution in enumerate(importlib.metadata.distributions(name=OWN)):
        paths = _recorded_hashes(distribution)
        folder = Path(str(distribution.locate_file(OLD_HARNESS)))
        if str(OLD_HARNESS / OLD_FILES[0]) in paths and _is_old_harness(folder):
            # pip uninstalls the first one that it finds.
            fix = f"pip uninstall -y {OWN}{_restoring(folder)} && {install_this()}"
            if index > 0:
                tops = dict.fromkeys(_top(path) for path in paths if not path.startswith(".."))
                fix = f"rm -r {' '.join(str(distribution.locate_file(top)) for top in tops)}{_restoring(folder)}"
            yield OldCopy(where=str(folder), fix=f"run: {fix}")
        # An editable installation records which folder each package had when it was made.
        for path in paths:
            if path.startswith("__editable__") and path.endswith(".py"):
                finder = Path(str(distribution.locate_file(path)))
                text = finder.read_text(encoding="utf-8") if finder.is_file() else ""
                if "'megatron.training'" in text and "'megatron.pretrain'" not in text:
                    yield OldCopy(where=str(finder), fix=f"run: pip install --no-deps -e {_source_of(distribution)}")


def _copies_on_path(environment: Mapping[str, str]) -> Iterator[OldCopy]:
    pythonpath = [Path(entry).resolve() for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    for entry in dict.fromkeys(Path(entry).resolve() for entry in sys.path):
        folder = entry / OLD_HARNESS
        if _is_old_harness(folder):
            remove = f"run: rm -r {folder}{_restoring(folder)}"
            yield OldCopy(where=str(folder), fix=f"leave {entry} out of PYTHONPATH" if entry in pythonpath else remove)


def _top(path: str) -> str:
    """Return what of a distribution ``path`` is removed with; ``megatron`` holds other distributions too."""
    return str(OLD_HARNESS) if path.startswith("megatron/") else path.partition("/")[0]


def _restoring(folder: Path) -> str:
    """Return what has to follow the removal of ``folder`` where megatron-core has files in it."""
    try:
        core = importlib.metadata.distribution(MEGATRON)
    except importlib.metadata.PackageNotFoundError:
        return ""
    is_there = Path(str(core.locate_file(OLD_HARNESS))).resolve() == folder.resolve()
    shares = any(path.startswith(f"{OLD_HARNESS}/") for path in _recorded_hashes(core))
    return f" && {reinstall_megatron_core(core.version)}" if is_there and shares else ""


def _recorded_hashes(distribution: importlib.metadata.Distribution) -> dict[str, str]:
    """Return the hashes of the files of ``distribution`` by path, as RECORD has them; empty for those without one.

    ``Distribution.files`` would leave out what is missing, from Python 3.12 on.
    """
    lines = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    return {line[0]: line[1] for line in lines if len(line) > 1}


def _is_old_harness(folder: Path) -> bool:
    # Path.is_file raises where the folder may not be looked into.
    return all(os.access(folder / name, os.R_OK) for name in OLD_FILES)


def _source_of(distribution: importlib.metadata.Distribution) -> str:
    """Return the folder that an editable installation is of."""
    text = distribution.read_text("direct_url.json")
    return json.loads(text)["url"].removeprefix("file://") if text else "."


def _hash_of(path: object, recorded: str) -> str | None:
    """Return the hash of a file by the algorithm of ``recorded``, ``None`` if there is no such file."""
    algorithm, _, _ = recorded.partition("=")
    try:
        content = Path(str(path)).read_bytes()
    except OSError:
        return None
    digest = hashlib.new(algorithm, content).digest()
    return f"{algorithm}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
