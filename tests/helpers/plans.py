"""Plans in few words.

plan(gpt2_model(), [
    replica(stage(layers=(0, 4), ranks=(0, 1), tp=2), stage(layers=(4, 6), ranks=(2,)), num_samples=6),
    replica(stage(layers=(0, 6), ranks=(3,)), num_samples=2),
])
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from hetero.plan.depths import enough_in_flight
from hetero.plan.ir import Plan, Precision, Recompute, Replica, Stage
from hetero.plan.validate import least_in_flight
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model, llama_model

_UNSET = -1
"""In-flight depth of a stage that ``replica`` gives one."""


def stage(
    *,
    layers: tuple[float, float],
    ranks: Sequence[int],
    tp: int = 1,
    dp: int = 1,
    mbs: int = 1,
    depth: int | None = None,
    sp: bool = False,
    device: str = "cpu",
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    delay: int | None = None,
) -> Stage:
    """Layers ``[first, end)``, where 2.5 is the cut between attention and MLP of layer 2; without ``depth``,
    :func:`replica` takes one more than the least legal one, if it has that many microbatches, and of interleaved stages
    the least."""
    return Stage(
        first_layer=math.floor(layers[0]),
        end_layer=math.floor(layers[1]),
        starts_with_mlp=layers[0] % 1 > 0,
        ends_with_attention=layers[1] % 1 > 0,
        ranks=tuple(ranks),
        device=device,
        tp=tp,
        dp=dp,
        sequence_parallel=sp,
        micro_batch_size=mbs,
        in_flight=_UNSET if depth is None else depth,
        recompute=recompute,
        recompute_num_layers=recompute_num_layers,
        wgrad_delay=delay,
    )


def replica(*stages: Stage, num_samples: int | None = None, schedule: str = "1f1b") -> Replica:
    """``num_samples`` is by default four of the largest microbatches."""
    if num_samples is None:
        num_samples = 4 * math.lcm(*(s.samples_per_microbatch for s in stages))
    filled = Replica(num_samples=num_samples, stages=stages, schedule=schedule)
    if filled.is_interleaved:
        return _with_enough_in_flight(filled)
    for s in reversed(range(len(stages))):
        if stages[s].in_flight == _UNSET:
            depth = min(least_in_flight(filled, s) + 1, filled.num_microbatches(s))
            filled = filled.with_stage(s, in_flight=depth)
    return filled


def _with_enough_in_flight(replica: Replica) -> Replica:
    """``replica``, whose stages are interleaved, with 1 where no depth is given, and as many more as it takes then."""
    if all(stage.in_flight != _UNSET for stage in replica.stages):
        return replica
    return deep_enough(replica.with_each_stage(in_flight=[max(stage.in_flight, 1) for stage in replica.stages]))


def deep_enough(replica: Replica) -> Replica:
    """``replica``, whose stages are interleaved, with deeper ones if it takes that to end."""
    depths = enough_in_flight(replica)
    return replica if depths is None else replica.with_each_stage(in_flight=depths)


def sharded(whole: Plan) -> Plan:
    """``whole`` with a distributed optimizer."""
    return dataclasses.replace(whole, distributed_optimizer=True)


def plan(
    model: ModelSpec,
    replicas: Sequence[Replica],
    *,
    seq_length: int = 16,
    global_batch_size: int | None = None,
    precision: Precision = "fp32",
    idle_ranks: Sequence[int] = (),
) -> Plan:
    """``global_batch_size`` is by default what the replicas add up to."""
    return Plan(
        model=model,
        seq_length=seq_length,
        global_batch_size=global_batch_size or sum(r.num_samples for r in replicas),
        precision=precision,
        replicas=tuple(replicas),
        idle_ranks=tuple(idle_ranks),
    )


def with_batch(plan: Plan, global_batch_size: int) -> Plan:
    """``plan`` with samples added to its last replica, whose stages' microbatches are whole multiples of 1 to 8."""
    last = len(plan.replicas) - 1
    num_samples = plan.replicas[last].num_samples + global_batch_size - plan.global_batch_size
    fuller = dataclasses.replace(plan.replicas[last], num_samples=num_samples)
    if fuller.is_interleaved:
        fuller = deep_enough(fuller)
    return dataclasses.replace(plan.with_replica(last, fuller), global_batch_size=global_batch_size)


