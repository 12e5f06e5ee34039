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

_CACHE, _TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def use_own_compiler_cache(environment: MutableMapping[str, str]) -> None:
    """Set the folder of torch's compiler to one that this user alone can enter; one that is set is only checked.

    Call it before anything is compiled.

    Raises:
        ConfigError: a folder belongs to another user, or may be written by others, or cannot be made.
    """
    for name in (_CACHE, _TRITON_CACHE):
        if given := environment.get(name):
            check_own(Path(given), instead=f"set {name} to a folder of your own")
    if environment.get(_CACHE):
        return
    folder = Path(tempfile.gettempdir(), f"hetero-compiled-{os.geteuid()}")
    instead = f"set {_CACHE} to a folder of your own"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made for compiled code: {error.strerror}; {instead}") from None
    check_own(folder, instead=instead)
    environment[_CACHE] = str(folder)
