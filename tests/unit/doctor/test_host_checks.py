"""What ``hetero doctor`` says of hosts that were made up: what is wrong with each, and what to do."""

import dataclasses
from typing import Any

import pytest

from hetero.doctor.facts import GpuFacts, HostFacts, InfinibandPort, NetworkInterface
from hetero.doctor.findings import Diagnosis, Finding
from hetero.doctor.host_checks import check_host
from hetero.doctor.installed_files import OldCopy
from hetero.doctor.requirements import UnmetRequirement
from hetero.units import GIB, MIB
from tests.unit.doctor.samples import A100, CU130, V100, host, rank_of, torch_of


def faults(facts: HostFacts) -> list[Finding]:
    return [finding for finding in check_host(facts) if finding.severity != "ok"]


def only_fault(facts: HostFacts) -> Finding:
    (found,) = faults(facts)
    return found


@pytest.mark.parametrize("gpu", [A100, V100], ids=["A100", "V100"])
def test_nothing_is_wrong_with_a_good_host(gpu: GpuFacts) -> None:
    facts = host(gpu)
    assert faults(facts) == []
    assert Diagnosis(hosts=(facts,), findings=check_host(facts)).severity == "ok"


def test_whatever_is_wrong_is_said_with_what_to_do() -> None:
    bare = HostFacts(host="bare", os="Darwin 24", python="3.10.1", driver="470.1", driver_cuda="11.4", open_files=256)
    said = faults(bare)
    assert {finding.subject for finding in said} >= {"operating system", "Python", "torch", "megatron-core", "/dev/shm"}
    assert all(finding.todo for finding in said)
    assert Diagnosis(hosts=(bare,), findings=check_host(bare)).severity == "problem"


@pytest.mark.parametrize(
    ("changes", "severity", "subject", "says"),
    [
        ({"torch": None}, "problem", "torch", "whl/cu130"),
        ({"torch_error": "libcudnn.so.9: cannot open", "torch": None}, "problem", "torch", "libcudnn.so.9"),
        ({"driver_cuda": "12.8", "driver": "570.1"}, "problem", "driver", "install driver 580"),
        ({"driver": None, "torch": torch_of(A100, num_gpus=0)}, "problem", "driver", "--gpus all"),
        ({"torch": torch_of(A100, num_gpus=0)}, "problem", "GPUs", "CUDA_VISIBLE_DEVICES"),
        ({"torch": torch_of(A100, cuda=None, gpus=(), nccl=None)}, "problem", "torch", "without CUDA"),
        ({"torch": torch_of(A100, nccl=None)}, "problem", "NCCL", "wheel for CUDA"),
        ({"packages": {"safetensors": "1", "transformer-engine": "2.9"}}, "problem", "megatron-core", "[train]"),
        ({"shared_memory_bytes": 64 * MIB}, "warning", "/dev/shm", "--shm-size"),
        ({"open_files": 1024}, "warning", "ulimit -n (open files)", "ulimit -n 65536"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "warning", "NCCL_P2P_DISABLE", "unset it"),
        (
            {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
            "warning",
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "default is 32",
        ),
        (
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}},
            "warning",
            "PYTORCH_CUDA_ALLOC_CONF",
            "expandable_segments:True",
        ),
    ],
)
def test_a_fault_is_told_alone(changes: dict[str, Any], severity: str, subject: str, says: str) -> None:
    found = only_fault(host(**changes))
    assert (found.severity, found.subject) == (severity, subject)
    assert says in f"{found.found} {found.todo}"


def test_a_v100_needs_the_wheel_that_has_its_kernels() -> None:
    found = only_fault(host(V100, torch=torch_of(V100, version="2.11.0+cu130", cuda="13.0", architectures=CU130)))
    assert found.severity == "problem"
    assert "not for sm_70" in found.found
    assert "whl/cu126" in found.todo


