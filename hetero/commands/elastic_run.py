"""``hetero elastic run``: a whole job on one machine, an etcd and some agents, to try out what happens to it."""

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

from hetero.commands.elastic import job_settings, straggler_settings
from hetero.commands.elastic_store import etcd_command, prepare_certificates
from hetero.distributed.helper_processes import end_with_parent
from hetero.elastic.certificate_folder import CertificateFolder
from hetero.elastic.etcd import EtcdAddress, wait_until_it_answers
from hetero.elastic.folder_claim import SHARED_MEMORY, choose_folder, delete_folder
from hetero.elastic.job_settings import settings_differences
from hetero.elastic.job_store import JobStore
from hetero.elastic.records import JobSettings
from hetero.errors import ConfigError, MembershipStoreError
from hetero.peer_limits import raise_descriptor_limit
from hetero.private_files import make_private_folder
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.standard_output import output_words

_HOST = "127.0.0.1"

_LOOK_EVERY_S = 0.2

_LEASES_END_WITHIN_S = 60.0
"""Of the nodes of an earlier run, whose agents are gone: counted on top of ``--lease``, which may have been another."""


def run_on_this_machine(args: argparse.Namespace) -> int:
    """Start etcd and the agents, and wait for their end; returns the exit code of the job.

    Raises:
        ConfigError: the program's flags name no cluster file, or it has no node types; or etcd is missing.
    """
    # Each agent would say so, once etcd runs.
    settings = job_settings(args, copy_transport="authority")
    straggler_settings(args)
    types = node_types(args.program, args.nodes)
    names = [f"node-{index}" for index in range(args.nodes)]
    copies = {name: choose_folder(args.job, name, say=partial(print, flush=True)) for name in names}
    data = _logs(args) / "etcd" / args.job
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    # For etcd too, which lets nobody in beyond as many connections.
    raise_descriptor_limit()
    exit_code = 1
    try:
        with _etcd(data) as (address, etcd), contextlib.ExitStack() as cleanup:
            store = JobStore(address, args.job)
            _check_kept_run(args, store, settings=settings, data=data, copies=copies.values())
            where = {"etcd": address.urls[0], "certificates": _certificates(data), "job": args.job}
            agents = {}
            for name, node_type in zip(names, types, strict=True):
                words = _agent_command(args, where=where, name=name, node_type=node_type, copies=copies[name])
                agents[name] = _started(words)
                cleanup.callback(_end, agents[name])
            flags = shlex.join(word for name, value in where.items() for word in (f"--{name}", str(value)))
            print(f"etcd {address.urls[0]}, job {args.job}; try in another terminal:")
            print(f"  {sys.executable} -m hetero elastic status {flags}")
            print(f"  {sys.executable} -m hetero elastic leave {flags} {names[-1]}")
            print(f"  kill -9 {agents[names[-1]].pid}     # {names[-1]} is lost with its ranks", flush=True)
            exit_code = _wait(agents.values(), etcd, store)
    except SystemExit as stopped:
        exit_code = int(stopped.code or 0)
    if exit_code == 0:
        shutil.rmtree(data, ignore_errors=True)
        for folder in copies.values():
            delete_folder(folder)
    elif any(folder.exists() for folder in copies.values()):
        print(
            f"etcd's data is kept in {data}, copies in {SHARED_MEMORY}: the same command goes on from the newest "
            "step that is whole there",
            flush=True,
        )
    return exit_code


def _wait(agents: Collection["subprocess.Popen[bytes]"], etcd: "subprocess.Popen[bytes]", store: JobStore) -> int:
    """Wait for the end of all agents; returns the exit code of the job."""
    etcd_runs = True
    while any(agent.poll() is None for agent in agents):
        if etcd_runs and etcd.poll() is not None:
            etcd_runs = False
            print(
                f"etcd has ended with the code {etcd.returncode}; agents train on, and end once they need it",
                flush=True,
            )
        time.sleep(_LOOK_EVERY_S)
    with contextlib.suppress(MembershipStoreError):
        if etcd_runs and (outcome := store.read().outcome) is not None:
            return outcome.exit_code
    # One that was killed has not said how the job ended.
    return max((agent.returncode if agent.returncode >= 0 else 1 for agent in agents), default=1)


