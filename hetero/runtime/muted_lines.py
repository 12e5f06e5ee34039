"""Mutes the lines of libraries that a user of this program cannot act on, each by its source and its words.

Everything else is shown: no level is raised, no category is ignored as a whole.
"""

import logging
import warnings
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedLine:
    """A line of a logger.

    logger: the name of the one that logs it.
    words: what the line begins with or has in it.
    why: why a user cannot act on it, with the versions that print it.
    """

    logger: str
    words: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    """A warning of Python's ``warnings``, by its beginning, category and module.

    words: a regular expression for its beginning; empty for any.
    module: a regular expression for the module that is blamed; empty for any.
    why: as of :class:`LoggedLine`.
    """

    words: str = ""
    category: type[Warning] = Warning
    module: str = ""
    why: str


ALWAYS: tuple[LoggedLine | Warned, ...] = (
    LoggedLine(
        logger="megatron.core.models.gpt.gpt_model",
        words="GPTModel IS DEPRECATED",
        why="megatron-core 0.19 and newer, once per stage: which of its classes runs is this program's choice",
    ),
    LoggedLine(
        logger="torch.utils.cpp_extension",
        words="No CUDA runtime is found, using CUDA_HOME",
        why="all versions, once per rank, where a CUDA toolkit is and no device: nothing here is compiled with it",
    ),
    Warned(
        category=FutureWarning,
        module=r"torch\.distributed\.c10d_logger",
        why="torch 2.13 and newer: megatron-core calls collectives by names that are deprecated",
    ),
    Warned(words="full scope is deprecated", why="all versions: megatron-core warns of a field that it sets itself"),
)
WITHOUT_CUDA: tuple[LoggedLine | Warned, ...] = (
    Warned(words=".*CUDA_DEVICE_MAX_CONNECTIONS", why="all versions: a variable that only CUDA reads"),
    LoggedLine(
        logger="megatron.core.tensor_parallel.random",
        words="CPU RNG state changed",
        why="all versions: the generator of the CPU moves inside a fork of CUDA's, which is the same one here",
    ),
)


def mute_lines(lines: tuple[LoggedLine | Warned, ...]) -> None:
    """Let these lines not be printed from now on. Safe to call again."""
    for line in lines:
        match line:
            case LoggedLine():
                logger, muting = logging.getLogger(line.logger), _Muting(line.words)
                if muting not in logger.filters:
                    logger.addFilter(muting)
            case Warned():
                warnings.filterwarnings("ignore", message=line.words, category=line.category, module=line.module)


@dataclass(frozen=True, slots=True)
class _Muting:
    """A logger's filter for lines with these words."""

    words: str

    def filter(self, record: logging.LogRecord) -> bool:
        return self.words not in record.getMessage()
