"""Finds the ``torch_dist`` checkpoint in a folder of Megatron-LM's, and names the other formats that it may hold."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hetero.errors import CheckpointError, ConfigError
from hetero.serialization import parse_json, read_text

BACKENDS: Mapping[str, str | int] = MappingProxyType(
    {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
)
"""The content of the ``metadata.json`` of a ``torch_dist`` checkpoint."""

_LATEST = "latest_checkpointed_iteration.txt"
_CHECKPOINT = re.compile(r"iter_\d{7,}|release")

_SAVE_AS_TORCH_DIST = "save it with Megatron-LM's --ckpt-format torch_dist"


def find_torch_dist(folder: Path) -> Path:
    """Find the folder of one ``torch_dist`` checkpoint: ``folder``, or the newest of those in it.

    Raises:
        CheckpointError: there is none; it says what there is.
        ConfigError: the file that names the format or the newest checkpoint cannot be read.
    """
    checkpoint = _newest(folder)
    path = checkpoint / "metadata.json"
    if not path.exists():
        raise CheckpointError(_what_it_is(checkpoint))
    backends = parse_json(read_text(path), source=str(path))
    if not isinstance(backends, dict):
        raise ConfigError(f"{path}: not a JSON object")
    backend = backends.get("sharded_backend")
    if backend != BACKENDS["sharded_backend"]:
        raise CheckpointError(
            f"{path}: sharded_backend is {backend!r}, only 'torch_dist' is read; {_SAVE_AS_TORCH_DIST}"
        )
    return checkpoint


def _newest(folder: Path) -> Path:
    """The checkpoint that Megatron-LM would load from ``folder``; ``folder`` itself if it is one."""
    latest = folder / _LATEST
    if latest.exists():
        word = read_text(latest).strip()
        if word != "release" and not re.fullmatch(r"[0-9]{1,18}", word):
            raise CheckpointError(f"{latest}: it says {word[:40]!r}, must be a number or release")
        checkpoint = folder / (word if word == "release" else f"iter_{int(word):07d}")
        if not checkpoint.is_dir():
            raise CheckpointError(f"{latest}: it says {word}, and there is no {checkpoint}{_others(folder)}")
        return checkpoint
    if not (folder / "metadata.json").exists() and (others := _others(folder)):
        raise CheckpointError(f"{folder}: no {_LATEST}, which names the newest checkpoint{others}")
    return folder


def _others(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and _CHECKPOINT.fullmatch(path.name))
    return f"; give one of its checkpoints as --input: {', '.join(names)}" if names else ""


def _what_it_is(checkpoint: Path) -> str:
    """Say what a folder without ``metadata.json`` is, by the files by which Megatron-LM tells its formats apart."""
    if any(checkpoint.glob("mp_rank_*/")) or checkpoint.name.startswith("mp_rank_"):
        return (
            f"{checkpoint}: a checkpoint in Megatron-LM's older format torch, which has a pickle of each rank "
            "(mp_rank_00/model_optim_rng.pt); only torch_dist is read. Megatron-LM converts it: start the run's own "
            f"command with --load {_folder_to_load(checkpoint)} --ckpt-format torch --ckpt-convert-format torch_dist "
            "--ckpt-convert-save NEW, and give NEW/torch_dist as --input"
        )
    if (checkpoint / ".metadata").exists():
        return (
            f"{checkpoint}: it has .metadata and no metadata.json, as Megatron-LM's formats torch_dcp and fsdp_dtensor "
            f"have; only torch_dist is read; {_SAVE_AS_TORCH_DIST}"
        )
    return (
        f"{checkpoint}: no checkpoint of Megatron-LM, which has a metadata.json; give the folder that its --save "
        "named, or one of the checkpoints in there (iter_...)"
    )


def _folder_to_load(checkpoint: Path) -> Path:
    """The folder that holds the checkpoint, as Megatron-LM's --load takes it."""
    while checkpoint.name.startswith(("mp_rank_", "iter_", "release")):
        checkpoint = checkpoint.parent
    return checkpoint
