"""Finds the folder of a Hugging Face model: a path, a repository in the local cache of its hub, or a name in there."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hetero.errors import ConfigError
from hetero.serialization import read_text

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Of a model in the hub: the owner's and the model's own."""


def hugging_face_folder(path: Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Finds the folder that ``path`` means; ``None`` if it is a file, or no name of a folder or a model of the hub.

    A folder may be a repository as the hub's cache keeps it (``models--OWNER--NAME``), of which the snapshot of the
    main branch is taken. ``OWNER/NAME`` is looked up in that cache, which is ``HF_HUB_CACHE``, or ``hub`` in
    ``HF_HOME``, by default ``~/.cache/huggingface``. Nothing is fetched.

    Raises:
        ConfigError: the cache has no snapshot of the model.
    """
    if path.is_file():
        return None
    if path.is_dir():
        return _snapshot(path) if (path / "snapshots").is_dir() else path
    if not _NAME.fullmatch(str(path)):
        return None
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache/huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or home / "hub")
    repository = cache / f"models--{str(path).replace('/', '--')}"
    if not repository.is_dir():
        if path.suffix:
            return None
        raise ConfigError(
            f"{path}: no such file or folder, and not in the Hugging Face cache {cache}; correct the path, fetch the "
            "model with Hugging Face's own tools, or set HF_HOME"
        )
    return _snapshot(repository)


def _snapshot(repository: Path) -> Path:
    """The snapshot of the main branch, or the only one."""
    main = repository / "refs/main"
    if main.is_file():
        folder = repository / "snapshots" / read_text(main).strip()
        if folder.is_dir():
            return folder
    found = sorted(each for each in (repository / "snapshots").glob("*") if each.is_dir())
    if len(found) != 1:
        raise ConfigError(
            f"{repository}: {len(found)} snapshots and none of the main branch; give the path of one, in snapshots/"
        )
    return found[0]
