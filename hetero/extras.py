"""Says which extra of the distribution to install when a command needs a package that is not there.

``pip install megatron-hetero`` brings what planning, simulating and reporting need. Everything else comes with an
extra (``setup.py``), and whoever needs one asks here first, so that a missing package is one line and no traceback.
"""

import importlib.util
import sys
from collections.abc import Mapping
from types import MappingProxyType

from hetero.errors import ConfigError

EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "train": ("torch", "megatron.core", "safetensors", "isal"),
        "tokenizers": ("tokenizers",),
        "sentencepiece": ("sentencepiece",),
        "tensorboard": ("tensorboard",),
        "wandb": ("wandb",),
        "prometheus": ("prometheus_client",),
        "sweep": ("pyarrow",),
        "data": ("pyarrow",),
        "elastic": (
            *("torch", "megatron.core", "safetensors", "isal"),
            *("aiohttp", "cryptography", "etcd3gw", "obstore", "requests"),
        ),
        "transformer-engine": ("transformer_engine",),
    }
)
"""By extra, the modules that are importable once it is installed."""


def pip_install(extra: str) -> str:
    """The command that installs ``extra``; the quotes are for shells that expand brackets."""
    return f"pip install 'megatron-hetero[{extra}]'"


def missing_modules(extra: str) -> tuple[str, ...]:
    """What ``extra`` brings and is not installed. Imports nothing but the packages around what it looks for."""
    return tuple(module for module in EXTRAS[extra] if not is_installed(module))


def require(extra: str, *, asked_by: str) -> None:
    """Check that ``extra`` is installed.

    Args:
        asked_by: the flag or the program that needs it, as the user knows it.

    Raises:
        ConfigError: it is not; names what is missing and the command that installs it.
    """
    if missing := missing_modules(extra):
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{asked_by} needs {', '.join(missing)}, which {verb} not installed; run: {pip_install(extra)}"
        )


def exit_without(extra: str, *, program: str) -> None:
    """:func:`require` for the top of a script, before its imports: ends it with exit code 2 and one line on stderr."""
    try:
        require(extra, asked_by=program)
    except ConfigError as error:
        sys.stderr.write(f"hetero: {error}\n")
        sys.exit(2)


def is_installed(module: str) -> bool:
    """Whether ``module`` can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The package around it is missing too.
        return False
