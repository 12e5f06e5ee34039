"""Counts which ranks sum how many gradient elements: the sizes of the buckets of :mod:`.gradient_groups`.

A gradient group, the ranks that sum a parameter together, determines which stages hold that parameter, and these hold
the same consecutive parameters. So a group's buckets follow from these parameters' sizes, and groups with the same
share of them have buckets of the same sizes. Layers are alike: a bucket is looked for in running sums over one layer's
parameters. So a plan of thousands of ranks is counted without a look at each parameter of each rank.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from hetero.cost.layers.parameter_counts import ParameterCounts, TpSharding
from hetero.plan.gradient_holders import PlacedStage, groups_of_shards, holder_runs
from hetero.plan.ir import Plan, Ranks, Stage
from hetero.plan.offload import (
    HeldLayers,
    OnHost,
    changes_of_residency,
    gradients_on_host,
    hosts_update,
    place_of,
    stages_of_ranks,
    weights_on_host,
)
from hetero.plan.sync_domains import Domains
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import HALF
from hetero.spec.profile import ModuleKind

MOST_KEPT = 1 << 12
"""Runs of parameters whose sums are kept: plans that are looked at one after the other have most of theirs in common. A
heuristic."""

RunningSums = tuple[tuple[float, tuple[int, ...]], ...]
"""(position, running sums of the elements of its parameters), from the head to the embedding."""


class CountedBucket(NamedTuple):
    """Gradients that are summed together.

    ranks: in ascending order; more than one.
    numel: elements, without what the runtime adds to align segments and shards, at most
        :data:`~hetero.plan.gradient_groups.ALIGNMENT` for each of either.
    position: the lowest layer in it; -1 is the embedding, half a layer more than a layer its MLP, the number of layers
        the head.
    domains: the ranks by domain, where they sum hierarchically; otherwise empty.
    """

    ranks: Ranks
    numel: int
    position: float
    domains: tuple[Ranks, ...] = ()


class OwnedParameters(NamedTuple):
    """Elements whose optimizer state a rank owns, by where it has the state.

    added: of those ``on_host``, elements whose gradients add up there.
    kept: of these, elements whose weights live there.
    """

    on_device: float = 0.0
    on_host: float = 0.0
    added: float = 0.0
    kept: float = 0.0

    @property
    def numel(self) -> float:
        return self.on_device + self.on_host


@dataclass(frozen=True, slots=True)
class _AlikeGroups:
    """Gradient groups that sum equal numbers of elements of the same parameters.

    groups: the ranks of each, in ascending order.
    share: how many of how many equal parts of every parameter each group sums.
    sums: of the whole parameters.
    closing: positions at which no bucket goes on that began above (:func:`.offload.changes_of_residency`).
    """

    groups: tuple[Ranks, ...]
    share: tuple[int, int]
    sums: RunningSums
    closing: frozenset[float]

    @property
    def numel(self) -> int:
        """Elements that each group sums."""
        return self.share_of(sum(sums[-1] for _, sums in self.sums))

    def buckets(self, bucket_numel: int) -> Iterator[tuple[float, int]]:
        """(position, elements) of the buckets of each group.

        The parameter that makes ``bucket_numel`` full is the last of its bucket. A parameter's segments of one group
        stay together.
        """
        parts, cells = self.share
        full = -(-bucket_numel * cells // parts)
        filled, position = 0, 0.0
        for next_position, sums in self.sums:
            if filled and next_position in self.closing:
                yield position, self.share_of(filled)
                filled = 0
            position = next_position
            # Running sums count from the start of this position, ``filled`` from the last bucket's end.
            while (last := bisect_left(sums, full - filled)) < len(sums):
                yield position, self.share_of(filled + sums[last])
                filled = -sums[last]
            filled += sums[-1]
        if filled:
            yield position, self.share_of(filled)

    def share_of(self, numel: int) -> int:
        """What each group sums of ``numel`` elements."""
        parts, cells = self.share
        return numel * parts // cells


def sync_buckets(plan: Plan, *, bucket_numel: int) -> tuple[CountedBucket, ...]:
    """The buckets that more than one rank holds, in the order in which all ranks launch them.

    They are those of :func:`hetero.plan.gradient_groups.gradient_buckets`.
    """
    domains = Domains(plan.gradient_sync.domains)
    found = []
    for alike in _alike_groups(plan):
        buckets = list(alike.buckets(bucket_numel))
        found += [(not domains.spans(ranks), ranks, buckets) for ranks in alike.groups if len(ranks) > 1]
    ordered = []
    for _, ranks, buckets in sorted(found, key=lambda each: each[:2]):
        by_domain = domains.parts(ranks)
        ordered += [CountedBucket(ranks, numel, position, by_domain) for position, numel in buckets]
    # Groups stay in order where positions are the same.
    return tuple(sorted(ordered, key=lambda bucket: -bucket.position))


def buckets_of_one_rank(plan: Plan, *, bucket_numel: int) -> Iterator[CountedBucket]:
    """The buckets that one rank holds alone, which nobody sums."""
    for alike in _alike_groups(plan):
        alone = [ranks for ranks in alike.groups if len(ranks) == 1]
        for position, numel in alike.buckets(bucket_numel) if alone else ():
            yield from (CountedBucket(ranks, numel, position) for ranks in alone)


def owned_parameters(plan: Plan) -> dict[int, dict[int, OwnedParameters]]:
    """The elements whose optimizer state each rank owns: of what it holds, its share among all that hold the same.

    Returns:
        By rank, and by the stages of its replica that it holds.
    """
    weight = {rank: stage.optimizer_share for _, _, stage in plan.stages() for rank in stage.ranks}
    held_by = stages_of_ranks([(stage.ranks, stage) for _, _, stage in plan.stages()])
    numbers: dict[int, list[int]] = {rank: [] for rank in weight}
    for _, s, stage in plan.stages():
        for rank in stage.ranks:
            numbers[rank].append(s)
    owned = {rank: dict.fromkeys(of_rank, OwnedParameters()) for rank, of_rank in numbers.items()}
    for alike in _alike_groups(plan):
        for ranks in alike.groups:
            per_share = 1.0 / sum(weight[rank] for rank in ranks)
            for rank in ranks:
                for index, numel, left in _by_stage(alike, held_by[rank]):
                    s, part = numbers[rank][index], numel * per_share * weight[rank]
                    so_far = owned[rank][s]
                    owned[rank][s] = OwnedParameters(
                        so_far.on_device + part * (left == OnHost.NOTHING),
                        so_far.on_host + part * (left >= OnHost.OPTIMIZER),
                        so_far.added + part * (left >= OnHost.GRADIENTS),
                        so_far.kept + part * (left >= OnHost.WEIGHTS),
                    )
    return owned


def _by_stage(alike: _AlikeGroups, stages: Sequence[HeldLayers]) -> Iterator[tuple[int, int, OnHost]]:
    """What a rank of the groups sums, by which of its ``stages`` holds it and what of that it leaves to its host."""
    if len(stages) == 1 and not hosts_update(stages):
        yield 0, alike.numel, OnHost.NOTHING
        return
    summed: dict[tuple[int, OnHost], int] = defaultdict(int)
    for position, sums in alike.sums:
        index, here = place_of(position, stages)
        summed[index, stages[index].offload.left_at(here)] += alike.share_of(sums[-1])
    for (index, left), numel in summed.items():
        yield index, numel, left


class HeldTwice(NamedTuple):
    """Elements of weights that a rank holds twice, and of how many the gradients are on the host, and the weights."""

    numel: int = 0
    on_host: int = 0
    kept: int = 0


def parameters_held_twice(plan: Plan) -> dict[tuple[int, int], HeldTwice]:
    """By replica and stage, the elements on one rank of parameters that the shard edges of other holders cut.

    Their segments go to several buckets, so that the runtime holds weight and gradient a second time in its own order.
    """
    found = {(r, s): HeldTwice() for r, s, _ in plan.stages()}
    if len({stage.tp for _, _, stage in plan.stages()}) == 1:
        return found
    for holders, sums_by_sharding in _runs(plan):
        cells = math.lcm(*{stage.tp for _, _, stage in holders})
        sharded = sums_by_sharding["sharded"]
        numel = sum(sums[-1] for _, sums in sharded)
        for r, s, stage in holders:
            if stage.tp < cells:
                on_host = sum(sums[-1] for position, sums in sharded if gradients_on_host(position, [stage]))
                kept = sum(sums[-1] for position, sums in sharded if weights_on_host(position, [stage]))
                more = HeldTwice(*(each // stage.tp for each in (numel, on_host, kept)))
                found[r, s] = HeldTwice(*map(sum, zip(found[r, s], more, strict=True)))
    return found


def _alike_groups(plan: Plan) -> Iterator[_AlikeGroups]:
    """Every gradient group, once."""
    held_by = stages_of_ranks([(stage.ranks, stage) for _, _, stage in plan.stages()])
    for stages, sums in _by_device_groups(plan):
        holders = [held_by[stage.ranks[0]] for stage in stages]
        closing = {
            key: frozenset(changes_of_residency([position for position, _ in of_key], holders))
            for key, of_key in sums.items()
        }
        all_ranks = tuple(sorted(rank for stage in stages for rank in stage.ranks))
        if all(stage.tp == 1 for stage in stages):
            yield _AlikeGroups((all_ranks,), (1, 1), sums["all"], closing["all"])
            continue
        if sums["replicated"]:
            yield _AlikeGroups((all_ranks,), (1, 1), sums["replicated"], closing["replicated"])
        by_share: dict[tuple[int, int], list[Ranks]] = defaultdict(list)
        for share, ranks in groups_of_shards(stages):
            by_share[share].append(ranks)
        if sums["sharded"]:
            yield from (
                _AlikeGroups(tuple(groups), share, sums["sharded"], closing["sharded"])
                for share, groups in by_share.items()
            )


def _by_device_groups(plan: Plan) -> Iterator[tuple[list[Stage], Mapping[TpSharding, RunningSums]]]:
    """As :func:`_runs`, with what the same ranks hold in several stages together."""
    found: dict[tuple[Ranks, ...], tuple[list[Stage], list[Mapping[TpSharding, RunningSums]]]] = {}
    for holders, sums in _runs(plan):
        stages = [stage for _, _, stage in holders]
        found.setdefault(tuple(stage.ranks for stage in stages), (stages, []))[1].append(sums)
    for stages, runs in found.values():
        if len(runs) == 1:
            yield stages, runs[0]
            continue
        yield stages, {key: tuple(chain.from_iterable(sums[key] for sums in reversed(runs))) for key in runs[0]}


def _runs(plan: Plan) -> Iterator[tuple[list[PlacedStage], Mapping[TpSharding, RunningSums]]]:
    """Runs of consecutive parameters that the same stages hold, with these stages."""
    model, is_tied = plan.model, False
    for run in holder_runs(plan):
        if run.is_tied_embedding:
            is_tied = True
            word_embedding = _sums_between(model, run.first, run.end)["sharded"]
            yield list(run.holders), {"sharded": word_embedding, "replicated": (), "all": word_embedding}
            continue
        yield list(run.holders), _sums_between(model, run.first, run.end, with_word_embedding=not is_tied)


@lru_cache(maxsize=MOST_KEPT)
def _sums_between(
    model: ModelSpec, first: float, end: float, *, with_word_embedding: bool = True
) -> Mapping[TpSharding, RunningSums]:
    """Of the parameters in ``[first, end)``."""
    table = ParameterCounts(model).running_sums()
    if not with_word_embedding:
        table["sharded"]["embedding"], table["all"]["embedding"] = (), table["replicated"]["embedding"]
    modules = [(position, kind) for position, kind in _module_positions(model) if first <= position < end]
    return {
        key: tuple((position, sums[kind]) for position, kind in modules if sums[kind]) for key, sums in table.items()
    }


def _module_positions(model: ModelSpec) -> Iterator[tuple[float, ModuleKind]]:
    """Modules with their positions, from the head to the embedding."""
    yield model.num_layers, "head"
    for layer in reversed(range(model.num_layers)):
        yield layer + HALF, "mlp"
        yield layer, "attention"
    yield -1, "embedding"
