"""Runs checks in a process of its own, in which TransformerEngine is importable, and on ranks that are forked from it.

checks = [Check(module, "a_function_of_it", (argument,)), Check(module, "another", world_size=2)]
first, second = answers(checks, "2.20.2")
"""

import sys

from tests.helpers import mocked_transformer_engine

if __name__ == "__main__":
    mocked_transformer_engine.install(sys.argv[1])

import dataclasses
import functools
import importlib
import multiprocessing
import os
import pickle
import subprocess
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from hetero.plan.ir import Plan

DEVICE = "A100-40"
"""What the ranks' plans call this machine's CPU, so that their layers may be TransformerEngine's."""


class Check(NamedTuple):
    """A function of a test module, by name, and its arguments.

    world_size: of the ranks that call it, with their number in front of the arguments; 0 calls it once, without.
    """

    module: str
    function: str
    args: tuple[Any, ...] = ()
    world_size: int = 0


def answers(checks: Iterable[Check], version: str, *, timeout_s: float = 300) -> list[Any]:
    """What each of ``checks`` returns, in one process that has this version of TransformerEngine."""
    with tempfile.TemporaryDirectory() as name:
        asked, answered = Path(name) / "checks", Path(name) / "answers"
        asked.write_bytes(pickle.dumps(list(checks)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(
            [sys.executable, "-m", "tests.helpers.transformer_engine_ranks", version, str(asked), str(answered)],
            check=True,
            timeout=timeout_s,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        found: list[Any] = pickle.loads(answered.read_bytes())
        return found


def on_device(plan: Plan, device: str = DEVICE, **fields: Any) -> Plan:
    """``plan`` with all stages on ``device``, and with these fields."""
    replicas = tuple(
        each.with_stages(dataclasses.replace(stage, device=device, **fields) for stage in each.stages)
        for each in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas)


def _main(asked: Path, answered: Path) -> None:
    warnings.simplefilter("ignore")
    from hetero.runtime import layer_choice

    # Reference kernels compute in any precision, so that float64 can tell an error from rounding.
    for name, stand_in in (
        ("TRANSFORMER_ENGINE_PRECISIONS", ("fp64", "fp32", "bf16", "fp16")),
        ("runs_cuda", lambda _: True),
    ):
        mock.patch.object(layer_choice, name, stand_in).start()
    found = []
    for check in pickle.loads(asked.read_bytes()):
        call = functools.partial(getattr(importlib.import_module(check.module), check.function))
        found.append(_on_ranks(call, check) if check.world_size else call(*check.args))
    answered.write_bytes(pickle.dumps(found))


def _on_ranks(call: Callable[..., Any], check: Check) -> list[Any]:
    """Fork the ranks: no torch operation has run in this process that leaves a thread behind."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(call, rank, check, Path(folder)))
            for rank in range(check.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
        assert not failed, f"ranks {failed} of {check.function}{check.args}: their tracebacks are above"
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(check.world_size)]


def _rank_main(call: Callable[..., Any], rank: int, check: Check, folder: Path) -> None:
    try:
        store = dist.FileStore(str(folder / "store"), check.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=check.world_size)
        (folder / str(rank)).write_bytes(pickle.dumps(call(rank, *check.args)))
    except BaseException:  # noqa: BLE001  # whatever it is, the others must not wait
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[2]), Path(sys.argv[3]))
