"""Loads torch's own cuDNN whole, before TransformerEngine can load another, and asks which one is loaded.

cuDNN is a small library, ``libcudnn.so.9``, that loads its parts by their names when they are first needed. Of two
versions in a process, the one that is asked first decides for both. torch's wheels bring one, and the import of torch
loads its small library alone. TransformerEngine (``transformer_engine/common/__init__.py``) loads one by its path, with
symbols for all: that of ``CUDNN_HOME``, ``CUDA_HOME`` or ``/usr/local/cuda``, if there is one. torch then runs on that
version, and ``torch.backends.cudnn.version()`` raises if it is older than the one torch was built with. The same comes
of ``LD_LIBRARY_PATH``, which the loader searches before cuDNN's own folder.

torch's comes first here, since torch was built and tested with it. TransformerEngine runs on any cuDNN 9.
"""

import contextlib
import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT, read_text
from hetero.units import MIB

PARTS = ("graph", "ops", "cnn", "adv", "engines_runtime_compiled", "engines_precompiled", "heuristic")
"""Parts of cuDNN 9, each after those that it needs."""

_MEMORY_MAP = Path("/proc/self/maps")
_MAX_MAP_BYTES = 16 * MIB
"""Linux lets a process have 65,530 mappings, each a line of some 100 to 200 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudnnVersions:
    """Versions of cuDNN, such as ``9.19.0``: what torch's calls reach, and what torch was built with.

    folders: where libraries of cuDNN that are loaded lie.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    loaded: str
    built: str
    folders: tuple[AnyText, ...] = ()

    def __str__(self) -> str:
        return self.loaded if self.loaded == self.built else f"{self.loaded}, torch was built with {self.built}"

    @property
    def fit(self) -> bool:
        """Whether torch runs on what is loaded: it is of the same major version, and no older.

        As ``torch/backends/cudnn/__init__.py`` has it from cuDNN 7 on.
        """
        (major, minor), (built_major, built_minor) = map(_major_and_minor, (self.loaded, self.built))
        return major == built_major and minor >= built_minor

    def fix(self, cuda: str) -> str:
        """Return what to do where they do not fit, for a torch of that version of CUDA."""
        package = f"nvidia-cudnn-cu{cuda.split('.')[0]}=={'.'.join(self.built.split('.')[:2])}.*"
        return f"leave other versions out of LD_PRELOAD and run: pip install --no-deps '{package}'"


def _major_and_minor(version: str) -> tuple[int, int]:
    major, minor, *_ = (int(part) for part in version.split("."))
    return major, minor


def load_cudnn() -> None:
    """Load all parts of torch's cuDNN, and let whoever is loaded later find it.

    Call it after the import of torch and before that of TransformerEngine. Safe to call again. Does nothing without
    cuDNN, or if others are loaded as well: it is too late then.
    """
    paths = [path for path in loaded_libraries() if re.fullmatch(r"libcudnn\.so\.\d+", path.name)]
    if len(paths) != 1:
        return
    (path,) = paths
    # What cannot be loaded torch may never need, and it says so itself where it does.
    with contextlib.suppress(OSError):
        for part in PARTS:
            library = path.with_name(path.name.replace("libcudnn", f"libcudnn_{part}"))
            if library.is_file():
                ctypes.CDLL(str(library))
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def loaded_libraries() -> list[Path]:
    """Return the files of cuDNN that this process has loaded; none where the kernel does not say."""
    try:
        mapped = read_text(_MEMORY_MAP, limit_bytes=_MAX_MAP_BYTES)
    except ConfigError:
        return []
    # The path is the sixth column, and may contain blanks.
    found = re.findall(r"^(?:\S+ +){5}(/.*/libcudnn[^/\s]*\.so[^/\s]*)$", mapped, re.MULTILINE)
    return [Path(path) for path in dict.fromkeys(found)]
