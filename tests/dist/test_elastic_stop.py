"""A planned change: ranks that are told to end finish the step, commit it, and the next epoch loses nothing."""

import os
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hetero.elastic.records import ASSIGNMENT_VARIABLE, RankReport
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.serialization import to_json
from tests.helpers.commands import MODEL, command_line
from tests.helpers.elastic import Run, nodes
from tests.helpers.forked_launch import run_script, say_into_files
from tests.helpers.rank_pool import fork_server

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

END = 40


def rank_main(rank: int, port: int, folder: Path, variables: dict[str, str], argv: list[str], world_size: int) -> None:
    say_into_files(folder, rank)
    os.environ |= variables
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


def launch(run: Run, folder: Path, *, stop_after: int | None = None) -> tuple[list[int | None], list[RankReport], str]:
    """The next epoch, ended after some step by SIGTERM to all ranks: exit codes, reports, what rank 0 said."""
    folder.mkdir()
    epoch = run.next_epoch(two_stages(), {"a": (0,), "b": (1,)})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank, assignment in enumerate(run.assignments(epoch)):
        path = folder / f"assignment-{rank}"
        path.write_text(to_json(assignment))
        variables = {ASSIGNMENT_VARIABLE: str(path)}
        ranks.append(fork_server().Process(target=rank_main, args=(rank, store.port, folder, variables, flags(), 2)))
    for process in ranks:
        process.start()
    reports: list[RankReport] = []
    deadline, told = time.monotonic() + 100, False
    try:
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            reports += run.nodes.reports()
            if not told and stop_after is not None and any(each.step >= stop_after for each in reports):
                told = True
                for process in ranks:
                    process.terminate()
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


def flags() -> list[str]:
    return command_line(
        global_batch_size="4",
        hetero_plan="of-the-epoch.json",
        train_iters=str(END),
        seq_length="16",
        log_interval="1",
        hetero_elastic_copy_every="1000",
    )


def losses(said: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)/\d+ \| loss ([\d.]+)", said)}


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=1)
def test_sigterm_commits_the_step_in_hand(tmp_path: Path) -> None:
    """No copy was due before; the second epoch goes on from where the first stopped, and ends as a run that did not."""
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        codes, reports, said = launch(run, tmp_path / "first", stop_after=5)
        assert codes == [0, 0], said
        stopped = [each for each in reports if each.phase == "stopped"]
        assert len(stopped) == 2
        (step,) = {each.step for each in stopped}
        assert {each.committed for each in stopped} == {step}
        assert 5 <= step < END
        assert [each.phase for each in reports if each.rank == 0][:3] == ["joined", "built", "restored"]
        codes, reports, more = launch(run, tmp_path / "second")
        assert codes == [0, 0], more
        assert f"goes on after step {step}, from copies" in more
        assert [each.phase for each in reports].count("finished") == 2
        whole_run = Run(made)
        for name in ("a", "b"):
            made.lose(name)
            made.add(name)
        codes, _, whole = launch(whole_run, tmp_path / "whole")
        assert codes == [0, 0], whole
    assert losses(said) | losses(more) == losses(whole)
    assert len(losses(whole)) == END
