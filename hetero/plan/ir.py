"""The plan: what the planner returns, a person may write, and the runtime executes.

    Plan
      Replica          one pipeline over all layers, and its share of the global batch
        Stage          consecutive layers on dp x tp ranks of one device type

Several stages of a replica may sit on the same ranks, its *device group*, which then interleaves them.

Replicas may differ in everything; stages of one replica in ranks, tp, dp, micro_batch_size and depth. A plan is
data: it holds no process group and no tensor, compares by value, and its JSON form is the file that
``--hetero-plan`` reads.

Samples keep one global order under every plan. A replica takes a contiguous block of the global batch, each
microbatch of a stage a contiguous block of that, and each data-parallel rank a contiguous block of the microbatch.

Whoever edits a plan does so by the methods ``with_...`` here: each returns a new one, and leaves it to
:mod:`hetero.plan.validate` to say whether that is legal.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from hetero.format_versions import FormatUpgrades, renamed_key
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.plan.provenance import PlanProvenance
from hetero.schedule.orders import BY_DEPTHS
from hetero.serialization import STRICT
from hetero.spec.devices import DeviceCatalogue, DeviceType
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import HALF
from hetero.spec.shipped_devices import shipped_and

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full"]

Ranks = tuple[int, ...]
"""A set of ranks, in the order that whoever has it says."""

StageKey = tuple[int, int]
"""A stage of a plan: the index of its replica, and its own in that replica."""

DEFAULT_DROPOUT = 0.1
"""Megatron-LM's default of ``--hidden-dropout`` and ``--attention-dropout``: what a plan that leaves them to the launch
is taken to have where its memory is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Layers ``[first_layer, end_layer)`` on ``dp`` groups of ``tp`` ranks.

    The stage that starts at layer 0 also holds the embedding, the one that ends at the last layer the head. A layer's
    attention and its MLP may fall on two neighbouring stages: then ``ends_with_attention`` of the first and
    ``starts_with_mlp`` of the second are true, and the layer is ``end_layer`` of the first, ``first_layer`` of the
    second. A stage may hold no more than one such half.

    first_layer, end_layer: the first of its layers, counted from 0, and the one behind its last.
    starts_with_mlp: of layer ``first_layer`` the stage has only the MLP, with the norm before it.
    ends_with_attention: of layer ``end_layer`` the stage has the attention, with the norm before it.
    ranks: data-parallel major, so that ranks ``[d * tp, (d + 1) * tp)`` of the tuple are one tensor-parallel group,
        in ascending order.
    device: the device type that every rank must turn out to have.
    tp: ranks of a tensor-parallel group, which cut every layer among them.
    dp: tensor-parallel groups, each of which computes its part of every microbatch.
    sequence_parallel: activations between layers are cut along the sequence among the ranks of a tensor-parallel group.
    micro_batch_size: samples per data-parallel rank and microbatch.
    in_flight: microbatches of this stage between forward and backward, at most. Those of stages on the same ranks add
        up: together they hold no more than the sum, of whichever stage the interleaved order has.
    recompute, recompute_num_layers: what the backward computes again instead of keeping; ``full`` does so for the first
        ``recompute_num_layers`` of the stage's ``layer_numbers``, all of them if that is ``None``. Half a layer counts
        as one there.
    wgrad_delay: ``None`` if a backward computes the gradients of input and weights together. k >= 0 if it computes the
        input's alone and sends it on; the weights' gradients of microbatch m then follow the backward of microbatch
        m + k (zero bubble, arXiv 2401.10241), and up to k microbatches beside those in flight wait for theirs.
    fp8: its linear layers multiply in fp8 (TransformerEngine); weights and all else stay in the plan's precision, which
        is bf16 then (:mod:`hetero.plan.device_rules`).
    optimizer_share: how much of the optimizer state that it shares with other ranks a rank of this stage takes, as a
        weight beside theirs; for devices with more memory to spare than others. Without the plan's
        ``distributed_optimizer`` nothing is shared, and it says nothing.
    offload: what of it lives in the memory of the host.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    first_layer: int
    end_layer: int
    starts_with_mlp: bool = False
    ends_with_attention: bool = False
    ranks: tuple[int, ...]
    device: str
    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    micro_batch_size: int
    in_flight: int
    recompute: Recompute = "none"
    recompute_num_layers: int | None = None
    wgrad_delay: int | None = None
    fp8: bool = False
    optimizer_share: int = 1
    offload: Offload = NOTHING_ON_HOST

    @property
    def start(self) -> float:
        """Where the stage begins, in layers: 2.5 lies between the attention and the MLP of layer 2."""
        return self.first_layer + HALF * self.starts_with_mlp

    @property
    def end(self) -> float:
        """Where the stage ends, in layers as :attr:`start`."""
        return self.end_layer + HALF * self.ends_with_attention

    @property
    def num_layers(self) -> float:
        """Layers that the stage holds, half of one as 0.5."""
        return self.end - self.start

    @property
    def layer_numbers(self) -> range:
        """The layers of which the stage holds at least a half."""
        return range(self.first_layer, self.end_layer + self.ends_with_attention)

    def with_layers(self, start: float, end: float) -> "Stage":
        """The same stage with layers ``[start, end)``, of which it recomputes no more than there are."""
        moved = dataclasses.replace(
            self,
            first_layer=int(start),
            end_layer=int(end),
            starts_with_mlp=start % 1 > 0,
            ends_with_attention=end % 1 > 0,
            offload=self.offload.within(start, end, before=self.end),
        )
        if moved.recompute_num_layers is None:
            return moved
        count = min(moved.recompute_num_layers, len(moved.layer_numbers))
        return dataclasses.replace(moved, recompute_num_layers=count)

    @property
    def samples_per_microbatch(self) -> int:
        """Samples of one microbatch over all data-parallel ranks of the stage."""
        return self.micro_batch_size * self.dp

    @property
    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """The tensor-parallel groups, one per data-parallel rank."""
        return tuple(self.ranks[d * self.tp : (d + 1) * self.tp] for d in range(self.dp))

    @property
    def splits_sequence(self) -> bool:
        """Activations between layers are cut along the sequence instead of being repeated on every tp rank."""
        return self.sequence_parallel and self.tp > 1


