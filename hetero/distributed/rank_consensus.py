"""Lets all ranks succeed at a step of start-up, or fail with the same message, before any waits for another."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from hetero.errors import ConfigError, HeteroError
from hetero.text import number_ranges, numbered

T = TypeVar("T")


class ConsensusError(ConfigError):
    """Something is wrong on some rank, and every rank raises this same error at the same point.

    Attributes:
        is_of_input: all that is wrong is a :class:`hetero.errors.ConfigError`, which would be raised again.
    """

    def __init__(self, message: str, *, is_of_input: bool = False) -> None:
        super().__init__(message)
        self.is_of_input = is_of_input


def is_wrong_input(error: BaseException) -> bool:
    """Whether an error comes from what the user gave, so that another attempt ends the same way."""
    return error.is_of_input if isinstance(error, ConsensusError) else isinstance(error, ConfigError)


def on_all_ranks(step: Callable[[], T]) -> T:
    """Call ``step`` on every rank and return its value if it succeeded on all of them.

    Collective over the world (all-gather of the errors). ``step`` must not communicate.

    Raises:
        ConsensusError: ``step`` raised a ``HeteroError`` on some rank; every rank gets the same message.
    """
    error, is_of_input = None, True
    try:
        value = step()
    except HeteroError as raised:
        error, is_of_input = str(raised) or type(raised).__name__, is_wrong_input(raised)
    every: list[tuple[str | None, bool]] = [(None, True)] * dist.get_world_size()
    dist.all_gather_object(every, (error, is_of_input))
    errors = [message for message, _ in every]
    if any(errors):
        raise ConsensusError(describe_errors(errors), is_of_input=all(of_input for _, of_input in every))
    return value


def is_true_on_any_rank(value: bool) -> bool:
    """Return whether ``value`` is true on any rank. Collective over the world (all-gather)."""
    values = [False] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return any(values)


def from_rank_0(step: Callable[[], str]) -> str:
    """Call ``step`` on rank 0 and return its text on every rank.

    Collective over the world (broadcast). ``step`` must not communicate.

    Raises:
        ConsensusError: ``step`` raised a ``HeteroError``; every rank gets the same message.
    """
    answer: list[str | None] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [step(), None]
        except HeteroError as raised:
            answer = [None, str(raised) or type(raised).__name__]
    dist.broadcast_object_list(answer, src=0)
    text, error = answer
    if text is None:
        raise ConsensusError(str(error))
    return text


def check_same_everywhere(what: str, text: str, *, fix: str) -> None:
    """Check that every rank has the same ``text``, for example the plan file's contents.

    Collective over the world (all-gather of digests).

    Raises:
        ConsensusError: some ranks differ from rank 0.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if differing := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise ConsensusError(f"{what}: ranks {number_ranges(differing)} have another one than rank 0; {fix}")


def describe_errors(errors: Sequence[str | None]) -> str:
    """Join the errors of all ranks, in their order, to one message: each error once, with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            ranks_of.setdefault(error, []).append(rank)
    if len(ranks_of) == 1 and all(errors):
        return next(iter(ranks_of))
    return "; ".join(f"on {numbered('rank', ranks)}: {error}" for error, ranks in ranks_of.items())
