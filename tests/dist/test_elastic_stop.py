"""A planned change: ranks that are told to end finish the step, commit it, and the next epoch loses nothing."""

from pathlib import Path
from signal import SIGTERM

import pytest

from hetero.checkpoint.folder import published_steps
from hetero.elastic.records import STOP_FOR_GOOD
from tests.helpers.commands import command_line
from tests.helpers.elastic import Run, nodes
from tests.helpers.elastic_launch import launch, losses

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

END = 40


def flags(**changes: str) -> list[str]:
    return command_line(
        global_batch_size="4",
        hetero_plan="of-the-epoch.json",
        train_iters=str(END),
        seq_length="16",
        log_interval="1",
        hetero_elastic_copy_every="1000",
        **changes,
    )


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=1)
def test_sigterm_commits_the_step_in_hand(tmp_path: Path) -> None:
    """No copy was due before; the second epoch goes on from where the first stopped, and ends as a run that did not."""
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        codes, reports, said = launch(run, tmp_path / "first", flags(), stop_after=5)
        assert codes == [0, 0], said
        stopped = [each for each in reports if each.phase == "stopped"]
        assert len(stopped) == 2
        (step,) = {each.step for each in stopped}
        assert {each.committed for each in stopped} == {step}
        assert 5 <= step < END
        assert [each.phase for each in reports if each.rank == 0][:3] == ["joined", "built", "restored"]
        codes, reports, more = launch(run, tmp_path / "second", flags())
        assert codes == [0, 0], more
        assert f"goes on after step {step}, from copies" in more
        assert [each.phase for each in reports].count("finished") == 2
        whole_run = Run(made)
        for name in ("a", "b"):
            made.lose(name)
            made.add(name)
        codes, _, whole = launch(whole_run, tmp_path / "whole", flags())
        assert codes == [0, 0], whole
    assert losses(said) | losses(more) == losses(whole)
    assert len(losses(whole)) == END


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=2)
@pytest.mark.parametrize(("saves", "phase"), [(True, "finished"), (False, "stopped")])
def test_a_stop_for_good_of_one_rank_is_one_of_all(saves: bool, phase: str, tmp_path: Path) -> None:
    """The other one gets the signal of a change; without --save the copies alone have the step."""
    changes = {"save": str(tmp_path / "saved")} if saves else {}
    with nodes(tmp_path, "a", "b") as made:
        signals = (SIGTERM, STOP_FOR_GOOD)
        codes, reports, said = launch(Run(made), tmp_path / "first", flags(**changes), stop_after=5, signals=signals)
    assert codes == [0, 0], said
    ended = [each for each in reports if each.phase in ("stopped", "finished")]
    assert {each.phase for each in ended} == {phase}
    (step,) = {each.step for each in ended}
    assert {each.committed for each in ended} == {step}
    assert published_steps(tmp_path / "saved") == ([step] if saves else [])
