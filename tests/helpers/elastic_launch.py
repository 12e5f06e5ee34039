"""Epochs of ``pretrain_gpt.py`` on forked ranks of two nodes without agents: what ranks report, print and end with."""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM

import torch.distributed as dist

from hetero.elastic.records import ASSIGNMENT_VARIABLE, RankReport
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.serialization import to_json
from megatron.pretrain import error_file
from tests.helpers.commands import MODEL
from tests.helpers.elastic import Run
from tests.helpers.forked_launch import run_script, say_into_files
from tests.helpers.rank_pool import fork_server

_SECONDS_FOR_RANK_0 = 2.0


def rank_main(rank: int, port: int, folder: Path, variables: dict[str, str], argv: list[str], world_size: int) -> None:
    say_into_files(folder, rank)
    os.environ |= variables
    # No launcher is there to end the other ranks once rank 0 has said what is wrong.
    error_file._SECONDS_TO_REPORT = _SECONDS_FOR_RANK_0
    run_script("pretrain_gpt.py", argv, rank=rank, world_size=world_size, port=port)


def two_stages() -> Plan:
    return uniform_plan(
        UniformLayout(
            model=MODEL,
            world_size=2,
            pp=2,
            micro_batch_size=1,
            global_batch_size=4,
            seq_length=16,
            device="cpu",
        )
    )


def launch(
    run: Run,
    folder: Path,
    flags: list[str],
    *,
    stop_after: int | None = None,
    signals: Sequence[int] = (SIGTERM, SIGTERM),
) -> tuple[list[int | None], list[RankReport], str]:
    """The next epoch: exit codes, reports, what rank 0 said.

    Args:
        stop_after: the step after which each rank gets its signal of ``signals``, ``None`` for never.
    """
    folder.mkdir()
    epoch = run.next_epoch(two_stages(), {"a": (0,), "b": (1,)})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank, assignment in enumerate(run.assignments(epoch)):
        path = folder / f"assignment-{rank}"
        path.write_text(to_json(assignment))
        variables = {ASSIGNMENT_VARIABLE: str(path)}
        ranks.append(fork_server().Process(target=rank_main, args=(rank, store.port, folder, variables, flags, 2)))
    for process in ranks:
        process.start()
    reports: list[RankReport] = []
    deadline, told = time.monotonic() + 100, False
    try:
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            reports += run.nodes.reports()
            if not told and stop_after is not None and any(each.step >= stop_after for each in reports):
                told = True
                for process, number in zip(ranks, signals, strict=True):
                    assert process.pid is not None, "it was started"
                    os.kill(process.pid, number)
            time.sleep(0.01)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    # Sent before the ranks ended, but perhaps not read yet.
    deadline = time.monotonic() + 5
    while sum(each.phase in ("stopped", "finished", "failed") for each in reports) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        reports += run.nodes.reports()
    said = (folder / "stdout-0").read_text() + "".join((folder / f"stderr-{rank}").read_text() for rank in range(2))
    return [process.exitcode for process in ranks], reports, said


def losses(said: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)/\d+ \| loss ([\d.]+)", said)}
