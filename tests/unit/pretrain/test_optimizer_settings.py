"""What the optimizer and the schedules of its learning rate and weight decay are made of."""

import pytest
import torch

from hetero.runtime.optimizer import AdamOptions, DecoupledRate
from megatron.pretrain.param_scheduler import build_scheduler
from megatron.pretrain.training import adam_options
from tests.helpers.flags import parse


def test_adam_gets_every_flag() -> None:
    flags = "--lr 0.3 --weight-decay 0.2 --adam-beta1 0.8 --adam-beta2 0.7 --adam-eps 1e-5 --clip-grad 0.6"
    wanted = AdamOptions(lr=0.3, weight_decay=0.2, betas=(0.8, 0.7), eps=1e-5, clip_grad=0.6)
    assert adam_options(parse(flags).optimizer) == wanted


def seen(flags: str, *, train_iters: int, num_steps: int) -> list[tuple[float, float, float]]:
    """Learning rate, and weight decay of matrices and of vectors, before each step."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "wd_mult": multiple} for multiple in (1.0, 0.0)]
    optimizer = torch.optim.AdamW(groups)
    config = parse(flags, f"--train-iters {train_iters}")
    scheduler = build_scheduler(optimizer, config.optimizer, train_samples=config.run.train_samples)
    found = []
    for _ in range(num_steps):
        matrices, vectors = optimizer.param_groups
        found.append((matrices["lr"], matrices["weight_decay"], vectors["weight_decay"]))
        scheduler.step(increment=config.parallel.global_batch_size)
    return found


def test_a_decoupled_learning_rate_has_bounds_of_its_own() -> None:
    """The shape of the schedule is that of the others: two steps of warmup, then down in four."""
    flags = "--lr 0.4 --min-lr 0 --lr-warmup-iters 2 --lr-decay-iters 6 --decoupled-lr 0.08 --decoupled-min-lr 0.04"
    bounds = adam_options(parse(flags).optimizer).decoupled
    assert bounds == DecoupledRate(lr=0.08, min_lr=0.04)
    assert adam_options(parse("--min-lr 0.002 --decoupled-lr 0.08").optimizer).decoupled == DecoupledRate(
        lr=0.08, min_lr=0.002
    )
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "max_lr": bounds.lr, "min_lr": bounds.min_lr}
    optimizer = torch.optim.AdamW([group])
    scheduler = build_scheduler(optimizer, parse(flags).optimizer, train_samples=64)
    found = []
    for _ in range(8):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=8)
    assert found == pytest.approx([0.0, 0.04, 0.08, 0.07, 0.06, 0.05, 0.04, 0.04])


def test_learning_rate_and_weight_decay_have_lengths_of_their_own() -> None:
    """Two steps of warmup, then down until step 6; weight decay grows until the last of the eight."""
    flags = (
        "--lr 0.4 --min-lr 0 --lr-decay-style linear --lr-warmup-iters 2 --lr-decay-iters 6 "
        "--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.8"
    )
    rates = [0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0]
    found = seen(flags, train_iters=8, num_steps=8)
    assert [rate for rate, _, _ in found] == pytest.approx(rates)
    assert [decay for _, decay, _ in found] == pytest.approx([0.1 * step for step in range(8)])
    assert {decay for _, _, decay in found} == {0.0}
