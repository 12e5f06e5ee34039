"""On a machine with CUDA but without TransformerEngine, apex and flash-attn, all modules import and layers are built.

A process in which torch says that there is CUDA, the packages cannot be found, and tensors that are asked for on a GPU
are made on the CPU: what is chosen is what a GPU would get, as far as that can be seen without its kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PRELUDE = """
import importlib, importlib.abc, pkgutil, sys
import torch

HIDDEN = ("transformer_engine", "transformer_engine_torch", "apex", "flash_attn", "flash_attn_3",
          "fused_weight_gradient_mlp_cuda", "scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda",
          "scaled_softmax_cuda")

class Hides(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.get_device_capability = lambda device=None: (7, 0)
torch.cuda.get_device_name = lambda device=None: "Tesla V100-SXM2-16GB"
"""

IMPORTS = (
    PRELUDE
    + """
import hetero, megatron.training, tools
imported = []
for package in (hetero, megatron.training, tools):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        # Programs that begin to run, or hide the GPUs of their host, when they are imported.
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            imported.append(module.name)
import json
print(json.dumps(imported))
"""
)

BUILDS = (
    PRELUDE
    + """
import dataclasses, json
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

class OnTheCpu(TorchFunctionMode):
    # What is asked for on a GPU is made here.
    def __torch_function__(self, func, types, args=(), kwargs=None):
        def moved(value):
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value
        kwargs = {name: moved(value) for name, value in (kwargs or {}).items()}
        return func(*map(moved, args), **kwargs)

torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
torch.cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
torch.cuda.Stream = torch.Stream

from hetero.distributed.process_groups import create_groups
from hetero.runtime.options import StageOptions
from hetero.runtime.stage import build_stages
from megatron.core.tensor_parallel import random as megatron_random
from tests.helpers.layouts import STYLES
from tests.helpers.plans import plan, replica, stage

megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
built = {}
for style in ("gpt2-tied", "llama-gqa", "moe"):
    for precision in ("fp32", "fp16", "bf16"):
        for delay in (None, 1):
            device = "A100-40" if precision == "bf16" else "V100-16"
            alone = stage(layers=(0, 6), ranks=(0,), device=device, delay=delay)
            made = plan(STYLES[style](), [replica(alone, num_samples=4)], precision=precision)
            context = dataclasses.replace(create_groups(made, device=torch.device("cpu")), device=torch.device("cuda"))
            with OnTheCpu():
                (model,) = build_stages(context, options=StageOptions(), seed=7)
            layer = model.module.decoder.layers[0]
            built[f"{style} {precision} {delay}"] = sorted(
                {type(module).__module__.split(".")[0] for module in model.module.modules()}
            ) + [type(layer.self_attention.core_attention).__name__]
print(json.dumps(built))
"""
)


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_all_modules_import() -> None:
    imported = json.loads(run(IMPORTS))
    assert {"hetero.runtime.stage", "hetero.doctor.launch", "megatron.training.training"} <= set(imported)


@pytest.mark.slow
def test_layers_are_built() -> None:
    """In every precision, with whole and split backwards: of megatron-core's and torch's modules."""
    built = json.loads(run(BUILDS))
    assert len(built) == 18
    for case, modules in built.items():
        assert not {"transformer_engine", "apex"} & set(modules), case
