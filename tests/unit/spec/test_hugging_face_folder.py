"""Hugging Face folders, and the hub's local cache."""

import json
import shutil
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.errors import ConfigError
from hetero.spec.hugging_face.folder import hugging_face_folder
from hetero.spec.model_import import load_model, precision_of
from tests.unit.spec.test_model_import import LLAMA

NAME = Path("owner/Some-1.5B")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository of a model in a cache as the hub's library writes it: two snapshots, one of the main branch."""
    repository = tmp_path / "hub/models--owner--Some-1.5B"
    for revision, num_layers in (("older", 5), ("newer", 7)):
        folder = repository / "snapshots" / revision
        folder.mkdir(parents=True)
        config = LLAMA | {"dtype": "bfloat16", "num_hidden_layers": num_layers}
        (folder / "config.json").write_text(json.dumps(config))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("newer\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return repository


def test_a_model_is_found_by_its_file_its_folder_its_repository_and_its_name(cached: Path) -> None:
    newest = cached / "snapshots/newer"
    for path in (newest / "config.json", newest, cached, NAME):
        assert load_model(path).num_layers == 7
        assert precision_of(path) == "bf16"
    assert load_model(cached / "snapshots/older").num_layers == 5
    assert hugging_face_folder(NAME, {"HF_HUB_CACHE": str(cached.parent)}) == newest


def test_without_a_main_branch_the_only_snapshot_is_taken(cached: Path) -> None:
    (cached / "refs/main").unlink()
    with pytest.raises(ConfigError, match="2 snapshots and none of the main branch; give the path of one"):
        load_model(NAME)
    shutil.rmtree(cached / "snapshots/older")
    assert load_model(NAME).num_layers == 7


def test_what_is_not_there_is_told(cached: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"owner/Other: no such file or folder, and not in the Hugging Face cache .*hub"
    ):
        load_model(Path("owner/Other"))
    with pytest.raises(ConfigError, match="no such file"):
        load_model(Path("owner/other.json"))
    (cached / "snapshots/newer/config.json").unlink()
    with pytest.raises(ConfigError, match=r"newer/config\.json: no such file"):
        load_model(NAME)


@pytest.mark.parametrize(
    ("keys", "precision"),
    [({}, None), ({"torch_dtype": "float16"}, "fp16"), ({"dtype": "torch.float32"}, "fp32"), ({"dtype": "auto"}, None)],
)
def test_precision(keys: dict[str, str], precision: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | keys))
    assert precision_of(tmp_path) == precision
    (tmp_path / "own.json").write_text(json.dumps({"dtype": "float16"}))
    assert precision_of(tmp_path / "own.json") is None, "no configuration of Hugging Face"


def test_a_plan_has_the_precision_of_the_configuration(
    cached: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no device has it, the message says who asked."""
    old = tmp_path / "v100.yaml"
    old.write_text("node_types: [{name: v100, device: V100-16, gpus_per_node: 1}]\n")
    flags = ["--cluster", str(old), "--model", str(NAME), "--global-batch-size", "8"]
    assert main(["plan", *flags]) == 2
    said = capsys.readouterr().err
    assert said.endswith(f"; bf16 is what {NAME} says, --precision chooses another\n")
    assert main(["plan", *flags, "--precision", "bf16"]) == 2
    assert "--precision chooses another" not in capsys.readouterr().err
