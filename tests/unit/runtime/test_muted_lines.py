"""What a user cannot act on is not printed; anything else of the same source is."""

import logging
import warnings

import pytest

from hetero.runtime.muted_lines import ALWAYS, WITHOUT_CUDA, LoggedLine, mute_lines

LINES = ALWAYS + WITHOUT_CUDA


@pytest.fixture(autouse=True)
def restored() -> None:
    """pytest restores the filters of warnings; those of loggers may stay, every run sets them."""
    mute_lines(LINES)


@pytest.mark.parametrize("line", [each for each in LINES if isinstance(each, LoggedLine)], ids=lambda each: each.words)
def test_a_logged_line(line: LoggedLine, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(line.logger)
    logger.warning("%s, and so on", line.words)
    logger.warning("something else")
    assert caplog.messages == ["something else"]


@pytest.mark.parametrize(
    ("message", "category", "module"),
    [
        ("dist._all_gather_base is deprecated", FutureWarning, "torch.distributed.c10d_logger"),
        ("full scope is deprecated. Use another", UserWarning, "megatron.core.transformer.transformer_config"),
        ("Setting CUDA_DEVICE_MAX_CONNECTIONS to 1", UserWarning, "megatron.core.tensor_parallel.layers"),
    ],
)
def test_a_warning(message: str, category: type[Warning], module: str) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        mute_lines(LINES)
        warnings.warn_explicit(message, category, "file.py", 1, module)
        warnings.warn_explicit("something else", UserWarning, "file.py", 2, module)
    assert [str(each.message) for each in shown] == ["something else"]


def test_muting_twice_filters_once() -> None:
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    before = len(logger.filters)
    mute_lines(LINES)
    assert len(logger.filters) == before


def test_every_line_has_a_reason_with_its_versions() -> None:
    for line in LINES:
        assert line.why.startswith(("all versions", "megatron-core ", "torch ")), line
