"""Profiles some steps of some ranks: traces by torch's profiler, or the moments at which nsys begins and ends."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from megatron.core.utils import configure_nvtx_profiling

from hetero.errors import ConfigError
from hetero.runtime.layer_choice import runs_cuda
from megatron.pretrain.cli.config import PretrainConfig


class StepProfiler(Protocol):
    """Is told of every step of this rank."""

    def after_step(self, step: int) -> None:
        """Step number ``step`` is done."""


class NoProfiler:
    """Of a rank that is not profiled."""

    def after_step(self, step: int) -> None:
        """Let the step pass."""


def check_profiler(config: PretrainConfig, *, world_size: int) -> None:
    """Fail before training if a rank is to be profiled that is not there.

    Raises:
        ConfigError: it names the rank.
    """
    wanted = config.profiler
    if beyond := [rank for rank in wanted.ranks if rank >= world_size]:
        raise ConfigError(
            f"--profile-ranks {beyond[0]}: the launch has {world_size} ranks, from 0 on; name some of those"
        )


def profiler_note(config: PretrainConfig, *, device: torch.device, start_step: int) -> str:
    """Say why nothing is profiled though ``--profile`` is given, as in published scripts on a laptop; else empty."""
    wanted, last = config.profiler, config.run.train_iters
    if not wanted.enabled:
        return ""
    if not wanted.torch and not runs_cuda(device):
        return "--profile: nsys watches CUDA, this run is on the CPU: nothing is profiled; add --use-pytorch-profiler"
    if max(wanted.start_step, start_step) >= min(wanted.end_step, last):
        return (
            f"--profile: steps {wanted.start_step + 1} to {wanted.end_step} are none of this run's, {start_step + 1} "
            f"to {last}: nothing is profiled"
        )
    return ""


@contextlib.contextmanager
def profiling(config: PretrainConfig, *, rank: int, device: torch.device, start_step: int) -> Iterator[StepProfiler]:
    """Profile the steps of this rank that ``--profile`` names, as far as they come after ``start_step``.

    Where a step fails, what was recorded until then is written all the same.
    """
    wanted = config.profiler
    note = profiler_note(config, device=device, start_step=start_step)
    if note and rank == 0:
        print(note, flush=True)
    if note or not wanted.enabled or rank not in wanted.ranks:
        yield NoProfiler()
        return
    first = max(wanted.start_step - start_step, 0)
    if wanted.torch:
        assert config.scalars.tensorboard_dir is not None, "a rule of the flags"
        with _torch_profiler(config, rank=rank, device=device, wait=first, start_step=start_step) as profiler:
            yield profiler
        return
    nsys = _Nsys(start_step=start_step + first, end_step=wanted.end_step, nvtx_ranges=wanted.nvtx_ranges)
    nsys.after_step(start_step)
    try:
        yield nsys
    finally:
        nsys.stop()


@contextlib.contextmanager
def _torch_profiler(
    config: PretrainConfig, *, rank: int, device: torch.device, wait: int, start_step: int
) -> Iterator[StepProfiler]:
    wanted, folder = config.profiler, config.scalars.tensorboard_dir
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if runs_cuda(device):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    steps = wanted.end_step - start_step - wait
    path = folder / f"rank_{rank}_steps_{start_step + wait + 1}-{wanted.end_step}.pt.trace.json.gz"
    with torch.profiler.profile(
        activities=activities,
        # A step before the first one warms the profiler up, if there is one.
        schedule=torch.profiler.schedule(wait=max(wait - 1, 0), warmup=min(wait, 1), active=steps, repeat=1),
        on_trace_ready=lambda profile: _write_trace(profile, path),
        record_shapes=wanted.shapes,
        with_stack=wanted.callstack,
    ) as profile:
        yield _TorchProfiler(profile)


def _write_trace(profile: torch.profiler.profile, path: Path) -> None:
    profile.export_chrome_trace(str(path))
    print(f"saved to {path}", flush=True)


class _TorchProfiler:
    def __init__(self, profile: torch.profiler.profile) -> None:
        self._profile = profile

    def after_step(self, step: int) -> None:
        self._profile.step()


class _Nsys:
    """Tells nsys, which watches this process, where to begin and to end.

    nvtx_ranges: megatron-core's layers mark their parts meanwhile.
    """

    def __init__(self, *, start_step: int, end_step: int, nvtx_ranges: bool) -> None:
        self._start_step = start_step
        self._end_step = end_step
        self._nvtx_ranges = nvtx_ranges
        self._runs = False

    def after_step(self, step: int) -> None:
        if step == self._start_step:
            configure_nvtx_profiling(self._nvtx_ranges)
            torch.cuda.profiler.start()
            self._runs = True
        if step == self._end_step:
            self.stop()

    def stop(self) -> None:
        if self._runs:
            torch.cuda.profiler.stop()
            configure_nvtx_profiling(False)
            self._runs = False
