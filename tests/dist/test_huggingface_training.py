"""A model of ``transformers`` converted in, trained under an asymmetric plan, converted out: the same logits there."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hetero.checkpoint.folder import find_checkpoint, read_state
from hetero.checkpoint.state import RunSettings
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.trainer import Trainer
from megatron.pretrain.checkpointing import load, step_of_start
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.param_scheduler import build_scheduler
from megatron.pretrain.training import build_trainer
from tests.helpers.commands import command_line
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.sessions import session
from tests.helpers.training import one_process_plan
from tools.convert_checkpoint import main

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 5
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 58,
    "eos_token_id": [59, 60],
}


def flags(made: Plan, **changes: str) -> list[str]:
    return command_line(
        hetero_plan="given.json", global_batch_size=str(made.global_batch_size), train_iters=str(STEPS), **changes
    )


def logits_of(rank: int, made: Plan, argv: list[str], tokens_BS: torch.Tensor) -> np.ndarray:
    """Of the whole model on one rank, from the checkpoint that ``argv`` loads."""
    config = parse_args(argv)
    context = create_groups(made, device=torch.device("cpu"))
    step = step_of_start(config.checkpoint)
    trainer: Trainer = build_trainer(config, context, draws_weights=step is None)
    scheduler = build_scheduler(trainer.torch_optimizer, config.optimizer, train_samples=config.run.train_samples)
    load(config, context, trainer, scheduler, step=step, settings=RunSettings())
    (runner,) = trainer._executor._stages.values()
    model = runner._model
    model.module.eval()
    positions = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    with torch.no_grad():
        logits = model.module(tokens_BS, positions, None, labels=None)
    return logits.numpy()


@pytest.mark.rotates(every=3, turn=2)
def test_converted_in_trained_and_converted_out(tmp_path: Path) -> None:
    torch.manual_seed(3)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    convert = ["--input", str(tmp_path / "hf"), "--output", str(tmp_path / "in"), "--make-vocab-size-divisible-by", "4"]
    assert main(["--from", "hf", "--to", "hetero", *convert]) == 0
    model = read_state(find_checkpoint(tmp_path / "in", None)).model

    first = replica(stage(layers=(0, 3), ranks=(0, 1), tp=2, sp=True), stage(layers=(3, 4), ranks=(2,)), num_samples=4)
    made = sharded(plan(model, [first, replica(stage(layers=(0, 4), ranks=(3,)), num_samples=2)]))
    trained = flags(
        made, load=str(tmp_path / "in"), finetune="", save=str(tmp_path / "out"), use_distributed_optimizer=""
    )
    run_ranks(session, made.world_size, made, trained, STEPS)

    assert (
        main(["--from", "hetero", "--to", "hf", "--input", str(tmp_path / "out"), "--output", str(tmp_path / "hf2")])
        == 0
    )
    after = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf2").eval()
    assert (after.generation_config.bos_token_id, after.generation_config.eos_token_id) == (58, [59, 60])
    tokens_BS = torch.randint(0, 61, (2, made.seq_length), generator=torch.Generator().manual_seed(1))
    alone = one_process_plan(made)
    (ours,) = run_ranks(logits_of, 1, alone, flags(alone, load=str(tmp_path / "out")), tokens_BS)
    with torch.no_grad():
        expected, before = after(tokens_BS).logits.numpy(), theirs(tokens_BS).logits.numpy()
    np.testing.assert_allclose(ours[..., :61], expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert np.abs(expected - before).max() > 0.01 * np.abs(before).max(), "five steps changed nothing"
