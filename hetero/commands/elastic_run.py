"""``hetero elastic run``: a whole job on one machine, an etcd and some agents, to try out what happens to it."""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hetero.commands.elastic import copies_folder, etcd_command, job_settings, straggler_settings
from hetero.distributed.helper_processes import end_with_parent
from hetero.elastic.etcd import EtcdAddress, wait_until_it_answers
from hetero.elastic.job_store import JobStore
from hetero.errors import ConfigError, MembershipStoreError
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.standard_output import output_words

_HOST = "127.0.0.1"


def run_on_this_machine(args: argparse.Namespace) -> int:
    """Start etcd and the agents, and wait for their end; returns the exit code of the job.

    Raises:
        ConfigError: the program's flags name no cluster file, or it has no node types; or etcd is missing.
    """
    # Each agent would say so, once etcd runs.
    job_settings(args)
    straggler_settings(args)
    types = node_types(args.program, args.nodes)
    names = [f"node-{index}" for index in range(args.nodes)]
    with _etcd() as url, contextlib.ExitStack() as cleanup:
        agents = {}
        for name, node_type in zip(names, types, strict=True):
            cleanup.callback(shutil.rmtree, copies_folder(args.job, name), ignore_errors=True)
            agents[name] = _started(_agent_command(args, url=url, name=name, node_type=node_type))
            cleanup.callback(_end, agents[name])
        print(f"etcd {url}, job {args.job}; try in another terminal:")
        print(f"  {sys.executable} -m hetero elastic status --etcd {url} --job {args.job}")
        print(f"  {sys.executable} -m hetero elastic leave --etcd {url} --job {args.job} {names[-1]}")
        print(f"  kill -9 {agents[names[-1]].pid}     # {names[-1]} is lost with its ranks", flush=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(130))
        for agent in agents.values():
            agent.wait()
        outcome = JobStore(EtcdAddress(urls=(url,)), args.job).read().outcome
        if outcome is not None:
            return outcome.exit_code
        return max((agent.returncode for agent in agents.values()), default=1) or 1


def node_types(words: list[str], count: int) -> list[str]:
    """The types of the first ``count`` nodes of the cluster file that a program's flags name; then its last type again.

    Raises:
        ConfigError: they name none.
    """
    flags = ("--hetero-cluster", "--hetero-emulate")
    given = [word.partition("=")[2] for word in words if word.partition("=")[0] in flags and "=" in word]
    given += [words[index + 1] for index, word in enumerate(words[:-1]) if word in flags]
    if not given:
        raise ConfigError(f"hetero elastic run: the program's flags name no cluster file; give it {flags[0]} FILE")
    listed = [each.name for each in load(ClusterSpec, Path(given[-1])).node_types for _ in range(each.count)]
    return [*listed, *[listed[-1]] * count][:count]


def _agent_command(args: argparse.Namespace, *, url: str, name: str, node_type: str) -> list[str]:
    options = {
        "job": args.job,
        "etcd": url,
        "node-name": name,
        "node-type": node_type,
        "lease": args.lease,
        "min-nodes": args.min_nodes,
        "wait-for-nodes": args.wait_for_nodes,
        "wait-for-etcd": args.wait_for_etcd,
        "dwell": args.dwell,
        "min-gain": args.min_gain,
        "straggler-threshold": args.straggler_threshold,
        "straggler-after": args.straggler_after,
        "leave-within": args.leave_within,
        "logs": args.logs or Path("elastic-logs") / args.job,
        **({} if args.object_store is None else {"object-store": args.object_store}),
        "upload-every": args.upload_every,
        "keep-uploads": args.keep_uploads,
    }
    words = [f"--{option}={value}" for option, value in options.items()]
    return [sys.executable, "-m", "hetero", "elastic", "agent", *words, *output_words(args), "--", *args.program]


@contextlib.contextmanager
def _etcd() -> Iterator[str]:
    """An etcd in a folder of its own; its address."""
    with tempfile.TemporaryDirectory(prefix="hetero-etcd-") as folder:
        port, peer_port = _free_ports(2)
        process = _started(etcd_command(data=Path(folder), host=_HOST, port=port, peer_port=peer_port))
        url = f"http://{_HOST}:{port}"
        try:
            wait_until_it_answers(EtcdAddress(urls=(url,)), attempts=100, pause=lambda: time.sleep(0.1))
            yield url
        except MembershipStoreError as error:
            raise ConfigError(f"etcd did not start: {error}") from None
        finally:
            _end(process)


def _started(words: list[str]) -> "subprocess.Popen[bytes]":
    parent = os.getpid()
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=lambda: end_with_parent(parent))


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def _free_ports(count: int) -> list[int]:
    """So many that are free now, no two the same: each is held until all are known."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind((_HOST, 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
