"""A machine with CUDA, torch and megatron-core alone trains: no path asks for an extension nobody has built.

The machine is played: torch computes on the CPU, and whoever asks is told that there is CUDA. Where Apex is installed
as well, its LayerNorm is taken.
"""

import dataclasses
import importlib.abc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.fusions import fused_layer_norm

from hetero.plan.ir import Plan, Precision, Recompute
from hetero.runtime import layer_choice, trainer
from hetero.runtime.options import StageOptions
from tests.helpers.captured_graphs import no_graph_is_captured
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan as plan_of
from tests.helpers.plans import replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, train

pytestmark = [pytest.mark.dist, pytest.mark.slow]

EXTENSIONS = (
    "apex",
    "amp_C",
    "flash_attn",
    "flash_attn_3",
    "fused_layer_norm_cuda",
    "fused_weight_gradient_mlp_cuda",
    "scaled_masked_softmax_cuda",
    "scaled_softmax_cuda",
    "scaled_upper_triang_masked_softmax_cuda",
    "transformer_engine",
    "transformer_engine_torch",
)
"""Packages of CUDA kernels that megatron-core uses where they are."""

IMPORTS = """
import importlib, importlib.abc, json, pkgutil, sys
import torch

hidden = sys.argv[1].split(",")

class Hides(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.get_device_capability = lambda device=None: (7, 0)
torch.cuda.get_device_name = lambda device=None: "Tesla V100-SXM2-16GB"

import hetero, megatron.pretrain, tools
imported = []
for package in (hetero, megatron.pretrain, tools):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        # Programs that begin to run, or hide the GPUs of their host, when they are imported.
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            imported.append(module.name)
print(json.dumps(imported))
"""
"""Imports every module in a process in which torch says that there is CUDA, and some packages cannot be found."""

ROOT = Path(__file__).parents[2]

MODELS = {"gpt2": gpt2_model, "llama": lambda: llama_model(qk_layernorm=True), "moe": moe_model}


class Watch(importlib.abc.MetaPathFinder):
    """Notes which extensions are looked for, and finds none."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in EXTENSIONS:
            self.asked.append(name)


def train_where_there_is_cuda(rank: int, plan: Plan, options: StageOptions) -> tuple[list[str], Trace | None]:
    """A warm-up and a step, and the extensions that they asked for."""
    watch = Watch()
    with (
        mock.patch.object(sys, "meta_path", [watch, *sys.meta_path]),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        no_graph_is_captured(),
        mock.patch.object(layer_choice, "runs_cuda", return_value=True),
        mock.patch.object(trainer, "runs_cuda", return_value=True),
    ):
        return watch.asked, train(rank, plan, 1, SMALL_BUCKETS, options)


def halves_on(device: str, model: Any, *, precision: Precision, recompute: Recompute, delay: int | None) -> Plan:
    options = {"device": device, "recompute": recompute, "delay": delay}
    stages = (
        stage(layers=(0, 2.5), ranks=(0, 1), tp=2, sp=True, **options),
        stage(layers=(2.5, 6), ranks=(2,), **options),
    )
    return dataclasses.replace(plan_of(model, [replica(*stages, num_samples=4)]), precision=precision)


def cases() -> Iterator[Any]:
    """Every model on each device and in each precision every third run, with one sort of recomputation."""
    devices: tuple[tuple[str, Precision], ...] = (("V100-16", "fp16"), ("A100-40", "bf16"), ("A100-40", "fp32"))
    recomputes: tuple[tuple[Recompute, int | None], ...] = (("none", None), ("selective", 1), ("full", None))
    made_of = itertools.product(enumerate(MODELS), enumerate(devices))
    for ((i, style), (j, (device, precision))), (recompute, delay) in itertools.product(made_of, recomputes):
        row = pytest.mark.rotates(f"{style} in {precision}", every=3, turn=(i + j) % 3)
        name = f"{style}-{recompute}-{delay}-{device}-{precision}"
        yield pytest.param(device, precision, recompute, delay, style, id=name, marks=row)


@pytest.mark.parametrize(("device", "precision", "recompute", "delay", "style"), list(cases()))
def test_no_extension_is_asked_for(
    device: str, precision: Precision, recompute: Recompute, delay: int | None, style: str
) -> None:
    made = halves_on(device, MODELS[style](), precision=precision, recompute=recompute, delay=delay)
    dropout = StageOptions(init_method_std=0.1, hidden_dropout=0.1, attention_dropout=0.1)
    for asked, trace in run_ranks(train_where_there_is_cuda, 3, made, dropout):
        assert asked == []
        assert trace is not None
        assert torch.tensor(trace.losses).isfinite().all()


@pytest.mark.rotates(every=3, turn=0)
def test_all_modules_import_without_extensions() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS, ",".join(EXTENSIONS)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout.splitlines()[-1])
    assert {"hetero.runtime.stage", "hetero.doctor.launch", "megatron.pretrain.training"} <= set(imported)


class ReferenceFunction:
    """Apex's ``FusedLayerNormAffineFunction``, by torch."""

    used = 0

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> None:
        """Looked at for its arguments."""

    @classmethod
    def apply(cls, input: torch.Tensor, weight: Any, bias: Any, shape: torch.Size, eps: float) -> torch.Tensor:
        cls.used += 1
        return torch.nn.functional.layer_norm(input, shape, weight, bias, eps)


def train_with_apex(rank: int, plan: Plan, options: StageOptions) -> tuple[int, Trace | None]:
    """A step with Apex's LayerNorm, and how often it was called."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        no_graph_is_captured(),
        mock.patch.object(layer_choice, "runs_cuda", return_value=True),
        mock.patch.object(layer_choice, "HAVE_FUSED_LAYER_NORM", new=True),
        mock.patch.object(fused_layer_norm, "HAVE_FUSED_LAYER_NORM", new=True),
        mock.patch.object(fused_layer_norm, "FusedLayerNormAffineFunction", ReferenceFunction, create=True),
    ):
        trace = train(rank, plan, 1, SMALL_BUCKETS, options)
    return ReferenceFunction.used, trace


def test_apexs_norm_trains_alike() -> None:
    """Two norms per layer and one at the end, sequence parallelism among them."""
    made = halves_on("V100-16", gpt2_model(), precision="fp32", recompute="none", delay=None)
    options = StageOptions(init_method_std=0.1)
    plain = run_ranks(train, 3, made, 1, SMALL_BUCKETS, options)
    for rank, (used, trace) in enumerate(run_ranks(train_with_apex, 3, made, options)):
        assert used == 4 * (5 if rank < 2 else 8), "of four microbatches"
        assert trace is not None
        assert trace.losses == pytest.approx(plain[rank].losses, rel=1e-6)
        assert trace.grad_norms == pytest.approx(plain[rank].grad_norms, rel=1e-6)
