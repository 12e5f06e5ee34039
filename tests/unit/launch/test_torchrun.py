"""The line of each host, and its text for a shell."""

import os
import shlex
import subprocess

import pytest

from hetero.launch.hosts import assigned_hosts, invented_hosts
from hetero.launch.torchrun import TorchrunOptions, drawn_port, shell_text
from hetero.spec.cluster import ClusterSpec
from tests.unit.launch.plans import CLUSTER


def test_every_host_starts_its_own_number_of_processes() -> None:
    options = TorchrunOptions(flags=("--lr", "1"), address="a", port=1234, numa_binding="node")
    first, second = (options.words(host, num_nodes=2) for host in assigned_hosts(CLUSTER, ["a,b"]))
    meeting = "--nnodes 2 --rdzv-backend hetero-static --rdzv-endpoint a:1234"
    assert shlex.join(first) == (
        f"torchrun {meeting} --rdzv-conf node_rank=0 --nproc-per-node 2 --numa-binding node pretrain_gpt.py --lr 1"
    )
    assert shlex.join(second[1:]) == (
        f"{meeting} --rdzv-conf node_rank=1 --nproc-per-node 1 --numa-binding node pretrain_gpt.py --lr 1"
    )


def test_a_single_host_meets_on_loopback_at_a_port_that_it_finds_itself() -> None:
    (host,) = invented_hosts(ClusterSpec(node_types=CLUSTER.node_types[:1]))
    words = TorchrunOptions(address="127.0.0.1", port=0).words(host, num_nodes=1)
    meeting = ["--rdzv-backend", "hetero-static", "--rdzv-endpoint", "127.0.0.1:0"]
    assert words == ["torchrun", *meeting, "--nproc-per-node", "2", "pretrain_gpt.py"]


def test_an_ipv6_address_has_brackets() -> None:
    host, _ = assigned_hosts(CLUSTER, ["a,b"])
    assert "[fe80::1]:7" in TorchrunOptions(address="fe80::1", port=7).words(host, num_nodes=2)


def test_ports_are_drawn_below_those_that_the_kernel_gives_away() -> None:
    drawn = {drawn_port() for _ in range(50)}
    assert len(drawn) > 40
    assert all(15_000 <= port < 30_000 for port in drawn)


def test_a_shell_assigns_variables_and_ends_where_a_value_is_missing() -> None:
    options = TorchrunOptions(
        torchrun="sh", program="-c", flags=('echo "$A $B"',), address="a", port=0, environment={"A": "b c'", "B": None}
    )
    (host,) = invented_hosts(ClusterSpec(node_types=CLUSTER.node_types[:1]))
    meeting = "--rdzv-backend hetero-static --rdzv-endpoint a:0 --nproc-per-node 2 "
    line = options.shell_line(host, num_nodes=1).replace(meeting, "")
    for given, said in (({"B": "d\ne"}, (0, "b c' d\ne\n", "")), ({}, (2, "", "set it in this shell first"))):
        done = subprocess.run(
            ["sh", "-c", line], env={"PATH": os.environ["PATH"], **given}, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == said[:2]
        assert said[2] in done.stderr


@pytest.mark.parametrize("width", [10, 40, 200])
def test_a_shell_reads_the_words_that_were_written(width: int) -> None:
    words = ["torchrun", "--data-path", "0.3", "a b", "0.7", "it's", "--swiglu", "--split", "9, 1", "$HOME"]
    text = shell_text(words, width=width)
    assert shlex.split(text.replace("\\\n", " ")) == words
    assert "--data-path 0.3" in text
    assert ("\n" in text) == (width < 200)
