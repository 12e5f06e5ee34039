"""What is reported and where: checked before training starts, and read back from whoever got it."""

import dataclasses
import json
import re
import socket
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hetero import peer_limits
from hetero.cost.model_flops import DeviceWork, Products
from hetero.errors import ConfigError
from hetero.plan.batch_sizes import BatchRampup, BatchSizes
from hetero.runtime.optimizer import StepResult
from megatron.pretrain import metrics
from megatron.pretrain.metrics import Metrics, ReportedRun
from megatron.pretrain.scalar_writers import check_writers, open_writers, settings_of
from tests.helpers.flags import parse

WORK = {
    Products("A100-80", "bf16"): DeviceWork(num_devices=2, model_flops=8e12, peak_flops_per_s=10e12),
    Products("slow", "bf16"): DeviceWork(num_devices=1, model_flops=1e12, peak_flops_per_s=None),
}
RUN = ReportedRun(train_iters=4, batches=BatchSizes(8), seq_length=16, world_size=3, work=WORK)


class Clock:
    """Stands still unless somebody moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def run_steps(clock: Clock, flags: str, *, evaluates: bool = False, run: ReportedRun = RUN) -> None:
    """Three steps of 2 s each, the second of which is skipped; between two of them 5 s are spent on a save."""
    config = parse(flags)
    writers = open_writers(config.scalars, settings=settings_of(config))
    with Metrics(run, config.logging, config.scalars, writers) as reporter:
        for step in (1, 2, 3):
            clock.now_s += 2.0
            result = StepResult(loss=4.0 - step, num_tokens=128, grad_norm=0.5, skipped=step == 2, loss_scale=64.0)
            reporter.record(step, result, rates=(1e-3, None), num_samples=run.batches.size(step - 1))
            with reporter.outside_steps("saving"):
                clock.now_s += 5.0
        if evaluates:
            reporter.record_evaluation(3, "valid", 2.0)
        reporter.say_where_time_went()


def events(folder: Path) -> dict[str, dict[int, float]]:
    found = EventAccumulator(str(folder)).Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_the_log_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Speed and what is left of the run, without the time of saves; of each device type TFLOP/s of one device."""
    run_steps(clock, "--log-interval 2 --log-throughput")
    line, time = capsys.readouterr().out.splitlines()
    assert line == (
        "step 2/4 | loss 3.000000 | grad norm 0.5000 | lr 1.000e-03 | 4.0 samples/s | 64 tokens/s | "
        "step time 2000.0 ms | skipped 1 | loss scale 64 | A100-80 2 TFLOP/s (MFU 20.0%) | slow 0.5 TFLOP/s | "
        "ETA 0:00:04"
    )
    assert time == "seconds: training 6.0, saving 15.0"