def with_versions(**versions: str) -> HostFacts:
    """A good host, with other versions of these distributions."""
    return host(packages={**host().packages, **{name.replace("_", "-"): each for name, each in versions.items()}})


def test_a_combination_that_was_tried_is_named_with_what_was_run() -> None:
    (line,) = [each for each in check_host(host()) if each.subject == "versions together"]
    assert line.severity == "ok"
    assert line.found.startswith(
        "tried: Python 3.12, megatron-core 0.16.1, torch 2.11.0, TransformerEngine 2.11.0: GPU on NVIDIA H200, "
    )


def test_a_combination_that_was_not_tried_is_named_with_the_nearest() -> None:
    found = only_fault(with_versions(transformer_engine="2.99.0"))
    assert (found.severity, found.subject) == ("warning", "versions together")
    assert "TransformerEngine 2.99.0: no run had TransformerEngine 2.99.0; the nearest" in found.found
    assert found.todo.startswith("if it fails, try the nearest: pip install transformer-engine==")


def test_a_combination_that_breaks_is_a_problem() -> None:
    found = only_fault(dataclasses.replace(with_versions(megatron_core="0.19.2"), python="3.11.7"))
    assert (found.severity, found.subject) == ("problem", "versions together")
    assert found.found.startswith("known to break: Python 3.11, megatron-core 0.19.2, ")
    assert "need Python 3.12" in found.found
    assert "Python 3.12 or 3.13" in found.todo


@pytest.mark.parametrize(
    ("package", "accepted", "todo"),
    [
        ("nvidia-cudnn-frontend", ">=1.29.0", "run: pip install 'nvidia-cudnn-frontend>=1.29.0'"),
        (
            "transformer-engine",
            ">=2.9",
            "pip install --no-build-isolation 'transformer_engine[pytorch,core_cu13]>=2.9'",
        ),
    ],
)
def test_a_requirement_that_is_not_met_is_a_problem(package: str, accepted: str, todo: str) -> None:
    unmet = UnmetRequirement(asked_by="another 1.0", package=package, accepted=accepted, installed="1.26.0")
    found = only_fault(host(unmet=(unmet,)))
    assert (found.severity, found.subject) == ("problem", package)
    assert (found.found, found.todo) == (f"1.26.0, but another 1.0 accepts {accepted}", todo)


def test_an_old_copy_is_a_problem_whose_own_requirements_do_not_count() -> None:
    copy = OldCopy(where="/site/megatron/training", fix="run: pip uninstall -y megatron-hetero")
    unmet = UnmetRequirement(
        asked_by="megatron-hetero 0.1", package="megatron-core", accepted="<0.17", installed="0.19.2"
    )
    found = only_fault(host(old_copies=(copy,), unmet=(unmet,)))
    assert (found.severity, found.subject, found.todo) == ("problem", "megatron-hetero", copy.fix)


@pytest.mark.parametrize(("folder", "severity"), [("training", "warning"), ("core", "problem")])
def test_files_that_another_package_took_are_named_with_the_command_that_restores_them(
    folder: str, severity: str
) -> None:
    found = only_fault(host(changed_files=tuple(f"megatron/{folder}/{name}.py" for name in "abcde")))
    assert (found.severity, found.subject) == (severity, "files of megatron-core")
    assert found.found.endswith(f": megatron/{folder}/a.py, megatron/{folder}/b.py, megatron/{folder}/c.py and 2 more")
    assert found.todo == "run: pip install --force-reinstall --no-deps megatron-core==0.16.1"


def test_libraries_of_another_cuda_are_found() -> None:
    packages = {**host().packages, "transformer-engine-cu12": "2.11.0"}
    found = only_fault(host(packages=packages))
    assert found.severity == "problem"
    assert "core_cu13" in found.todo
    assert faults(host(packages={**packages, "transformer-engine-cu13": "2.11.0"})) == []


