"""Keeps what torch compiles in a folder of this user's.

torch's compiler and Triton keep code in a folder, and run what they find there. By default it is
``/tmp/torchinductor_USER``, of which torch asks only whether it is there: another user of the host can make it first.
"""

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from hetero.folder_owners import check_own
from hetero.private_files import make_private_folder

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
    make_private_folder(folder, fix=f"set {_CACHE} to a folder of your own")
    environment[_CACHE] = str(folder)
