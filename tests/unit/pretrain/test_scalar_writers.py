"""Writers of figures whose files cannot be written."""

import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hetero.errors import ConfigError
from megatron.pretrain.cli.logging_config import ScalarsConfig
from megatron.pretrain.scalar_writers import _TensorBoard, _WandB


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_figures_of_tensorboard_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = _TensorBoard(tmp_path, queue_size=1)
    writer.write({"loss": 1.0}, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        # A thread writes what is queued, so that a later figure meets the error.
        step = 1
        while not (said := capsys.readouterr().err):
            step += 1
            writer.write({"loss": 1.0}, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"hetero: --tensorboard-dir {tmp_path}: File too large: figures are lost until" in said
    writer.write({"loss": 2.0}, step + 1)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("loss")[-1].step == step + 1


def test_what_wandb_says_is_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of one's own (WANDB_BASE_URL) may have a password in its URL."""

    def init(**_: object) -> None:
        raise OSError("https://name:a-secret@wandb.example is away")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=OSError))
    with pytest.raises(ConfigError, match=r"does not begin: https://\*\*\*@wandb\.example is away") as refused:
        _WandB(ScalarsConfig(wandb_project="p", learning_rate=False, loss_scale=False), {})
    assert "a-secret" not in str(refused.value)
