"""The shell text of a host, which is run here, and the words that take it there."""

import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from hetero.launch.ssh import command_on, is_this_machine, variables_line, watched


def run(text: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(["sh", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_it_runs_in_the_folder_and_ends_with_the_code_of_the_program(tmp_path: Path) -> None:
    with run(watched(["sh", "-c", "pwd; exit 7"], folder=str(tmp_path))) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"{tmp_path}\n"
    assert process.returncode == 7


def test_the_program_is_told_to_end_when_standard_input_does(tmp_path: Path) -> None:
    program = "trap 'echo told; exit 5' TERM; echo begun; while :; do sleep 0.05; done"
    with run(watched(["sh", "-c", program], folder=str(tmp_path))) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "begun\n"
        process.stdin.close()
        assert process.stdout.read() == "told\n"
    assert process.returncode == 5


def test_variables_come_by_standard_input_as_they_are(tmp_path: Path) -> None:
    given = {"A": 'it\'s "$HOME" `x` \\n', "B": "two\nlines\n", "C": "", "D": "\udcff\u00e9 -n"}
    text = watched(["env", "-0"], folder=str(tmp_path), reads_variables=True)
    with subprocess.Popen(["sh", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(variables_line(given))
        process.stdin.flush()
        said = dict(os.fsdecode(each).split("=", 1) for each in process.stdout.read().split(b"\0") if each)
    assert process.returncode == 0
    assert {name: said.get(name) for name in given} == given
    assert not [name for name in said if name.startswith("hetero_")]


def test_a_program_with_variables_is_told_to_end_too(tmp_path: Path) -> None:
    """Its own PATH has nothing that its shell needs."""
    program = "trap 'echo told; exit 5' TERM; echo begun $PATH; while :; do /bin/sleep 0.05; done"
    text = watched(["/bin/sh", "-c", program], folder=str(tmp_path), reads_variables=True)
    with subprocess.Popen(["sh", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(variables_line({"PATH": "/none"}))
        process.stdin.flush()
        assert process.stdout.readline() == b"begun /none\n"
        process.stdin.close()
        assert process.stdout.read() == b"told\n"
    assert process.returncode == 5


def test_a_launch_that_ends_before_it_gives_the_variables_starts_nothing(tmp_path: Path) -> None:
    text = watched(["echo", "here"], folder=str(tmp_path), reads_variables=True)
    done = subprocess.run(["sh", "-c", text], input=b"A=1", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_missing_folder_is_a_failure(tmp_path: Path) -> None:
    process = subprocess.run(
        ["sh", "-c", watched(["echo", "here"], folder=str(tmp_path / "none"))],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stdout) == (1, "")


def test_hosts_elsewhere_are_reached_over_ssh_in_any_shell() -> None:
    far = command_on("far", "echo 'a b'", ssh=("ssh", "-v"))
    assert far[:-1] == ["ssh", "-v", "--", "far"], "no name is an option"
    assert shlex.split(far[-1]) == ["exec", "sh", "-c", "echo 'a b'"]
    assert command_on("localhost", "true") == ["sh", "-c", "true"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "::1", socket.gethostname()])
def test_this_machine_is_recognised(host: str) -> None:
    assert is_this_machine(host)


@pytest.mark.parametrize("host", ["far", "192.0.2.1", "me@localhost"])
def test_others_are_not(host: str) -> None:
    """192.0.2.1 is in documentation alone (RFC 5737)."""
    assert not is_this_machine(host)
