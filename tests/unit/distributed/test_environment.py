"""Variables of CUDA and torch get their defaults before torch is there, and never another value than the user's."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.distributed.environment import (
    CUDA_DEFAULTS,
    SHARED_DEVICE_DEFAULTS,
    describe_cuda_environment,
    set_cuda_environment,
)
from megatron.pretrain.launch import launch_from
from tests.helpers.mistakes import FLAGS

ROOT = Path(__file__).parents[3]


def test_what_is_not_set_gets_its_default() -> None:
    environment = {"HOME": "/"}
    set_cuda_environment(environment)
    assert environment == {"HOME": "/"} | {each.name: each.value for each in CUDA_DEFAULTS}
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


def test_ranks_that_share_devices_have_more_defaults() -> None:
    environment = {"NCCL_MAX_CTAS": "4", "NCCL_DEBUG": "WARN"}
    set_cuda_environment(environment, shares_devices=True)
    wanted = {each.name: each.value for each in CUDA_DEFAULTS + SHARED_DEVICE_DEFAULTS}
    assert environment == wanted | {"NCCL_MAX_CTAS": "4", "NCCL_DEBUG": "WARN"}
    assert wanted["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    defaults, yours = describe_cuda_environment(environment).split("; ")
    assert defaults.endswith("NCCL_MULTI_RANK_GPU_ENABLE=1, NCCL_MIN_CTAS=1, NCCL_NVLS_ENABLE=0")
    assert yours == "yours: NCCL_MAX_CTAS=4, NCCL_DEBUG=WARN"


@pytest.mark.parametrize(
    "given",
    [
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        {"PYTORCH_ALLOC_CONF": ""},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
        {"TORCHINDUCTOR_COMPILE_THREADS": "8"},
    ],
)
def test_what_the_user_has_set_stays(given: dict[str, str]) -> None:
    environment = dict(given)
    set_cuda_environment(environment)
    assert environment.items() >= given.items()
    # One allocator, one configuration: torch takes the first of the two names that it finds.
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} <= environment.keys()


def test_the_log_tells_whose_a_value_is() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "x:1", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/"}
    set_cuda_environment(environment)
    said = (
        "default: CUDA_DEVICE_MAX_CONNECTIONS=32, TORCHINDUCTOR_COMPILE_THREADS=1; "
        "yours: PYTORCH_CUDA_ALLOC_CONF=x:1, NCCL_SOCKET_IFNAME=eth0"
    )
    assert describe_cuda_environment(environment) == said
    assert launch_from(environment).cuda_environment == said
    assert describe_cuda_environment({"HOME": "/"}) == ""


AT_THE_IMPORT_OF_TORCH = """
import importlib.abc, json, os, runpy, sys

class Stops(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and looked:
            print(json.dumps(dict(os.environ)))
            sys.stdout.flush()
            os._exit(0)

looked = []
sys.meta_path.insert(0, Stops())
import hetero.extras
hetero.extras.exit_without = lambda *args, **options: looked.append(True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


TRAINING = shlex.split(FLAGS)[2:]
RACE = ["--plans", "plan.json", "--hetero-emulate", "cluster.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["pretrain_gpt.py", *TRAINING],
        ["tools/verify_plan.py", *TRAINING],
        ["tools/race_plans.py", *RACE, *(word for word in TRAINING if word not in ("--micro-batch-size", "1"))],
    ],
    ids=lambda command: command[0],
)
def test_entry_points_set_them_before_torch_is_imported(command: list[str]) -> None:
    """torch's allocator and CUDA's driver read them while they are loaded."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "CUDA_"))}
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_IMPORT_OF_TORCH, *command],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    environment = json.loads(done.stdout)
    assert environment.items() >= {each.name: each.value for each in CUDA_DEFAULTS}.items()