def test_the_log_line_of_a_batch_that_grows(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 4, 4, 8 and 8 samples, 2 s each: what is left of the run is counted in samples."""
    batches = BatchSizes(8, BatchRampup(start=4, increment=4, samples=5))
    run_steps(clock, "--log-interval 2", run=dataclasses.replace(RUN, batches=batches))
    line, _ = capsys.readouterr().out.splitlines()
    assert line == (
        "step 2/4 | batch 4 | loss 3.000000 | grad norm 0.5000 | lr 1.000e-03 | 2.0 samples/s | 32 tokens/s | "
        "step time 2000.0 ms | skipped 1 | loss scale 64 | ETA 0:00:08"
    )


def test_tensorboard_gets_what_the_flags_ask_for(clock: Clock, tmp_path: Path) -> None:
    """Every step by itself, whatever the log lines do."""
    run_steps(
        clock,
        f"--tensorboard-dir {tmp_path} --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard "
        "--log-world-size-to-tensorboard --log-batch-size-to-tensorboard",
        evaluates=True,
    )
    found = events(tmp_path)
    assert found["lm loss"][1] == 3.0
    assert found["iteration-time"] == {1: 2.0, 2: 2.0, 3: 2.0}
    assert found["throughput/A100-80"][2] == 2.0
    assert found["mfu/A100-80"][3] == pytest.approx(0.2)
    assert "mfu/slow" not in found
    assert found["seconds/training"][3] == 6.0
    assert found["seconds/saving"] == {2: 5.0, 3: 10.0}
    assert found["lm loss valid ppl"][3] == pytest.approx(7.389056)
    assert (found["world-size"][1], found["batch-size"][1], found["loss-scale"][1]) == (3.0, 8.0, 64.0)


def test_tensorboard_without_what_the_flags_switch_off(clock: Clock, tmp_path: Path) -> None:
    flags = "--tensorboard-log-interval 2 --no-log-learning-rate-to-tensorboard --no-log-loss-scale-to-tensorboard"
    run_steps(clock, f"--tensorboard-dir {tmp_path} {flags}", evaluates=True)
    found = events(tmp_path)
    assert found.keys() == {
        *("lm loss", "grad-norm", "skipped-iterations", "iteration-time", "samples-per-second", "tokens-per-second"),
        *("throughput/A100-80", "throughput/slow", "mfu/A100-80", "lm loss valid"),
    }
    assert found["lm loss"] == {2: 3.0}, "the mean of those that were not skipped"


@pytest.mark.slow
def test_weights_and_biases_without_a_network(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have the figures and the configuration; 'wandb sync' sends them later."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_steps(clock, f"--wandb-project mixed --wandb-exp-name first --wandb-save-dir {tmp_path}")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert logged(file) == [(1, 3.0), (2, None), (3, 1.0)]
    assert b"global_batch_size" in file.read_bytes()


def logged(file: Path) -> list[tuple[int, float | None]]:
    """Step and loss of the records in a file of Weights & Biases, read by its own reader."""
    # Seconds of imports, which every worker would have while it collects.
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    found = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {(each.key or "/".join(each.nested_key)): each.value_json for each in record.history.item}
            loss = json.loads(items["lm loss"])
            found.append((int(items["_step"]), loss if isinstance(loss, float | int) and loss == loss else None))
    return found


def test_prometheus_gets_the_newest_figures(clock: Clock) -> None:
    """On loopback alone, and nothing any more once the run is over."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    config = parse(f"--hetero-metrics-port {port}")
    check_writers(config.scalars)
    with Metrics(RUN, config.logging, config.scalars, open_writers(config.scalars, settings={})) as reporter:
        for step in (1, 2):
            clock.now_s += 2.0
            result = StepResult(loss=4.0 - step, num_tokens=128, grad_norm=0.5, skipped=False)
            reporter.record(step, result, rates=(1e-3, None), num_samples=8)
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert re.search(r'^hetero_lm_loss\{of=""\} 2\.0$', text, re.M)
    assert re.search(r'^hetero_mfu\{of="A100-80"\} 0\.2$', text, re.M)
    assert re.search(r'^hetero_step\{of=""\} 2\.0$', text, re.M)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_connections_that_say_nothing_are_few_and_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_limits, "MAX_SCRAPES", 2)
    monkeypatch.setattr(peer_limits, "SCRAPE_WITHIN_S", 0.5)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    config = parse(f"--hetero-metrics-port {port}")
    with Metrics(RUN, config.logging, config.scalars, open_writers(config.scalars, settings={})):
        idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3)]
        # The third at once, the others when they have said nothing for their time.
        for connection in reversed(idle):
            assert connection.recv(1) == b""
            connection.close()
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).status == 200


def test_a_port_that_is_taken_is_told_before_training() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--hetero-metrics-port {port}: 127.0.0.1 cannot be .* in use; give "):
            check_writers(parse(f"--hetero-metrics-port {port}").scalars)


def test_weights_and_biases_that_nobody_logged_in_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = parse(f"--wandb-project mixed --wandb-save-dir {tmp_path}")
    with pytest.raises(ConfigError, match=r"^--wandb-project mixed: .*; log in with 'wandb login', or set WAND"):
        open_writers(config.scalars, settings={})


def test_a_folder_of_events_that_cannot_be_made_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^--tensorboard-dir .*file/events: cannot be made: Not a directory; name "):
        check_writers(parse(f"--tensorboard-dir {tmp_path / 'file' / 'events'}").scalars)
    check_writers(parse(f"--tensorboard-dir {tmp_path / 'new' / 'events'}").scalars)
    assert (tmp_path / "new" / "events").is_dir()
