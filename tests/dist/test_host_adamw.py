"""AdamW on the host beside a training's own optimizer: the same bits in every range of every rank, step by step."""

import dataclasses
import os

import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan, Precision
from hetero.runtime.host_adamw import BoundThreads, HostAdamW, HostUpdate
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from tests.helpers.cases import slow
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ADAM, microbatches

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

NUM_STEPS = 4


def two_unlike_replicas(precision: Precision) -> Plan:
    """One rank has all layers, two others half of them each, and the three share every bucket unequally."""
    alone = replica(stage(layers=(0, 2), ranks=(0,)), num_samples=2)
    pair = replica(stage(layers=(0, 1), ranks=(1,)), stage(layers=(1, 2), ranks=(2,)), num_samples=2)
    return sharded(plan(llama_model(num_layers=2), [alone, pair], precision=precision))


@dataclasses.dataclass
class Beside:
    """What one rank saw: ranges, updates and right previews, and what of the host was unlike the training's own."""

    num_ranges: int
    decays: set[float]
    num_updates: int
    num_skipped: int
    num_right: int
    unlike: list[str]


def train_beside(rank: int, plan: Plan, clip_grad: float, spoilt_step: int | None) -> Beside:
    context = create_groups(plan, device=torch.device("cpu"))
    trainer = Trainer(
        context,
        options=StageOptions(init_method_std=0.1),
        adam=dataclasses.replace(ADAM, clip_grad=clip_grad),
        seed=7,
        data_parallel=DataParallelOptions(bucket_numel=3000),
        loss_scale=LossScaleOptions(initial=2.0**10, hysteresis=1),
    )
    optimizer = trainer.optimizer
    group_of = {main: group for group in trainer.torch_optimizer.param_groups for main in group["params"]}
    ranges = optimizer._ranges
    found = Beside(len(ranges), {group_of[each.main]["weight_decay"] for each in ranges}, 0, 0, 0, [])
    with BoundThreads(sorted(os.sched_getaffinity(0))[:1]) as threads:
        hosts = [HostAdamW(each.main.detach().clone(), threads, previews=True, chunk_numel=128) for each in ranges]
        left = [each.weights.detach().clone() for each in ranges]
        for step in range(NUM_STEPS):
            trainer.compute_gradients(microbatches(plan, rank, step=step) if reads_data(context) else None)
            if step == spoilt_step and rank == 0:
                ranges[0].main.grad.view(-1)[0] = float("inf")
            gradients = [each.main.grad.clone() for each in ranges]
            updates = [of_group(group_of[each.main], found.num_updates + 1) for each in ranges]
            # As before the norm is known: as if nothing were clipped. The loss scale of fp16 is known.
            scale = optimizer._scaler.scale if optimizer._scaler is not None else 1.0
            for host, gradient, update, weights in zip(hosts, gradients, updates, left, strict=True):
                host.preview(gradient, dataclasses.replace(update, factor=1.0 / scale), weights=weights)
            result = trainer.update()
            factor = optimizer._clip_factor(result.grad_norm) / result.loss_scale
            for host, gradient, update, weights in zip(hosts, gradients, updates, left, strict=True):
                if result.skipped:
                    host.skip(weights=weights)
                else:
                    right = host.commit(gradient, dataclasses.replace(update, factor=factor), weights=weights)
                    found.num_right += right
            found.num_updates += not result.skipped
            found.num_skipped += result.skipped
            found.unlike += [
                f"step {step} range {index}: {name}"
                for index, (host, weights) in enumerate(zip(hosts, left, strict=True))
                for name, ours, theirs in compared(host, weights, trainer, index)
                if not torch.equal(ours, theirs)
            ]
            trainer.finish_gather()
    return found


def of_group(group: dict[str, object], number: int) -> HostUpdate:
    names = ("lr", "betas", "eps", "weight_decay")
    return HostUpdate(number=number, **{name: group[name] for name in names})  # type: ignore[arg-type]


def compared(
    host: HostAdamW, weights: torch.Tensor, trainer: Trainer, index: int
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    updated = trainer.optimizer._ranges[index]
    moments = trainer.torch_optimizer.state[updated.main]
    return [
        ("weights", weights, updated.weights),
        ("main", host.main, updated.main),
        *((name, getattr(host, name), moments[name]) for name in ("exp_avg", "exp_avg_sq")),
    ]


@pytest.mark.slow
@pytest.mark.rotates("precisions")
@pytest.mark.parametrize("precision", ["bf16", *slow("fp64", "fp32", "fp16")])
def test_every_range_has_the_bits_of_the_training(precision: Precision) -> None:
    for clip_grad, spoilt_step in ((0.25, None), (1000.0, 1)):
        made = two_unlike_replicas(precision)
        ranks = run_ranks(train_beside, made.world_size, made, clip_grad, spoilt_step)
        assert set().union(*(found.decays for found in ranks)) == {0.0, 0.1}
        for found in ranks:
            assert found.unlike == []
            assert found.num_ranges > 2
            assert found.num_updates > 0
            if spoilt_step is not None:
                assert found.num_skipped > 0
                assert found.num_right == found.num_ranges * found.num_updates, "nothing was clipped"
            else:
                assert found.num_right == 0, "every step was clipped"
