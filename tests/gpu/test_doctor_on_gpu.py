"""``hetero doctor`` on a host with a GPU: what it says of it, and ranks that meet over NCCL."""

import subprocess
import sys
from pathlib import Path

import pytest

from hetero.distributed.kernel_architectures import has_kernels
from hetero.doctor.findings import Diagnosis, Finding, MeasuredLink
from hetero.doctor.host_facts import host_facts
from hetero.doctor.torch_facts import torch_facts
from hetero.doctor.world import Trial, try_together
from hetero.serialization import from_json
from tests.gpu.models import MODELS
from tests.helpers.gpu_ranks import GPU, device_type_here, placed_on, run_on, this_device
from tests.helpers.plans import plan, replica, stage

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=GPU)])
def test_the_doctor_knows_this_host(device: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hetero", "doctor", "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    found = from_json(Diagnosis, done.stdout, source="stdout")
    (facts,) = found.hosts
    assert done.returncode == int(found.severity == "problem")
    assert facts.torch is not None
    if device == "cuda":
        assert facts.driver_cuda is not None
        assert facts.torch.nccl is not None
        assert facts.gpus
        assert all(has_kernels(facts.torch.architectures, gpu.compute_capability) for gpu in facts.gpus)


def try_on(rank: int, device: str, world_size: int) -> tuple[list[Finding], list[MeasuredLink]]:
    stages = (stage(layers=(0, 2), ranks=(0,)), stage(layers=(2, 4), ranks=(1,)))
    two_stages = placed_on(plan(MODELS["gpt2-tied"](), [replica(*stages, num_samples=4)]), device_type_here(device))
    facts = host_facts({}, torch_facts())
    trial = Trial(facts.host)
    links = try_together(trial, [facts] * world_size, this_device(device), plan=two_stages, link_seconds=5)
    return trial.findings, links


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=GPU)])
def test_ranks_meet_and_measure_their_link(device: str) -> None:
    for findings, links in run_on(device, try_on, 2, device, 2):
        assert [(each.severity, each.found) for each in findings if each.severity != "ok"] == []
        wanted = {"gloo", "links", "channels of the plan"} | ({"NCCL"} if device == "cuda" else set())
        assert {each.subject for each in findings} == wanted
        (link,) = links
        assert link.bytes_per_s > 0
