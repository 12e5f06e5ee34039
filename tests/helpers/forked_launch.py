"""A script of this repository on ranks that are forked from one process which has imported everything.

A launch with torchrun spends three seconds per rank on imports. Here a rank gets what torchrun would tell it, and runs
the script itself. Once a rank has failed the others are told to end, as torchrun does it: they wait for that.
"""

import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from tests.helpers.commands import ROOT, Finished
from tests.helpers.rank_pool import fork_server

_PATIENCE_S = 30.0
"""With the others, once they were told to end."""


def forked(
    num_ranks: int,
    argv: Sequence[str],
    *,
    script: str = "pretrain_gpt.py",
    timeout_s: float = 100,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Finished:
    """Run ``script`` to its end; the exit code is that of the first rank that failed, and all their output is told.

    Args:
        environment: variables beside those of a launcher.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            fork_server().Process(
                target=_rank_main, args=(rank, num_ranks, store.port, folder, script, list(argv), dict(environment))
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        deadline, code = time.monotonic() + timeout_s, 0
        try:
            while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
                time.sleep(0.02)
                if code == 0 and (code := next((process.exitcode for process in ranks if process.exitcode), 0)):
                    deadline = min(deadline, time.monotonic() + _PATIENCE_S)
                    for process in ranks:
                        process.terminate()
            hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        said = {
            stream: "".join((folder / f"{stream}-{rank}").read_text() for rank in range(num_ranks))
            for stream in ("stdout", "stderr")
        }
        assert not hung, f"ranks {hung} hung\n{said['stdout']}\n{said['stderr']}"
        return Finished(code or next((each.exitcode for each in ranks if each.exitcode), 0), **said)


def _rank_main(
    rank: int, world_size: int, port: int, folder: Path, script: str, argv: list[str], environment: dict[str, str]
) -> None:
    say_into_files(folder, rank)
    os.environ |= environment
    run_script(script, argv, rank=rank, world_size=world_size, port=port)


def say_into_files(folder: Path, rank: int) -> None:
    """From here on, stdout and stderr of this process go to files."""
    for name, stream in (("stdout", 1), ("stderr", 2)):
        with (folder / f"{name}-{rank}").open("w") as file:
            os.dup2(file.fileno(), stream)


def run_script(
    script: str, argv: Sequence[str], *, rank: int, world_size: int, port: int, store_in_rank_0: bool = False
) -> None:
    """In a fresh fork: run ``script`` as a launcher starts it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "COLUMNS": "200"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": str(not store_in_rank_0), "GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(ROOT)
    sys.argv = [script, *argv]
    # Ranks that the fork server starts ignore Ctrl-C; a launcher's do not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_path(script, run_name="__main__")
