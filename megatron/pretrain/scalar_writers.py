"""Writes the figures of a run for others: TensorBoard's files, Weights & Biases, and a port that Prometheus asks.

A figure is called as in TensorBoard, by what it is and, behind a slash, of what: ``mfu/A100-80``.
"""

import contextlib
import dataclasses
import os
import re
import socket
import socketserver
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hetero import peer_limits
from hetero.errors import ConfigError
from hetero.extras import require
from hetero.output_files import make_folder
from hetero.shown_secrets import without_secrets
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.cli.logging_config import ScalarsConfig

if TYPE_CHECKING:
    from prometheus_client import Gauge
    from torch.utils.tensorboard import SummaryWriter

Scalars = Mapping[str, float]
"""Figures by name."""


class ScalarWriter(Protocol):
    """Takes the figures of a step."""

    def write(self, scalars: Scalars, step: int) -> None:
        """Write them down, or replace those of the last step."""

    def close(self) -> None:
        """Leave files and connections in order."""


def check_writers(config: ScalarsConfig) -> None:
    """Fail before training if figures are asked for that cannot be written.

    Raises:
        ConfigError: a package is not installed, a folder cannot be made, or the port is taken.
    """
    if config.tensorboard_dir is not None:
        require("tensorboard", asked_by=f"--tensorboard-dir {config.tensorboard_dir}")
        make_folder(config.tensorboard_dir, asked_by="--tensorboard-dir")
    if config.wandb_project is not None:
        require("wandb", asked_by=f"--wandb-project {config.wandb_project}")
        if config.wandb_save_dir is not None:
            make_folder(config.wandb_save_dir, asked_by="--wandb-save-dir")
    if config.port is not None:
        require("prometheus", asked_by=f"--hetero-metrics-port {config.port}")
        try:
            with closing(socket.create_server((config.host, config.port))):
                pass
        except OSError as error:
            raise _no_port(config, error) from None


def open_writers(config: ScalarsConfig, *, settings: Mapping[str, Any]) -> list[ScalarWriter]:
    """Open all writers that are asked for.

    Args:
        settings: of the run, for who keeps them beside its figures.

    Raises:
        ConfigError: Weights & Biases does not let this run in, or the port is taken.
    """
    writers: list[ScalarWriter] = []
    with ExitStack() as opened:
        if config.tensorboard_dir is not None:
            writers.append(_TensorBoard(config.tensorboard_dir, queue_size=config.queue_size))
        if config.wandb_project is not None:
            writers.append(_WandB(config, settings))
        for writer in writers:
            opened.callback(writer.close)
        if config.port is not None:
            writers.append(_Prometheus(config))
        opened.pop_all()
    return writers


def settings_of(config: PretrainConfig) -> dict[str, Any]:
    """The configuration of a run as nested dictionaries, for who keeps it beside the figures."""
    return dataclasses.asdict(config)


class _TensorBoard:
    """Files of TensorBoard. One that cannot be written, as a disk is full, costs figures and not the run."""

    def __init__(self, folder: Path, *, queue_size: int) -> None:
        self._folder = folder
        self._queue_size = queue_size
        self._writer: SummaryWriter | None = None
        self._has_complained = False

    def write(self, scalars: Scalars, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (optional)

        try:
            if self._writer is None:
                self._writer = SummaryWriter(log_dir=str(self._folder), max_queue=self._queue_size)
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            # Its thread has ended with the error, perhaps a while ago; the next figures go to another file.
            self.close()
            if not self._has_complained:
                self._has_complained = True
                sys.stderr.write(
                    f"hetero: --tensorboard-dir {self._folder}: {error.strerror or error}: figures are lost "
                    "until it can be written again; training goes on\n"
                )

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


class _WandB:
    def __init__(self, config: ScalarsConfig, settings: Mapping[str, Any]) -> None:
        import wandb  # noqa: PLC0415  (optional)

        try:
            self._run = wandb.init(
                project=config.wandb_project,
                entity=config.wandb_entity,
                name=config.wandb_exp_name,
                dir=config.wandb_save_dir,
                config=dict(settings),
            )
        except wandb.Error as error:
            reason = " ".join(without_secrets(str(error)).split())
            raise ConfigError(
                f"--wandb-project {config.wandb_project}: Weights & Biases does not begin: {reason}; log in with "
                "'wandb login', or set WANDB_MODE=offline and send the files later with 'wandb sync'"
            ) from error

    def write(self, scalars: Scalars, step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        import wandb  # noqa: PLC0415  (optional)

        self._run.finish()
        # Its process writes the files; behind this they are whole.
        wandb.teardown()


def _limit_connections(server: socketserver.BaseServer) -> None:
    """Hold few connections at once and none for long: each takes a thread and a descriptor of rank 0."""
    free = threading.BoundedSemaphore(peer_limits.MAX_SCRAPES)
    handler: Any = server.RequestHandlerClass

    class Handler(handler):  # type: ignore[misc]  # of prometheus-client, which is optional
        timeout = peer_limits.SCRAPE_WITHIN_S

        def __init__(self, *arguments: Any) -> None:
            try:
                super().__init__(*arguments)
            finally:
                free.release()

    server.RequestHandlerClass = Handler
    # One that is refused is closed at once.
    hooked: Any = server
    hooked.verify_request = lambda request, client_address: free.acquire(blocking=False)


class _Prometheus:
    """Answers with the newest figures: ``hetero_mfu{of="A100-80"}``."""

    def __init__(self, config: ScalarsConfig) -> None:
        import prometheus_client  # noqa: PLC0415  (optional)

        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        assert config.port is not None
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                config.port, addr=config.host, registry=self._registry
            )
        except OSError as error:
            raise _no_port(config, error) from None
        _limit_connections(self._server)

    def write(self, scalars: Scalars, step: int) -> None:
        for name, value in {**scalars, "step": step}.items():
            kind, _, of = name.partition("/")
            self._gauge(kind).labels(of).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, kind: str) -> "Gauge":
        import prometheus_client  # noqa: PLC0415  (optional)

        if kind not in self._gauges:
            name = "hetero_" + re.sub(r"\W+", "_", kind)
            self._gauges[kind] = prometheus_client.Gauge(name, kind, ["of"], registry=self._registry)
        return self._gauges[kind]


def _no_port(config: ScalarsConfig, error: OSError) -> ConfigError:
    # The library writes the address into its own text once more.
    reason = os.strerror(error.errno) if error.errno is not None else error
    return ConfigError(
        f"--hetero-metrics-port {config.port}: {config.host} cannot be listened on there: {reason}; "
        "give another port, or another --hetero-metrics-host"
    )
