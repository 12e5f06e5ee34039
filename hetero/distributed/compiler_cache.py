"""Keeps what torch compiles in a folder of this user's.

torch's compiler and Triton keep code in a folder, and run what they find there. By default it is
``/tmp/torchinductor_USER``, of which torch asks only whether it is there: another user of the host can make it first.
"""

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from hetero.errors import ConfigError
from hetero.folder_owners import check_own
from hetero.private_files import make_private_folder

_CACHE, _TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def use_own_compiler_cache(environment: MutableMapping[str, str]) -> None:
    """Set the folder of torch's compiler to one that this user alone can enter; one that is set is made and checked.

    It is made here so that no other user makes it first, and because torch's own would be open to a group by the umask.

    Call it before anything is compiled.

    Raises:
        ConfigError: a folder belongs to another user, or may be written by others, or cannot be made.
    """
    for name in (_CACHE, _TRITON_CACHE):
        if given := environment.get(name):
            _make_own(Path(given), fix=f"set {name} to a folder of your own")
    if environment.get(_CACHE):
        return
    folder = Path(tempfile.gettempdir(), f"hetero-compiled-{os.geteuid()}")
    make_private_folder(folder, fix=f"set {_CACHE} to a folder of your own")
    environment[_CACHE] = str(folder)


def _make_own(folder: Path, *, fix: str) -> None:
    """Make a folder that a user has named, if it is not there, and check that no other user can have written it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{folder}: the folder cannot be made: {error.strerror}; {fix}") from None
    check_own(folder, instead=fix)
