"""Defines what every format offers a converter: its model, and one full tensor at a time."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from hetero.errors import CheckpointError
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import Parameter

T = TypeVar("T")


class WeightSource(Protocol):
    """A checkpoint's weights under canonical names.

    dtype: that holds all of its weights exactly.
    step: training steps that made them, 0 if the format does not say.
    """

    @property
    def model(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def step(self) -> int: ...

    def tensor(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor of a parameter, read when called; in ``dtype``, from what comes closest to it."""
        ...


def in_groups(items: Sequence[T], *, size_bytes: Callable[[T], int], limit_bytes: int) -> list[list[T]]:
    """Neighbours together as long as they stay within ``limit_bytes``; a larger item is alone."""
    groups: list[list[T]] = []
    filled_bytes = limit_bytes
    for item in items:
        if filled_bytes + size_bytes(item) > limit_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(item)
        filled_bytes += size_bytes(item)
    return groups


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A hidden folder beside ``output`` that becomes ``output`` if the body succeeds, and is deleted if not.

    Raises:
        CheckpointError: ``output`` exists, or the file system refused.
    """
    if output.exists():
        raise CheckpointError(f"{output}: exists already; name a new folder, or move this one away")
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(output)
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
