"""What is reported, and where: checked before training starts."""

from pathlib import Path

import pytest

from hetero.errors import ConfigError
from megatron.training.metrics import check_tensorboard


def test_a_folder_of_events_that_cannot_be_made_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^--tensorboard-dir .*file/events: cannot be made: Not a directory; name "):
        check_tensorboard(tmp_path / "file" / "events")
    check_tensorboard(tmp_path / "new" / "events")
    assert (tmp_path / "new" / "events").is_dir()