def test_layers_that_are_missing_are_named_where_the_device_has_them() -> None:
    without = {name: version for name, version in host().packages.items() if name != "transformer-engine"}
    (missing,) = faults(host(packages=without, modules=()))
    assert (missing.severity, missing.subject) == ("warning", "TransformerEngine")


def test_apex_need_not_be_there() -> None:
    """On a V100, which has no TransformerEngine either, torch's products add weight gradients."""
    assert faults(host(V100, modules=())) == []
    assert faults(host(V100, modules=("apex",))) == []


def test_a_device_is_held_against_the_catalogue() -> None:
    def of(**changes: Any) -> list[Finding]:
        return faults(host(torch=torch_of(dataclasses.replace(A100, **changes))))

    (unknown,) = of(name="Some Accelerator 9000")
    assert (unknown.severity, "not in the catalogue" in unknown.found) == ("warning", True)
    (part,) = of(memory_bytes=20 * GIB)
    assert (part.severity, "MIG" in part.todo) == ("warning", True)
    (other,) = of(compute_capability=(9, 0))
    assert (other.severity, other.subject) == ("problem", "GPUs")


def test_infiniband_needs_pinned_memory() -> None:
    port = InfinibandPort(device="mlx5_0", port=1, state="ACTIVE", rate="200 Gb/sec (4X HDR)")
    limited = host(infiniband=(port,), locked_memory_bytes=8 * MIB)
    assert only_fault(limited).subject == "ulimit -l (pinned memory)"
    assert faults(host(infiniband=(port,), locked_memory_bytes=None)) == []
    assert faults(host(locked_memory_bytes=8 * MIB)) == []
    down = dataclasses.replace(port, state="DOWN")
    assert only_fault(host(infiniband=(port, down), locked_memory_bytes=None)).subject == "InfiniBand and RoCE"


def test_a_rank_is_bound_to_the_processors_near_its_device() -> None:
    unbound = host(cpus=64)
    assert faults(unbound) == [], "outside of a launch there is nothing to bind"
    assert "--numa-binding" in only_fault(rank_of(unbound, 0, world_size=8, local_world_size=8)).todo
    assert faults(rank_of(host(), 0, world_size=8, local_world_size=8)) == []


def test_between_hosts_the_network_has_to_be_named() -> None:
    nics = (NetworkInterface(name="eth0", address="10.0.0.1"), NetworkInterface(name="eth1", address="10.1.0.1"))
    bridge = NetworkInterface(name="docker0", address="172.17.0.1", is_physical=False)
    one_host = rank_of(host(interfaces=(*nics, bridge)), 0, world_size=8, local_world_size=8)
    assert faults(one_host) == []
    two_hosts = rank_of(one_host, 0, world_size=16, local_world_size=8)
    found = only_fault(two_hosts)
    assert (found.severity, "eth0 or eth1" in found.todo) == ("warning", True)
    named = dataclasses.replace(two_hosts, environment={**two_hosts.environment, "NCCL_SOCKET_IFNAME": "eth0"})
    assert faults(named) == []


def test_gloo_must_not_listen_on_the_loopback() -> None:
    """Debian writes 127.0.1.1 beside the host's name into /etc/hosts."""
    facts = rank_of(host(address="127.0.1.1"), 0, world_size=16, local_world_size=8)
    found = only_fault(facts)
    assert (found.severity, found.subject) == ("problem", "host name")
    told = dataclasses.replace(facts, environment={**facts.environment, "GLOO_SOCKET_IFNAME": "eth0"})
    assert faults(told) == []


def test_equal_devices_are_one_line_wherever_they_sit() -> None:
    gpus = tuple(dataclasses.replace(A100, numa_node=i // 4, pci_address=f"0000:{i:02x}:00.0") for i in range(8))
    (found,) = [each.found for each in check_host(host(torch=torch_of(A100, gpus=gpus))) if each.subject == "GPUs"]
    assert found.startswith(f"8 x {A100.name}, ")
