"""The lines that ``hetero launch`` prints, run as they are: they train."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.plan.ir import Plan
from hetero.serialization import save
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ports import free_ports
from tests.helpers.sources import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

LINK = Link(bandwidth_gb_per_s=1, latency_us=10)
FAST = NodeType(name="fast", device="cpu", gpus_per_node=2, inside_node=LINK)
SLOW = NodeType(name="slow", device="cpu", gpus_per_node=1)
TWO_TYPES = ClusterSpec(node_types=(FAST, SLOW), links=Links(between_nodes=LINK))

TP_THEN_ONE = plan(
    llama_model(num_layers=3),
    [replica(stage(layers=(0, 2), ranks=(0, 1), tp=2), stage(layers=(2, 3), ranks=(2,)), num_samples=4)],
)
PROGRAM = f"""import os, runpy, sys
place = " ".join(os.environ[name] for name in ("RANK", "GROUP_RANK", "LOCAL_RANK"))
# In one piece: torchrun's ranks write without a buffer, into one pipe.
sys.stdout.write(f"RANK {{place}}\\n")
sys.argv[0] = {str(ROOT / "pretrain_gpt.py")!r}
sys.path.insert(0, {str(ROOT)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Says where it sits, and trains."""

FLAGS = "--lr 1e-2 --mock-data --tokenizer-type NullTokenizer --train-iters 2 --num-workers 0 --log-interval 1"
DROPOUT = "--attention-dropout 0 --hidden-dropout 0 --distributed-backend gloo"
VARIABLES = ("OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", f"PYTHONPATH={ROOT}")


def launch(folder: Path, cluster: ClusterSpec, trained: Plan, *words: str) -> None:
    """``hetero launch`` for a plan in ``folder``, with the program that says where it sits."""
    save(trained, folder / "plan.json")
    save(cluster, folder / "cluster.json")
    (folder / "program.py").write_text(PROGRAM)
    given = ["--cluster", str(folder / "cluster.json"), "--program", str(folder / "program.py")]
    given += [word for variable in VARIABLES for word in ("--env", variable)]
    code = main(["launch", str(folder / "plan.json"), *given, *words, "--", *FLAGS.split(), *DROPOUT.split()])
    assert code == 0


def places(said: str) -> set[tuple[int, ...]]:
    """Rank, node rank and local rank of every process, which may have a prefix of its host."""
    lines = (line.partition("RANK ")[2] for line in said.splitlines() if "RANK " in line)
    return {tuple(map(int, line.split())) for line in lines}


@contextlib.contextmanager
def shells(lines: list[str], folder: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """A shell for each line, which ends with all below it."""
    started = [
        subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for line in lines
    ]
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.rotates(every=6, turn=3)
def test_the_printed_lines_train_on_two_hosts_of_unlike_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both hosts are this machine, by two of its addresses."""
    (port,) = free_ports(1)
    hosts = ("--hosts", "fast=127.0.0.1", "slow=127.0.0.2", "--master-port", str(port))
    launch(tmp_path, TWO_TYPES, TP_THEN_ONE, *hosts)
    printed = capsys.readouterr().out.split("# 127.0.0.")[1:]
    lines = [text.partition("\n")[2] for text in printed]
    assert len(lines) == 2
    with shells(lines, tmp_path) as started:
        said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert (places(said[0]), places(said[1])) == ({(0, 0, 0), (1, 0, 1)}, {(2, 1, 0)})
    assert "step 2/2 | loss" in "".join(said)


@pytest.mark.rotates(every=6, turn=2)
def test_one_line_runs_all_hosts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (port,) = free_ports(1)
    launch(tmp_path, TWO_TYPES, TP_THEN_ONE, "--hosts", "127.0.0.1,127.0.0.2", "--master-port", str(port), "--run")
    said = capfd.readouterr().out
    assert places(said) == {(0, 0, 0), (1, 0, 1), (2, 1, 0)}
    assert "step 2/2 | loss" in said
