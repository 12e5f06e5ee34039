"""A training draws initial weights where nothing else fills them, and none where they are read."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hetero.distributed.standstill import StepProgress
from hetero.runtime import stage as stage_module
from hetero.spec.parameters import Parameter, parameters
from megatron.pretrain import training
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.launch import Launch
from megatron.pretrain.stopping import Stop
from tests.helpers.commands import MODEL, command_line
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.sessions import session

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


class BuiltError(Exception):
    """The model is built, which is as far as these tests train."""


def stop_when_built(phase: str) -> None:
    if phase == "built":
        raise BuiltError


def drawn_elements(rank: int, argv: list[str], has_copies: bool) -> int:
    """Elements of the weights that this rank's training draws before it loads anything."""
    config, drawn = parse_args(argv), 0

    def count(held: Mapping[str, tuple[Parameter, torch.nn.Parameter]], **_: Any) -> None:
        nonlocal drawn
        drawn += sum(tensor.numel() for _, tensor in held.values())

    detector = SimpleNamespace(progress=StepProgress())
    elastic = SimpleNamespace(
        plan=None, goes_on_from_copies=has_copies, timing=lambda device: None, report=stop_when_built
    )
    launch = Launch(rank=rank, world_size=1, local_rank=0)
    with mock.patch.object(stage_module, "draw_weights", count), pytest.raises(BuiltError):
        training._pretrain(
            config,
            launch,
            torch.device("cpu"),
            detector,  # type: ignore[arg-type]
            Stop(config.run),
            elastic,  # type: ignore[arg-type]
        )
    return drawn


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one step."""
    folder = tmp_path_factory.mktemp("saved")
    alone = plan(MODEL, [replica(stage(layers=(0, 4), ranks=(0,)), num_samples=6)])
    run_ranks(session, 1, alone, command_line(save=str(folder), hetero_plan="given.json"), 1)
    return folder


def started(*, has_copies: bool = False, **flags: str) -> int:
    (drawn,) = run_ranks(drawn_elements, 1, command_line(micro_batch_size="1", **flags), has_copies)
    return drawn


def test_a_fresh_training_draws_every_weight() -> None:
    assert started() == sum(parameter.numel for parameter in parameters(MODEL))


def test_a_first_launch_with_load_draws_every_weight(tmp_path: Path) -> None:
    """Where the folder of ``--load`` and ``--save`` has nothing yet."""
    assert started(load=str(tmp_path), save=str(tmp_path)) == sum(parameter.numel for parameter in parameters(MODEL))


def test_a_resumed_training_draws_nothing(saved: Path) -> None:
    assert started(load=str(saved)) == 0


def test_a_new_training_from_the_weights_of_another_draws_nothing(saved: Path) -> None:
    """As one from a model of Hugging Face or of Megatron-LM's format, which a tool makes such a checkpoint."""
    assert started(load=str(saved), finetune="") == 0


def test_an_elastic_training_that_goes_on_from_copies_draws_nothing() -> None:
    assert started(has_copies=True) == 0
