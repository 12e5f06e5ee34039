"""Files are looked at before torch is loaded where no rank waits for another; what is said, is among the mistakes."""

from pathlib import Path

import pytest

from hetero.errors import ConfigError
from megatron.pretrain.given_files import sees_what_all_see, step_to_load


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"WORLD_SIZE": "1"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, True),
        # Ranks of several hosts, or of nobody knows how many.
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "8"}, False),
        # An agent of elastic training has looked, or asks what there is to plan.
        ({"HETERO_ELASTIC": "assignment.json"}, False),
        ({"HETERO_ELASTIC_DESCRIBE": "problem.json"}, False),
    ],
)
def test_who_looks_at_once(environment: dict[str, str], expected: bool) -> None:
    assert sees_what_all_see(environment) is expected


def test_a_folder_before_its_first_checkpoint_is_right_for_who_saves_there(tmp_path: Path) -> None:
    assert step_to_load(tmp_path, None, starts_anew=True) is None
    for wanted, starts_anew in ((None, False), (7, True)):
        with pytest.raises(ConfigError, match=r"holds no checkpoint; correct the path, or leave it out to start anew$"):
            step_to_load(tmp_path, wanted, starts_anew=starts_anew)
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / "step_00000007" / "SHA256SUMS").touch()
    assert step_to_load(tmp_path, None, starts_anew=False) == 7
    assert step_to_load(tmp_path, 5, starts_anew=False) == 5


def test_a_model_of_hugging_face_is_called_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"but one of Hugging Face's libraries; convert it with .* --from hf --to het"
    ):
        step_to_load(tmp_path, None, starts_anew=False)
