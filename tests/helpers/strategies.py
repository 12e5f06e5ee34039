"""Random legal plans for property tests, as unlike as the validator allows.

Also in what they own: with shares of 1 beside 1000, and buckets of a few elements, some ranks own nothing of a bucket,
or nothing at all.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from hypothesis import assume
from hypothesis import strategies as st

from hetero.errors import PlanError
from hetero.plan.communicators import PlanCommunicators, max_communicators
from hetero.plan.ir import GradientSyncPlan, Plan, Replica, Stage
from hetero.plan.offload import Offload, block_positions
from hetero.plan.validate import least_in_flight, validate
from hetero.schedule.orders import ORDERS
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import HALF, stage_parameters
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import deep_enough, plan, replica, stage, with_every_replica

# Six query groups allow tp 2 beside tp 3, so that shard edges interleave instead of nesting.
SIX_HEADS = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_query_groups": 6,
    "kv_channels": 4,
    "ffn_hidden_size": 36,
    "padded_vocab_size": 66,
}


def models() -> st.SearchStrategy[ModelSpec]:
    """Every family; one to six layers; tied and untied; shards that nest (tp 1, 2, 4) or interleave (tp 2, 3, 6)."""
    return st.builds(
        lambda family, sizes, num_layers, tied: family(num_layers=num_layers, tied_embeddings=tied, **sizes),
        st.sampled_from([gpt2_model, llama_model, moe_model]),
        st.sampled_from([{}, SIX_HEADS]),
        st.integers(1, 6),
        st.booleans(),
    )


def _degrees(model: ModelSpec) -> st.SearchStrategy[int]:
    return st.sampled_from([tp for tp in (1, 2, 3, 4, 6) if model.num_query_groups % tp == 0])


@st.composite
def microbatch_sizes(draw: st.DrawFn, *, max_stages: int = 4) -> tuple[int, list[int]]:
    """``(num_samples, samples per microbatch of every stage)`` such that neighbours divide one another."""
    sizes = [draw(st.sampled_from([1, 2, 3, 4, 6]))]
    for _ in range(draw(st.integers(0, max_stages - 1))):
        sizes.append(draw(st.sampled_from([a for a in (1, 2, 3, 4, 6, 8) if a % sizes[-1] == 0 or sizes[-1] % a == 0])))
    num_samples = math.lcm(*sizes) * draw(st.sampled_from([1, 2, 5]))
    return num_samples, sizes


def with_random_in_flight(draw: st.DrawFn, deadlocking: Replica) -> Replica:
    """``deadlocking`` with legal depths: at every stage the least one or up to two more, or of interleaved stages those
    that were drawn, with as many more as it takes.
    """
    legal = deadlocking
    for s in reversed(range(len(legal.stages))):
        least = 1 if legal.is_interleaved else least_in_flight(legal, s)
        legal = legal.with_stage(s, in_flight=least + draw(st.integers(0, 2)))
    return deep_enough(legal) if legal.is_interleaved else legal


def orders() -> st.SearchStrategy[str]:
    """Mostly 1F1B."""
    return st.sampled_from(["1f1b", "1f1b", *ORDERS])


@st.composite
def pipelines(draw: st.DrawFn) -> Replica:
    """One replica of stages on one rank each, with random microbatches and legal depths."""
    num_samples, sizes = draw(microbatch_sizes())
    stages = [stage(layers=(s, s + 1), ranks=(s,), mbs=size, depth=1) for s, size in enumerate(sizes)]
    return with_random_in_flight(draw, replica(*stages, num_samples=num_samples))


@st.composite
def layer_cuts(draw: st.DrawFn, num_layers: int, *, max_size: int | None = None) -> list[float]:
    """Where stages may end, in ascending order: between layers, or there and between attention and MLP as well."""
    step = draw(st.sampled_from([1, HALF]))
    inner = [step * i for i in range(1, int(num_layers / step))]
    return sorted(draw(st.sets(st.sampled_from(inner), max_size=max_size))) if inner else []


@st.composite
def interleaved_pipelines(draw: st.DrawFn) -> Replica:
    """One replica of two or three ranks with two or three stages each; the last ones may lack the last stage."""
    num_groups = draw(st.integers(2, 3))
    sizes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=num_groups, max_size=num_groups))
    num_stages = draw(st.integers(num_groups + 1, 3 * num_groups))
    stages = [
        stage(layers=(s, s + 1), ranks=(s % num_groups,), mbs=sizes[s % num_groups], depth=1) for s in range(num_stages)
    ]
    num_samples = max(sizes) * draw(st.integers(1, 5))
    return with_random_in_flight(draw, replica(*stages, num_samples=num_samples))


def _split(draw: st.DrawFn, whole: Replica) -> Replica:
    delays = st.one_of(st.none(), st.integers(0, 5))
    return whole.with_each_stage(wgrad_delay=[draw(delays) for _ in whole.stages])


@st.composite
def split_pipelines(draw: st.DrawFn) -> Replica:
    """:func:`pipelines` of which some stages or all part their backward."""
    return _split(draw, draw(pipelines()))


@st.composite
def step_replicas(draw: st.DrawFn) -> Replica:
    """Plain and interleaved pipelines in any order of compute, some or all of whose stages part their backward."""
    drawn = _split(draw, draw(st.one_of(pipelines(), interleaved_pipelines())))
    return dataclasses.replace(drawn, schedule=draw(orders()))


@dataclasses.dataclass(frozen=True)
class _Group:
    """What the stages of a device group have in common."""

    ranks: tuple[int, ...]
    tp: int
    dp: int
    mbs: int
    sp: bool
    optimizer_share: int


def _num_groups(draw: st.DrawFn, model: ModelSpec, num_stages: int) -> int:
    """As many as there are stages, or fewer that take turns. First and last stage of a tied model sit apart."""
    fewer = [n for n in range(2, num_stages) if not model.tied_embeddings or (num_stages - 1) % n]
    return draw(st.sampled_from([num_stages, num_stages, *fewer]))


@st.composite
def legal_plans(draw: st.DrawFn, of: st.SearchStrategy[ModelSpec] | None = None) -> Plan:
    """One to three replicas that differ in everything, half layers, interleaved stages and orders of compute included,
    on shuffled ranks, with idle ones.

    Of any model, unless ``of`` says which.
    """
    model = draw(models() if of is None else of)
    degrees = []  # Per replica: layers of its stages; tp, dp of its groups. Ranks are dealt when their number is known.
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(layer_cuts(model.num_layers, max_size=3))
        layers = list(itertools.pairwise([0, *cuts, model.num_layers]))
        num_groups = _num_groups(draw, model, len(layers))
        degrees.append((layers, [(draw(_degrees(model)), draw(st.integers(1, 2))) for _ in range(num_groups)]))

    num_working = sum(tp * dp for _, groups in degrees for tp, dp in groups)
    num_idle = draw(st.integers(0, 2))
    ranks = draw(st.permutations(range(num_working + num_idle)))
    replicas = []
    for layers, sizes in degrees:
        groups = []
        for tp, dp in sizes:
            mine, ranks = ranks[: tp * dp], ranks[tp * dp :]
            groups.append(_drawn_group(draw, model, mine, tp=tp, dp=dp))
        stages = [_stage_on(groups[s % len(groups)], held) for s, held in enumerate(layers)]
        drawn = dataclasses.replace(replica(*stages, num_samples=8 * draw(st.integers(1, 3))), schedule=draw(orders()))
        replicas.append(with_random_in_flight(draw, drawn))
    made = plan(model, replicas, seq_length=24, idle_ranks=ranks)
    assume(_has_few_communicators(made))
    return made


def _has_few_communicators(made: Plan) -> bool:
    return max(PlanCommunicators(made).counts().values()) <= max_communicators(made)


def _drawn_group(draw: st.DrawFn, model: ModelSpec, ranks: Sequence[int], *, tp: int, dp: int) -> _Group:
    return _Group(
        ranks=tuple(rank for d in range(dp) for rank in sorted(ranks[d * tp : (d + 1) * tp])),
        tp=tp,
        dp=dp,
        mbs=draw(st.sampled_from([1, 2, 4])),
        sp=draw(st.booleans()) or (model.num_experts is not None and tp > 1),
        optimizer_share=draw(st.sampled_from([1, 1, 3, 1000])),
    )


def _stage_on(group: _Group, layers: tuple[float, float]) -> Stage:
    drawn = stage(layers=layers, ranks=group.ranks, tp=group.tp, dp=group.dp, mbs=group.mbs, depth=1, sp=group.sp)
    return dataclasses.replace(drawn, optimizer_share=group.optimizer_share)


@st.composite
def plans_with_domains(draw: st.DrawFn, of: st.SearchStrategy[ModelSpec] | None = None) -> Plan:
    """:func:`legal_plans` whose ranks lie in up to four domains, with buckets of any size."""
    legal = draw(legal_plans(of))
    where = {rank: draw(st.integers(0, 3)) for rank in range(legal.world_size)}
    domains = tuple(tuple(rank for rank in where if where[rank] == d) for d in sorted(set(where.values())))
    sync = GradientSyncPlan(domains=domains, bucket_numel=draw(st.sampled_from([None, 1, 300, 1000])))
    made = dataclasses.replace(legal, gradient_sync=sync)
    assume(_has_few_communicators(made))
    return made


@st.composite
def trainable_plans(draw: st.DrawFn, *, max_ranks: int, of: st.SearchStrategy[ModelSpec] | None = None) -> Plan:
    """All that a plan can say, on few enough ranks to be trained: domains, split backwards, recomputation, shards."""
    legal = draw(st.one_of(legal_plans(of), plans_with_domains(of)).filter(lambda plan: plan.world_size <= max_ranks))
    delays, recomputes = st.one_of(st.none(), st.integers(0, 2)), st.sampled_from(["none", "none", "selective", "full"])

    def drawn(each: Replica) -> Replica:
        pairs = [(draw(delays), draw(recomputes)) for _ in each.stages]
        return each.with_each_stage(
            wgrad_delay=[delay for delay, _ in pairs], recompute=[recompute for _, recompute in pairs]
        )

    legal = with_every_replica(legal, drawn)
    return dataclasses.replace(legal, distributed_optimizer=draw(st.sampled_from([True, True, False])))


@st.composite
def offloaded_plans(draw: st.DrawFn, of: st.SearchStrategy[Plan] | None = None) -> Plan:
    """Plans with a distributed optimizer, of :func:`legal_plans` unless ``of`` says which, of whose stages some leave
    what they update, gradients of it, weights of these, and activations, to their hosts."""
    legal = dataclasses.replace(draw(legal_plans() if of is None else of), distributed_optimizer=True)

    def drawn(each: Replica) -> Replica:
        speculate = draw(st.booleans())
        firsts = [draw(st.none() | st.sampled_from(positions_in(stage, legal.model))) for stage in each.stages]
        lasts = [
            draw(st.none() | st.sampled_from(block_positions(stage, num_layers=legal.model.num_layers)))
            if stage.wgrad_delay is None
            else None
            for stage in each.stages
        ]
        added = [
            draw(st.none() | st.sampled_from([p for p in positions_in(stage, legal.model) if p >= first]))
            if first is not None and stage.wgrad_delay is None
            else None
            for stage, first in zip(each.stages, firsts, strict=True)
        ]
        kept = [
            draw(st.none() | st.sampled_from([p for p in positions_in(stage, legal.model) if p >= adds]))
            if adds is not None
            else None
            for stage, adds in zip(each.stages, added, strict=True)
        ]
        return each.with_each_stage(
            offload=[
                Offload(
                    optimizer_from=first,
                    gradients_from=adds,
                    weights_from=keeps,
                    speculate=speculate and first is not None,
                    activations_until=last,
                )
                for first, adds, keeps, last in zip(firsts, added, kept, lasts, strict=True)
            ]
        )

    return with_every_replica(legal, drawn)


def positions_in(stage: Stage, model: ModelSpec) -> list[float]:
    """Where ``stage`` holds parameters."""
    held = stage_parameters(model, first_layer=stage.start, end_layer=stage.end)
    # The other copy of a tied embedding lies in the head here.
    return sorted({each.position for each in held if each.position >= 0 or stage.start == 0})


def is_legal(drawn: Plan) -> bool:
    """What was drawn apart need not go together, such as experts and some recomputations."""
    try:
        validate(drawn)
    except PlanError:
        return False
    return True


@st.composite
def split_legal_plans(draw: st.DrawFn) -> Plan:
    """:func:`legal_plans` of which some stages part their backward."""
    return with_every_replica(draw(legal_plans()), functools.partial(_split, draw))
