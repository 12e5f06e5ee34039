"""Trainings that leave something to their hosts, whose workers are late at random, and previews that are wrong."""

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from hetero.plan.ir import Plan, Stage
from hetero.plan.offload import Offload, block_positions
from hetero.runtime.host_optimizer import HostOptimizer
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer
from hetero.spec.model import ModelSpec
from tests.helpers.plans import sharded, with_every_replica
from tests.helpers.strategies import positions_in
from tests.helpers.training import Trace, train


def left_to_hosts(plan: Plan, *, speculate: bool) -> Plan:
    """A shared optimizer, of which stages in turn leave their end, all, the last or nothing to their hosts."""

    def offload(s: int, stage: Stage, model: ModelSpec) -> Offload:
        positions = positions_in(stage, model)
        firsts = (positions[len(positions) // 2], positions[0], positions[-1], None)
        first = firsts[s % len(firsts)]
        return Offload(optimizer_from=first, speculate=speculate and first is not None)

    return with_every_replica(
        sharded(plan),
        lambda replica: replica.with_each_stage(
            offload=[offload(s, stage, plan.model) for s, stage in enumerate(replica.stages)]
        ),
    )


def gradients_to_hosts(plan: Plan, *, speculate: bool) -> Plan:
    """As :func:`left_to_hosts`, where in turns all, the last half or none of the gradients add up on the host as well.
    Without split backwards, beside which they stay."""

    def offload(s: int, stage: Stage, model: ModelSpec) -> Offload:
        first = stage.offload.optimizer_from
        if first is None:
            return stage.offload
        left = [position for position in positions_in(stage, model) if position >= first]
        return dataclasses.replace(stage.offload, gradients_from=(left[0], left[len(left) // 2], None)[s % 3])

    return with_every_replica(
        left_to_hosts(plan, speculate=speculate),
        lambda replica: replica.with_each_stage(
            offload=[offload(s, stage, plan.model) for s, stage in enumerate(replica.stages)],
            wgrad_delay=[None] * len(replica.stages),
        ),
    )


def weights_to_hosts(plan: Plan, *, turn: int, speculate: bool) -> Plan:
    """A shared optimizer, of whose stages all but each fourth leave to their hosts in turns the weights of all, of the
    last half or of the last position, gradients of at least these, and optimizer state of at least those. Without split
    backwards, beside which gradients stay."""

    def offload(s: int, stage: Stage, model: ModelSpec) -> Offload:
        positions = positions_in(stage, model)
        if s % 4 == 3:
            return Offload()
        first = (0, len(positions) // 2, len(positions) - 1)[(s + turn) % 3]
        return Offload(
            optimizer_from=positions[first // 2],
            gradients_from=positions[(first + 1) // 2],
            weights_from=positions[first],
            speculate=speculate,
        )

    return with_every_replica(
        sharded(plan),
        lambda replica: replica.with_each_stage(
            offload=[offload(s, stage, plan.model) for s, stage in enumerate(replica.stages)],
            wgrad_delay=[None] * len(replica.stages),
        ),
    )


def activations_to_hosts(plan: Plan) -> Plan:
    """Of whose stages in turn all blocks but the last, one, all or none have their activations on the host. Without
    split backwards, beside which these stay."""

    def offload(s: int, stage: Stage, model: ModelSpec) -> Offload:
        blocks = block_positions(stage, num_layers=model.num_layers)
        lasts = (blocks[max(0, len(blocks) - 2)], blocks[0], blocks[-1], None)
        return dataclasses.replace(stage.offload, activations_until=lasts[s % len(lasts)])

    return with_every_replica(
        plan,
        lambda replica: replica.with_each_stage(
            offload=[offload(s, stage, plan.model) for s, stage in enumerate(replica.stages)],
            wgrad_delay=[None] * len(replica.stages),
        ),
    )


class _AlwaysTrusting(HostOptimizer):
    """Previews in every step, also where every step is clipped."""

    @property
    def trusts_guesses(self) -> bool:
        return True

    @trusts_guesses.setter
    def trusts_guesses(self, value: bool) -> None:
        pass


def train_on_host(
    rank: int,
    plan: Plan,
    num_steps: int,
    data_parallel: DataParallelOptions,
    adam: AdamOptions,
    previews_always: bool,
    late_by_s: float,
    loss_scale: LossScaleOptions | None = None,
    options: StageOptions | None = None,
) -> Trace | None:
    """:func:`.training.train`, which looks at no weight before the end.

    Args:
        previews_always: as if nothing were ever clipped.
        late_by_s: every copy and update of the host begins up to so much later, at random.

    Every other step, from the first, waits for all previews before it says the update. In the others these race with
    it, as they do in use, and a busy machine may let none be in time.
    """

    def prepare(trainer: Trainer, rank: int) -> None:
        host = trainer._host
        if host is None:
            return
        if previews_always:
            host.__class__ = _AlwaysTrusting
        if late_by_s:
            _make_late(host, random.Random(rank), late_by_s)
        _wait_for_previews_in_turns(host)

    return train(
        rank,
        plan,
        num_steps,
        data_parallel,
        options,
        loss_scale=loss_scale,
        weights_at="the end",
        adam=adam,
        prepare=prepare,
    )


def _wait_for_previews_in_turns(host: Any) -> None:
    update, waits = host.update, itertools.cycle((True, False))

    def update_in_turns(updates: Any) -> None:
        if next(waits):
            copied = [bucket.copied.result() for bucket in host._buckets.values() if bucket.copied is not None]
            for each in copied:
                if each.previewed is not None:
                    each.previewed.result()
        update(updates)

    host.update = update_in_turns


def _make_late(host: Any, lateness: random.Random, late_by_s: float) -> None:
    copy, run = host._copies.copy, host._threads.run

    def late_copy(target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(late_by_s * lateness.random())
        copy(target, source)

    def late_run(task: Any, *, count: int) -> None:
        time.sleep(late_by_s * lateness.random())
        run(task, count=count)

    skip = host._skip

    def late_skip(bucket: Any) -> Any:
        time.sleep(late_by_s * lateness.random())
        return skip(bucket)

    host._copies.copy, host._threads.run, host._skip = late_copy, late_run, late_skip


def delay_copies(copies: Any, late_by_s: Callable[[], float]) -> None:
    """Let every copy of a trainer's host copies begin so many seconds later."""
    copy = copies.copy

    def late_copy(target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(late_by_s())
        copy(target, source)

    copies.copy = late_copy
