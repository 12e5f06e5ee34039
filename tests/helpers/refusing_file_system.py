"""Stands for a file system that refuses what BeeGFS, gcsfuse and CIFS refuse, by the calls of this process."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def refuse_links(
    monkeypatch: pytest.MonkeyPatch, number: int = errno.EPERM, *, on_refusal: Callable[[], object] = lambda: None
) -> list[str]:
    """Refuse hard links; returns the names of the files for which one is asked."""
    asked: list[str] = []

    def link(source: Any, target: Any, **_: Any) -> None:
        asked.append(Path(source).name)
        on_refusal()
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(os, "link", link)
    return asked


def refuse_renames_of_folders(monkeypatch: pytest.MonkeyPatch, number: int = errno.EMFILE) -> None:
    """Refuse to rename folders that are not empty, as gcsfuse does (``--rename-dir-limit``)."""
    rename = Path.rename

    def renamed(self: Path, target: Any) -> Path:
        if self.is_dir() and any(self.iterdir()):
            raise OSError(number, os.strerror(number), str(self), None, str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
