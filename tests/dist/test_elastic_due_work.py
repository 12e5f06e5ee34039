"""What was due after a step that copies have brought back is done before the next step."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.checkpoint.folder import published_steps, step_folder, whole_state
from hetero.elastic.records import RankReport
from tests.helpers.commands import command_line
from tests.helpers.elastic import Nodes, Run, nodes
from tests.helpers.elastic_launch import launch, losses
from tests.unit.pretrain.corpora import corpus_of_late_tokens

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(180)]

END, HALF = 8, 4


def flags(**changes: str | None) -> list[str]:
    given = {
        "global_batch_size": "4",
        "hetero_plan": "of-the-epoch.json",
        "train_iters": str(END),
        "seq_length": "16",
        "log_interval": "1",
        "hetero_elastic_copy_every": "1",
    }
    return command_line(**{**given, **changes})


class Lost:
    """A run of which copies of some step are left, and nothing else; any number of epochs may go on from it."""

    def __init__(self, made: Nodes, folder: Path, *, step: int, **changes: str | None) -> None:
        self._made, self._folder, self._number = made, folder, 0
        self._run = Run(made)
        codes, _, said = self._launch(exit_interval=str(step), **changes)
        assert codes == [0, 0], said
        self._lineage = self._run.lineage
        for name in made.info:
            shutil.copytree(made.folder(name), folder / "kept" / name)

    def goes_on(self, **changes: str | None) -> tuple[list[int | None], list[RankReport], str]:
        """The next epoch with other flags: exit codes, reports, what rank 0 said."""
        self._run = dataclasses.replace(self._run, lineage=self._lineage)
        for name in self._made.info:
            shutil.rmtree(self._made.folder(name))
            shutil.copytree(self._folder / "kept" / name, self._made.folder(name))
        return self._launch(**changes)

    def _launch(self, **changes: str | None) -> tuple[list[int | None], list[RankReport], str]:
        self._number += 1
        return launch(self._run, self._folder / f"epoch-{self._number}", flags(**changes))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lost]:
    folder = tmp_path_factory.mktemp("half")
    with nodes(folder, "a", "b") as made:
        yield Lost(made, folder, step=HALF)


def phases(reports: list[RankReport]) -> list[str]:
    return [each.phase for each in reports if each.rank == 0 and each.phase in ("stopped", "finished", "failed")]


@pytest.mark.parametrize("end", ["--train-iters", "--exit-interval"])
def test_the_last_step_is_saved_and_evaluated_and_the_run_ends(end: str, half: Lost, tmp_path: Path) -> None:
    changes = {"--train-iters": {"train_iters": str(HALF)}, "--exit-interval": {"exit_interval": str(HALF)}}[end]
    codes, reports, said = half.goes_on(save=str(tmp_path), eval_iters="1", **changes)
    assert codes == [0, 0], said
    assert phases(reports) == ["finished"]
    assert losses(said) == {}, "a step was trained"
    assert published_steps(tmp_path) == [HALF]
    assert f"step {HALF}/{changes.get('train_iters', END)} | valid loss" in said


@pytest.mark.rotates(every=3, turn=0)
@pytest.mark.parametrize(("interval", "asynchronous"), [("2", False), ("3", True)], ids=["of-it", "of-the-step-before"])
def test_a_save_that_was_due_is_made_up_for(interval: str, asynchronous: bool, half: Lost, tmp_path: Path) -> None:
    """With an interval of 3, step 3 was due, and its save in the background was lost."""
    background = {"async_save": ""} if asynchronous else {}
    codes, _, said = half.goes_on(
        save=str(tmp_path), save_interval=interval, eval_iters="1", eval_interval=interval, **background
    )
    assert codes == [0, 0], said
    # Of an interval of 3, step 3 was due and lost, 6 is due, and 8 is the last.
    assert published_steps(tmp_path) == [4, 6, 8]
    assert list(losses(said)) == [5, 6, 7, 8]
    assert (f"step {HALF}/{END} | valid loss" in said) is (interval == "2")


@pytest.mark.rotates(every=3, turn=1)
def test_a_checkpoint_that_is_whole_is_kept_and_a_torn_one_is_made_again(half: Lost, tmp_path: Path) -> None:
    wanted = {"save": str(tmp_path), "save_interval": "4"}
    assert half.goes_on(**wanted)[0] == [0, 0]
    first = step_folder(tmp_path, HALF)
    was, later = first.stat().st_ino, step_folder(tmp_path, END)
    shard = next(later.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert whole_state(later) is None
    codes, _, said = half.goes_on(**wanted)
    assert codes == [0, 0], said
    assert first.stat().st_ino == was, "what was whole was saved again"
    assert whole_state(later) is not None
    assert published_steps(tmp_path) == [HALF, END]


@pytest.mark.rotates(every=3, turn=1)
def test_other_flags_replace_what_lost_steps_had_saved(half: Lost, tmp_path: Path) -> None:
    """Step 8 of the run with the old learning rate is none of this one."""
    wanted = {"save": str(tmp_path), "save_interval": "4"}
    assert half.goes_on(**wanted)[0] == [0, 0]
    codes, _, said = half.goes_on(**wanted, lr="0.0123")
    assert codes == [0, 0], said
    state = whole_state(step_folder(tmp_path, END))
    assert state is not None
    assert state.settings is not None
    assert state.settings.updates["--lr"] == 0.0123


@pytest.mark.rotates(every=3, turn=2)
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"seed": "77"}, "saved with --seed 1234, not with 77: other samples would follow; give --seed 1234"),
        ({"save": "SAVED", "train_iters": "2"}, "it has a checkpoint of step 8, later than step 4"),
    ],
    ids=["seed", "folder"],
)
def test_another_run_is_refused_at_once(changes: dict[str, str], what: str, half: Lost, tmp_path: Path) -> None:
    if "save" in changes:
        changes = {**changes, "save": str(tmp_path / "saved")}
        (other := tmp_path / "other").mkdir()
        with nodes(other, "a", "b") as made:
            Lost(made, other, step=END, seed="5", save=changes["save"])
    codes, reports, said = half.goes_on(**changes)
    assert codes == [2, 2], said
    assert what in said
    assert {each.is_wrong_input for each in reports if each.phase == "failed"} == {True}


@pytest.mark.rotates(every=3, turn=2)
def test_a_step_whose_next_samples_cannot_be_read_is_saved(tmp_path: Path) -> None:
    """The first epoch ends there with copies alone, as a run whose flags lacked --save."""
    wanted = flags(
        data_path=corpus_of_late_tokens(tmp_path / "corpus"), split="1", seed="44", train_iters="24", save="SAVED"
    )
    wanted.remove("--mock-data")
    without_save = [word for word in wanted if word not in ("--save", "SAVED")]
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        codes, reports, said = launch(run, tmp_path / "first", without_save)
        assert codes == [2, 2], said
        step = max(each.step for each in reports)
        folder = tmp_path / "saved"
        codes, _, said = launch(run, tmp_path / "second", [str(folder) if word == "SAVED" else word for word in wanted])
    assert codes == [2, 2], said
    assert "token id 61 in sequence" in said
    assert losses(said) == {}
    assert published_steps(folder) == [step]
