"""Random plans on two to eight ranks, with everything that a plan can say, by a number."""

import dataclasses
import itertools
import random
from collections.abc import Sequence

from hetero.errors import PlanError, ScheduleError
from hetero.plan.depths import enough_in_flight
from hetero.plan.ir import GradientSyncPlan, Plan, Recompute, Replica, Stage
from hetero.plan.validate import validate
from hetero.runtime.options import DataParallelOptions
from hetero.schedule.orders import ORDERS
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import HALF
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.strategies import SIX_HEADS

MAX_RANKS = 8


def random_plan(number: int) -> tuple[Plan, DataParallelOptions]:
    """Plan ``number``, always the same one, and how it is launched.

    One to three replicas of one to four device groups, whose stages are mostly several; on two ranks at least.
    """
    rng = random.Random(number)
    while True:
        try:
            drawn = _drawn(rng)
            validate(drawn)
        except (PlanError, ScheduleError):
            continue
        return drawn, DataParallelOptions(
            bucket_numel=rng.choice([1, 100, 3000, 10**6]),
            overlap_grad_reduce=rng.random() < 0.7,
            overlap_param_gather=rng.random() < 0.5,
        )


def _drawn(rng: random.Random) -> Plan:
    model = _model(rng)
    degrees = _degrees(rng, model)
    num_ranks = sum(tp * dp for groups in degrees for tp, dp in groups)
    ranks = rng.sample(range(total := rng.randint(num_ranks, min(num_ranks + 1, MAX_RANKS))), total)
    replicas = []
    for groups in degrees:
        taken, ranks = ranks[: sum(tp * dp for tp, dp in groups)], ranks[sum(tp * dp for tp, dp in groups) :]
        replicas.append(_replica(rng, model, groups, taken))
    return dataclasses.replace(
        plan(model, replicas, seq_length=24, idle_ranks=tuple(ranks)),
        distributed_optimizer=rng.random() < 0.6,
        gradient_sync=_gradient_sync(rng, total),
    )


def _model(rng: random.Random) -> ModelSpec:
    family = rng.choice([gpt2_model, llama_model, moe_model])
    sizes = rng.choice([{}, SIX_HEADS])
    return family(num_layers=rng.randint(2, 6), tied_embeddings=rng.random() < 0.5, **sizes)


def _degrees(rng: random.Random, model: ModelSpec) -> list[list[tuple[int, int]]]:
    """Per replica, tp and dp of its device groups; two to eight ranks in all."""
    while True:
        degrees = [
            [
                (rng.choice([tp for tp in (1, 1, 2, 3, 4) if model.num_query_groups % tp == 0]), rng.choice([1, 1, 2]))
                for _ in range(rng.choice([1, 2, 2, 3, 4]))
            ]
            for _ in range(rng.choice([1, 1, 2, 2, 3]))
        ]
        if 2 <= sum(tp * dp for groups in degrees for tp, dp in groups) <= MAX_RANKS:
            return degrees


def _replica(rng: random.Random, model: ModelSpec, groups: Sequence[tuple[int, int]], ranks: Sequence[int]) -> Replica:
    step = rng.choice([1.0, 1.0, HALF])
    edges = [step * i for i in range(1, int(model.num_layers / step))]
    most = len(edges) + 1
    if len(groups) > most:
        raise PlanError("fewer layers than groups")
    num_stages = len(groups)
    if len(groups) > 1 and rng.random() < 0.6:
        num_stages = min(most, rng.randint(len(groups), 3 * len(groups)))
    layers = list(itertools.pairwise([0, *sorted(rng.sample(edges, num_stages - 1)), model.num_layers]))
    alike = []
    for tp, dp in groups:
        own, ranks = ranks[: tp * dp], ranks[tp * dp :]
        splits_sequence = rng.random() < 0.5 or (model.num_experts is not None and tp > 1)
        alike.append(
            dataclasses.replace(
                stage(
                    layers=(0, 1),
                    ranks=tuple(rank for d in range(dp) for rank in sorted(own[d * tp : (d + 1) * tp])),
                    tp=tp,
                    dp=dp,
                    mbs=rng.choice([1, 1, 2, 4]),
                    depth=1,
                    sp=splits_sequence,
                ),
                optimizer_share=rng.choice([1, 1, 3, 1000]),
            )
        )
    stages = [_stage(rng, alike[s % len(alike)], held) for s, held in enumerate(layers)]
    drawn = dataclasses.replace(
        replica(*stages, num_samples=8 * rng.choice([1, 1, 2])),
        schedule="1f1b" if rng.random() < 0.85 else rng.choice(list(ORDERS)),
    )
    least = enough_in_flight(drawn)
    if least is None:
        raise PlanError("it stands still at any depth")
    return drawn.with_each_stage(in_flight=[depth + rng.choice([0, 0, 1, 2]) for depth in least])


def _stage(rng: random.Random, of_group: Stage, held: tuple[float, float]) -> Stage:
    recompute: Recompute = rng.choice(["none", "none", "none", "selective", "full"])
    delay = rng.choice([None, None, None, 0, 1, 2])
    # A replayed forward would need what a split backward has put off.
    return dataclasses.replace(
        of_group.with_layers(*held), recompute=recompute, wgrad_delay=None if recompute == "full" else delay
    )


def _gradient_sync(rng: random.Random, num_ranks: int) -> GradientSyncPlan:
    bucket_numel = rng.choice([None, 1, 300, 1000])
    if rng.random() < 0.6:
        return GradientSyncPlan(bucket_numel=bucket_numel)
    where = [rng.randint(0, 3) for _ in range(num_ranks)]
    domains = tuple(tuple(rank for rank in range(num_ranks) if where[rank] == d) for d in sorted(set(where)))
    return GradientSyncPlan(domains=domains, bucket_numel=bucket_numel)
