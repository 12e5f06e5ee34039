"""``hetero profile host`` as a user types it, on a machine without a GPU."""

import importlib.metadata
import textwrap
from pathlib import Path

import pytest
import torch

from hetero.cli import main
from hetero.profiling.host_hardware import memory_bytes, usable_cores
from hetero.profiling.host_rates import thread_counts
from hetero.serialization import load
from hetero.spec.host import HostProfile
from hetero.units import GIB


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=0)
def test_this_host_is_measured_and_goes_into_a_cluster_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cluster = tmp_path / "host.json", tmp_path / "cluster.yaml"
    assert main(["profile", "host", "--seconds", "2", "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert said.endswith(f"{out}: put it under host of the node type in the cluster file\n")
    found = load(HostProfile, out)
    assert [rate.threads for rate in found.updates] == thread_counts(len(usable_cores()))
    for rate in found.updates:
        # A core that reads memory does less than 10^10; one that is shared with other tests still does a millionth.
        assert 1e4 < rate.elements_per_s < 1e10 * rate.threads
        assert f"{rate.elements_per_s / 1e6:.0f}e6 parameters/s" in said
    assert found.memory_gib == pytest.approx(memory_bytes() / GIB, rel=1e-3)
    assert found.memory_copy_gb_per_s is not None
    assert found.versions["torch"] == importlib.metadata.version("torch")
    if not torch.cuda.is_available():
        assert (found.to_device, found.to_host, found.device) == (None, None, None)
        assert "no CUDA device: copies to and from one are not measured" in said

    pasted = textwrap.indent(out.read_text(), " " * 6)
    cluster.write_text(f"node_types:\n  - name: box\n    device: A100-40\n    gpus_per_node: 8\n    host:\n{pasted}")
    assert main(["devices", "--cluster", str(cluster)]) == 0
    assert f"host of box: {found.source}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seconds", "0"], "--seconds is 0, must be above 0"),
        (["--out", "host.yaml"], "--out host.yaml: ends in '.yaml', must end in .json"),
        (["--out", "nowhere/host.json"], "--out nowhere/host.json: there is no folder nowhere; make it first"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured(
    flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "host", *flags]) == 2
    assert capfd.readouterr().err == f"hetero: {message}\n"