def with_every_replica(plan: Plan, changed: Callable[[Replica], Replica]) -> Plan:
    """``plan`` with what ``changed`` makes of each of its replicas."""
    return plan.with_replicas({r: changed(each) for r, each in enumerate(plan.replicas)})


def with_shares(plan: Plan, shares: Iterable[int]) -> Plan:
    """``plan`` with ``shares`` of the optimizer, from the first again after the last; stages on the same ranks have one
    in common."""
    groups = dict.fromkeys(stage.ranks for _, _, stage in plan.stages())
    share_of = dict(zip(groups, itertools.cycle(shares), strict=False))
    return with_every_replica(
        plan, lambda each: each.with_each_stage(optimizer_share=[share_of[stage.ranks] for stage in each.stages])
    )


def with_unequal_shares(plan: Plan) -> Plan:
    """``plan`` with a share of the optimizer for each device group that is unlike all others'."""
    return with_shares(plan, itertools.count(1))


def uneven_plan(model: ModelSpec | None = None) -> Plan:
    """Two replicas on seven ranks, unlike in everything, and rank 7 idle."""
    return plan(
        model or gpt2_model(),
        [
            replica(
                stage(layers=(0, 3), ranks=(0, 1, 2, 3), tp=2, dp=2, mbs=1, sp=True),
                stage(layers=(3, 6), ranks=(4,), mbs=4),
                num_samples=8,
            ),
            replica(stage(layers=(0, 2), ranks=(5,)), stage(layers=(2, 6), ranks=(6,)), num_samples=4),
        ],
        idle_ranks=(7,),
    )


def two_unlike_replicas() -> Plan:
    """tp 2 before dp 2 before one rank, beside two stages that are cut elsewhere; ranks 0 and 7 idle."""
    first = replica(
        stage(layers=(0, 3), ranks=(3, 4), tp=2, mbs=2),
        stage(layers=(3, 5), ranks=(1, 2), dp=2),
        stage(layers=(5, 6), ranks=(5,), mbs=2),
        num_samples=4,
    )
    second = replica(stage(layers=(0, 2), ranks=(6,)), stage(layers=(2, 6), ranks=(8,)), num_samples=3)
    return plan(gpt2_model(), [first, second], idle_ranks=(7, 0))


def eight_unlike_replicas() -> Plan:
    """Of 1 to 8 stages with tp 1, 2, 4 and 8, cut at 20 places."""
    model = llama_model(
        num_layers=48,
        hidden_size=256,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=16,
        ffn_hidden_size=512,
    )
    weights_of_stages = (
        (8, (1,)),
        (4, (1, 1.3)),
        (4, (2, 1.3)),
        (2, (1, 1.1, 1.3, 0.7)),
        (1, (1, 1.1, 0.7, 0.4, 0.9, 0.35, 0.8, 0.5)),
        (2, (1, 1.7, 0.3, 0.7)),
        (8, (1,)),
        (1, (0.3, 0.5, 1, 0.2, 0.6, 0.45, 0.8, 1)),
    )
    replicas, rank = [], 0
    for tp, weights in weights_of_stages:
        cuts = [round(48 * sum(weights[:i]) / sum(weights)) for i in range(len(weights) + 1)]
        stages = []
        for cut in itertools.pairwise(cuts):
            stages.append(stage(layers=cut, ranks=range(rank, rank + tp), tp=tp))
            rank += tp
        replicas.append(replica(*stages, num_samples=8))
    return plan(model, replicas)
