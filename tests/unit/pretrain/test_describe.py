"""In an elastic run, an agent asks the program what there is to plan before any rank is there."""

from pathlib import Path

import pytest

from hetero.elastic.planning_problem import PlanningProblem
from hetero.elastic.records import ASSIGNMENT_VARIABLE, DESCRIBE_VARIABLE
from hetero.errors import ConfigError
from hetero.serialization import load
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.elastic import describe
from megatron.pretrain.launch import launch_from
from pretrain_gpt import main
from tests.helpers.commands import ROOT, command_line, model_of

CLUSTER = str(ROOT / "scripts/presets/clusters/a100_v100.yaml")


def flags(**changes: str | None) -> list[str]:
    return command_line(**{"hetero_cluster": CLUSTER, "use_distributed_optimizer": "", **changes})


def test_what_there_is_to_plan_is_written_and_nobody_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "problem.json"
    monkeypatch.setenv(DESCRIBE_VARIABLE, str(path))
    argv = flags(hidden_dropout="0.1", hetero_plan_time_limit="3", bf16="")
    assert main(argv) == 0
    problem = load(PlanningProblem, path)
    assert problem.model == model_of(argv)
    assert (problem.seq_length, problem.global_batch_size, problem.precision) == (16, 6, "bf16")
    assert problem.distributed_optimizer
    assert problem.runtime.hidden_dropout == 0.1
    assert problem.time_limit_s == 3
    assert [each.name for each in problem.cluster.node_types] == ["a100", "v100"]


def test_an_emulation_is_planned_as_what_it_describes_and_keeps_what_computes(tmp_path: Path) -> None:
    argv = flags(hetero_cluster=None, hetero_emulate=CLUSTER, hetero_emulate_seq_length="8")
    describe(parse_args(argv), tmp_path / "problem.json")
    problem = load(PlanningProblem, tmp_path / "problem.json")
    assert (problem.model, problem.seq_length) == (model_of(argv), 16)
    small = problem.trained_model
    assert (small.num_layers, small.max_position_embeddings) == (problem.model.num_layers, 8)
    assert small.kv_channels < problem.model.kv_channels


def test_wrong_flags_are_said_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DESCRIBE_VARIABLE, str(tmp_path / "problem.json"))
    assert main(flags(num_layers="0")) == 2
    assert "hetero: --num-layers: '0' is not a whole number" in capsys.readouterr().err
    assert not (tmp_path / "problem.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hetero_plan": "plan.json"}, "give --hetero-cluster.*leave --hetero-plan out"),
        ({"hetero_cluster": None, "micro_batch_size": "1"}, "give --hetero-cluster"),
        (
            {
                "step_batch_size_schedule": "0:2,64:6",
                "train_samples": "60",
                "train_iters": None,
                "global_batch_size": None,
            },
            "--step-batch-size-schedule '0:2 64:6': elastic training keeps one batch under all of its plans; give",
        ),
        (
            {"eval_iters": "1", "eval_global_batch_size": "4"},
            "--eval-global-batch-size 4: elastic training evaluates in",
        ),
        ({"load": "out", "override_ckpt_iteration": "4"}, "--override-ckpt-iteration 4: elastic training loads a"),
        ({"exit_duration_in_mins": "5"}, "--exit-duration-in-mins: the time of a rank begins anew with every epoch"),
        (
            {"rampup_batch_size": "2 2 9", "train_iters": None, "train_samples": "80"},
            "--rampup-batch-size 2 2 9: elastic training keeps one batch",
        ),
        ({"hetero_cluster": "missing.yaml"}, r"missing\.yaml: no such file"),
    ],
)
def test_what_elastic_training_cannot_plan(tmp_path: Path, changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(parse_args(" ".join(flags(**changes)).split()), tmp_path / "problem.json")


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


class TestAssignment:
    def test_a_rank_without_an_agent_has_none(self) -> None:
        assert launch_from(TORCHRUN).elastic is None

    def test_a_file_that_is_none(self, tmp_path: Path) -> None:
        path = tmp_path / "assignment.json"
        path.write_text("{}")
        with pytest.raises(ConfigError, match=r"assignment\.json: missing key 'job'"):
            launch_from({**TORCHRUN, ASSIGNMENT_VARIABLE: str(path)})
        with pytest.raises(ConfigError, match="no such file"):
            launch_from({**TORCHRUN, ASSIGNMENT_VARIABLE: str(tmp_path / "missing")})