def _check_kept_run(
    args: argparse.Namespace, store: JobStore, *, settings: JobSettings, data: Path, copies: Collection[Path]
) -> None:
    """See whether what an earlier run has left can be gone on with; one that had finished is forgotten.

    Raises:
        ConfigError: it had other settings and has not ended, or its copies are gone.
    """
    state = store.read()
    again = f"to begin again, delete {data} and {', '.join(map(str, copies))}"
    if state.outcome is not None and state.outcome.exit_code == 0:
        # It was ended before it had removed this itself; leases of its nodes may last for a while.
        until_s = time.monotonic() + args.lease + _LEASES_END_WITHIN_S
        while not store.forget():
            if time.monotonic() >= until_s:
                raise ConfigError(
                    f"{data} has job {args.job}, which has finished, and keys of nodes that stay in etcd; {again}"
                )
            time.sleep(_LOOK_EVERY_S)
        return
    has_begun = state.outcome is None and state.epoch_revision > state.revisions.get("settings", 0)
    if has_begun and state.settings is not None and (said := settings_differences(state.settings, settings)):
        raise ConfigError(
            f"{data} has job {args.job}, which was stopped after step {state.committed}, with other settings: "
            f"{'; '.join(said)}. Go on with the same command, give another --job, or {again}"
        )
    if state.committed and args.object_store is None and not any(folder.exists() for folder in copies):
        raise ConfigError(
            f"{data} has job {args.job}, of which step {state.committed} was committed, but its copies are gone, as "
            f"after a restart of this machine; {again}, and give --load if the run has saved a checkpoint"
        )


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


def _agent_command(
    args: argparse.Namespace, *, where: Mapping[str, object], name: str, node_type: str, copies: Path
) -> list[str]:
    options = {
        **where,
        "node-name": name,
        "node-type": node_type,
        "copies": copies,
        "lease": args.lease,
        "min-nodes": args.min_nodes,
        "wait-for-nodes": args.wait_for_nodes,
        "wait-for-etcd": args.wait_for_etcd,
        "dwell": args.dwell,
        "min-gain": args.min_gain,
        "straggler-threshold": args.straggler_threshold,
        "straggler-after": args.straggler_after,
        "leave-within": args.leave_within,
        "logs": _logs(args),
        **({} if args.object_store is None else {"object-store": args.object_store}),
        "upload-every": args.upload_every,
        "keep-uploads": args.keep_uploads,
    }
    words = [f"--{option}={value}" for option, value in options.items()]
    return [sys.executable, "-m", "hetero", "elastic", "agent", *words, *output_words(args), "--", *args.program]


def _logs(args: argparse.Namespace) -> Path:
    logs: Path = args.logs or Path("elastic-logs") / args.job
    return logs


def _certificates(data: Path) -> Path:
    """Return the folder of certificates of the etcd with this data: without them its port is every user's."""
    # Lines that are printed are typed in other folders.
    return data.absolute() / "certificates"


@contextlib.contextmanager
def _etcd(data: Path) -> Iterator[tuple[EtcdAddress, "subprocess.Popen[bytes]"]]:
    """Run an etcd with its data in a folder that stays; its address and its process.

    Raises:
        ConfigError: it did not start, or another run works with the folder.
    """
    make_private_folder(data, fix="give another --logs")
    lock = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A second etcd would wait for the first one without a word.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"{data}: another run works with it; end that one, or give another --job or --logs") from None
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(os.close, lock)
        tls = prepare_certificates(_certificates(data), host=_HOST)
        port, peer_port = _free_ports(2)
        process = _started(etcd_command(data=data, host=_HOST, port=port, peer_port=peer_port, tls=tls))
        cleanup.callback(_end, process)
        address = CertificateFolder(_certificates(data)).address(f"https://{_HOST}:{port}")
        try:
            wait_until_it_answers(address, attempts=100, pause=lambda: time.sleep(0.1))
        except MembershipStoreError as error:
            raise ConfigError(f"etcd did not start with its data in {data}: {error}") from None
        yield address, process


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