_BESIDE_RANKS = operator.attrgetter(*(field.name for field in dataclasses.fields(Stage) if field.name != "ranks"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One pipeline: stages in layer order, and ``num_samples`` of every global batch.

    num_samples: its share of every global batch.
    schedule: the order of forwards and backwards, a name in :data:`hetero.schedule.orders.ORDERS`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    num_samples: int
    stages: tuple[Stage, ...]
    schedule: str = BY_DEPTHS

    @property
    def device_groups(self) -> tuple[tuple[int, ...], ...]:
        """The stages that the same ranks hold, in the order of the first of each; mostly one by one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for s, stage in enumerate(self.stages):
            groups.setdefault(stage.ranks, []).append(s)
        return tuple(map(tuple, groups.values()))

    def group_of(self, stage: int) -> tuple[int, ...]:
        """The stages that the ranks of ``stage`` hold, itself among them."""
        return next(group for group in self.device_groups if stage in group)

    @property
    def is_interleaved(self) -> bool:
        """Some ranks hold several stages."""
        return len(self.device_groups) < len(self.stages)

    @property
    def shape(self) -> "Replica":
        """The same on the ranks 0, 1, ..."""
        first: dict[tuple[int, ...], int] = {}
        for stage in self.stages:
            first.setdefault(stage.ranks, sum(map(len, first)))
        stages = (
            dataclasses.replace(stage, ranks=tuple(range(first[stage.ranks], first[stage.ranks] + len(stage.ranks))))
            for stage in self.stages
        )
        return dataclasses.replace(self, stages=tuple(stages))

    @property
    def kind(self) -> Hashable:
        """Equal for replicas that differ in their ranks only."""
        groups: dict[tuple[int, ...], int] = {}
        stages = [
            (groups.setdefault(stage.ranks, len(groups)), len(stage.ranks), _BESIDE_RANKS(stage))
            for stage in self.stages
        ]
        return self.num_samples, self.schedule, tuple(stages)

    def num_microbatches(self, stage: int) -> int:
        """Microbatches that ``stage`` counts in one step."""
        return self.num_samples // self.stages[stage].samples_per_microbatch

    @property
    def microbatch_counts(self) -> tuple[int, ...]:
        """Microbatches that each stage counts in one step."""
        return tuple(map(self.num_microbatches, range(len(self.stages))))

    def with_stages(self, stages: Iterable[Stage]) -> "Replica":
        """The same pipeline with other stages."""
        return dataclasses.replace(self, stages=tuple(stages))

    def with_stage(self, stage: int, **fields: Any) -> "Replica":
        """The same with these ``fields`` of one stage, such as ``in_flight=3``."""
        changed = dataclasses.replace(self.stages[stage], **fields)
        return self.with_stages((*self.stages[:stage], changed, *self.stages[stage + 1 :]))

    def with_each_stage(self, **fields: Sequence[Any]) -> "Replica":
        """The same with these ``fields`` of all stages, a value for each stage, such as ``in_flight=[3, 2, 1]``."""
        rows = zip(*fields.values(), strict=True)
        changed = (
            dataclasses.replace(stage, **dict(zip(fields, row, strict=True)))
            for stage, row in zip(self.stages, rows, strict=True)
        )
        return self.with_stages(changed)

    def with_layers_moved(self, source: int, target: int, num_layers: float) -> "Replica":
        """The same with so many layers fewer on stage ``source`` and more on ``target``, halves of layers included.

        Stages between the two keep as many as they have, and begin and end earlier or later.
        """
        held = [
            stage.num_layers - num_layers * (s == source) + num_layers * (s == target)
            for s, stage in enumerate(self.stages)
        ]
        edges = itertools.pairwise(itertools.accumulate(held, initial=0.0))
        return self.with_stages(stage.with_layers(*edge) for stage, edge in zip(self.stages, edges, strict=True))

    def on_ranks_of(self, other: "Replica") -> "Replica":
        """The same stages on the ranks of ``other``, which has as many stages of the same sizes."""
        return self.with_each_stage(ranks=[stage.ranks for stage in other.stages])


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientSyncPlan:
    """How gradients are summed, as far as it depends on the links.

    domains: disjoint sets of ranks with fast links inside, such as the nodes or the zones; every working rank is in one
        if there are any. A bucket whose holders lie in several, and at least two of them in one, is summed inside the
        domains first and once between them (:mod:`.sync_domains`). Of the buckets of one layer, those that leave
        a domain go first.
    bucket_numel: gradient elements that are summed by one collective, about; ``None`` for the launch's own value.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    domains: tuple[tuple[int, ...], ...] = ()
    bucket_numel: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank sits in a plan: indices of its replica, stage, data-parallel and tensor-parallel position.

    A rank of a device group with several stages has one for each, which differ in the stage alone.
    """

    replica: int
    stage: int
    dp_rank: int
    tp_rank: int


def _from_version_1(plan: dict[str, Any]) -> dict[str, Any]:
    """Version 1 called a stage's ``wgrad_delay`` its ``weight_lag``."""
    try:
        replicas = [
            {**replica, "stages": [renamed_key(stage, "weight_lag", "wgrad_delay") for stage in replica["stages"]]}
            for replica in plan["replicas"]
        ]
    except (AttributeError, KeyError, TypeError):
        return plan  # No plan of any version; the check of types says where.
    return {**plan, "replicas": replicas}


def _from_version_2(plan: dict[str, Any]) -> dict[str, Any]:
    """Version 2 had neither stages in fp8 nor descriptions of devices, which are absent by default."""
    return plan


def _from_version_3(plan: dict[str, Any]) -> dict[str, Any]:
    """Version 3 said nothing of dropout, which was the launch's own, as it is by default."""
    return plan


def _from_version_4(plan: dict[str, Any]) -> dict[str, Any]:
    """Version 4 had nothing on hosts and did not say where a plan comes from, as is so by default."""
    return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole assignment of a model and a global batch to ranks.

    seq_length: tokens of a sample.
    global_batch_size: samples of a step, over all replicas.
    precision: of weights and activations; in bf16 and fp16 master weights, moments and gradients are in fp32.
    distributed_optimizer: master weights and moments are shared among all ranks that hold the same weights (ZeRO-1,
        arXiv 1910.02054), in any replica; otherwise each of them has the whole of them.
    hidden_dropout, attention_dropout: shares that a launch has to drop, since what is kept of a microbatch depends on
        them; ``None`` for the launch's own, whatever they are.
    devices: descriptions of the device types of its stages that do not ship.
    idle_ranks: belong to the launch and to no stage: they hold nothing and join world-wide collectives only.
    provenance: where the plan comes from, ``None`` if nobody said. It is no part of what the plan does, so that two
        plans with nothing but another one are equal.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    format_version: Literal[5] = 5
    __format_upgrades__: ClassVar[FormatUpgrades] = {
        1: _from_version_1,
        2: _from_version_2,
        3: _from_version_3,
        4: _from_version_4,
    }

    model: ModelSpec
    seq_length: int
    global_batch_size: int
    precision: Precision = "fp32"
    distributed_optimizer: bool = False
    hidden_dropout: float | None = None
    attention_dropout: float | None = None
    devices: tuple[DeviceType, ...] = ()
    replicas: tuple[Replica, ...]
    idle_ranks: tuple[int, ...] = ()
    gradient_sync: GradientSyncPlan = GradientSyncPlan()
    provenance: PlanProvenance | None = dataclasses.field(default=None, compare=False)

    @property
    def device_types(self) -> DeviceCatalogue:
        """The device types that its stages may name: those that ship, and its own."""
        return shipped_and(self.devices)

    @property
    def counted_dropouts(self) -> tuple[float, float]:
        """Of hidden states and of attention, as its memory is counted: Megatron-LM's where the launch decides."""
        hidden, attention = self.hidden_dropout, self.attention_dropout
        return DEFAULT_DROPOUT if hidden is None else hidden, DEFAULT_DROPOUT if attention is None else attention

    def stages(self) -> Iterator[tuple[int, int, Stage]]:
        """Every stage with the indices of its replica and of itself."""
        for r, replica in enumerate(self.replicas):
            for s, stage in enumerate(replica.stages):
                yield r, s, stage

    def ranks(self) -> tuple[int, ...]:
        """Every rank that the plan names, working and idle, in plan order."""
        working = (
            rank
            for replica in self.replicas
            for group in replica.device_groups
            for rank in replica.stages[group[0]].ranks
        )
        return (*working, *self.idle_ranks)

    @property
    def world_size(self) -> int:
        return len(self.ranks())

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """The sizes in samples that microbatches of its stages have, each once and in ascending order."""
        return tuple(sorted({stage.micro_batch_size for _, _, stage in self.stages()}))

    def placements(self, rank: int) -> tuple[Placement, ...]:
        """Where ``rank`` works: a place in each stage of its device group, none if it idles."""
        return tuple(
            Placement(r, s, *divmod(stage.ranks.index(rank), stage.tp))
            for r, s, stage in self.stages()
            if rank in stage.ranks
        )

    def placement(self, rank: int) -> Placement | None:
        """The first place of ``rank``, ``None`` if it idles."""
        return next(iter(self.placements(rank)), None)

    def alike(self) -> list[list[int]]:
        """The replicas, those that differ in their ranks only together."""
        found: dict[Hashable, list[int]] = {}
        for r, replica in enumerate(self.replicas):
            found.setdefault(replica.kind, []).append(r)
        return list(found.values())

    def first_sample(self, replica: int) -> int:
        """Offset of a replica's block within the global batch."""
        return sum(r.num_samples for r in self.replicas[:replica])

    def with_precision(self, precision: Precision) -> "Plan":
        """The same plan in another precision; stages in fp8 are so beside bf16 alone."""
        plan = dataclasses.replace(self, precision=precision)
        if precision == "bf16":
            return plan
        return plan.with_replicas(
            {r: each.with_each_stage(fp8=[False] * len(each.stages)) for r, each in enumerate(plan.replicas)}
        )

    def with_replicas(self, replicas: Mapping[int, Replica]) -> "Plan":
        """The same plan with other replicas in the places of some, by index."""
        return dataclasses.replace(self, replicas=tuple(replicas.get(r, old) for r, old in enumerate(self.replicas)))

    def with_replica(self, replica: int, changed: Replica) -> "Plan":
        """The same plan with ``changed`` in the place of one replica."""
        return self.with_replicas({replica: changed})

    def with_alike(self, members: Iterable[int], changed: Replica) -> "Plan":
        """The same plan with ``changed`` in the places of all ``members``, on the ranks that each of them has.

        members: replicas that differ in their ranks only, as :meth:`alike` lists them.
        """
        return self.with_replicas({r: changed.on_ranks_of(self.replicas[r]) for r in members})

    def with_samples_moved(self, givers: Sequence[int], takers: Sequence[int]) -> "Plan | None":
        """The same plan with the fewest samples moved that all ``givers`` can hand to all ``takers`` in equal parts.

        Both are replicas that differ in their ranks only, and still have whole microbatches on every stage then.

        Returns:
            ``None`` if nothing would be left to the givers.
        """

        def unit(members: Sequence[int]) -> int:
            return math.lcm(*(stage.samples_per_microbatch for stage in self.replicas[members[0]].stages))

        total = math.lcm(unit(givers) * len(givers), unit(takers) * len(takers))
        if self.replicas[givers[0]].num_samples <= total // len(givers):
            return None
        more = {r: -total // len(givers) for r in givers} | {r: total // len(takers) for r in takers}
        return self.with_replicas(
            {
                r: dataclasses.replace(self.replicas[r], num_samples=self.replicas[r].num_samples + samples)
                for r, samples in more.items()
            }
        )
