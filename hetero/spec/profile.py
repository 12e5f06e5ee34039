"""Defines profiles: measured seconds and bytes of a model's layers on one device type.

A profile holds measured numbers only, and says who measured them and how. :mod:`hetero.cost` interpolates and
extrapolates them, and marks what is no longer measured.

A layer's time depends on its shape, not on how many there are: a profile of 24 layers serves any model whose
layers have the same sizes.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.format_versions import FormatUpgrades
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT, near_match
from hetero.spec.devices import DeviceCatalogue
from hetero.spec.link import GroupLink
from hetero.spec.model import ModelSpec
from hetero.spec.shipped_devices import SHIPPED_DEVICES

LayerKind = Literal["embedding", "block", "head"]
"""``head`` is the final norm, the projection onto the vocabulary and the loss."""

LAYER_KINDS: tuple[LayerKind, ...] = ("embedding", "block", "head")

Half = Literal["attention", "mlp"]
"""Half a block: attention or MLP, each with the norm before it and its residual sum."""

HALVES: tuple[Half, Half] = ("attention", "mlp")

ModuleKind = LayerKind | Half

Arithmetic = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
"""The number format of matrix products. ``tf32`` is fp32 in memory and 19 bits in the product: several times faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """The sizes that decide what time and memory a layer takes.

    heads: attention heads, and ``query_groups`` of keys and values.
    gated: the MLP has a gate and an up projection of ``ffn`` rows each.
    vocabulary: rows of the embedding and of the head, padding included.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    hidden: int
    heads: int
    query_groups: int
    kv_channels: int
    ffn: int
    gated: bool
    vocabulary: int
    num_experts: int | None = None
    experts_per_token: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "query_groups", "kv_channels", "ffn", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(f"layer shape: {name} is {getattr(self, name)}, must be at least 1")

    @classmethod
    def of(cls, model: ModelSpec) -> "LayerShape":
        """The shape of the layers of ``model``."""
        moe = model.num_experts is not None
        return cls(
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            query_groups=model.num_query_groups,
            kv_channels=model.kv_channels,
            ffn=model.moe_ffn_hidden_size if moe and model.moe_ffn_hidden_size else model.ffn_hidden_size,
            gated=model.is_gated,
            vocabulary=model.padded_vocab_size,
            num_experts=model.num_experts,
            experts_per_token=model.moe_router_topk if moe else None,
        )

    @property
    def dense_block(self) -> "LayerShape":
        """The same shape without a vocabulary, on which the time of a block does not depend."""
        return dataclasses.replace(self, vocabulary=1)


AttentionKernel = Literal["unfused", "fused-softmax", "flash", "cudnn", "efficient"]
"""What computes attention. ``unfused`` writes its scores to memory for every operation on them, ``fused-softmax`` once,
with scale, mask and softmax in one kernel (Megatron-LM's, which is for half precision only). The others never write
them: FlashAttention, cuDNN's kernel, and the memory-efficient one of torch."""

_WRITE_SCORES: tuple[AttentionKernel, ...] = ("unfused", "fused-softmax")


GradientSums = Literal["separate", "fused_in_blocks", "fused"]
"""How a microbatch's weight gradients are added to their sums over the step: ``separate``, by a pass over each weight
after the product that makes its gradient; ``fused_in_blocks``, by the products themselves in blocks but not in the head
(TransformerEngine's layers); ``fused``, by the products of the head as well, and the embedding's backward adds the rows
of the tokens to the sum. Else the embedding's gradient has the size of its weight and takes the pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerImplementation:
    """How the kernels of a layer are put together, as far as its seconds show it.

    dropout: after attention's softmax, where it writes scores, and before the residual sums.
    overlaps_collectives: the collective of an input's gradient runs beside the product of the weights' gradient.
    gradient_sums: ``None`` where the measurer does not say; then sums are not priced.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    attention: AttentionKernel = "unfused"
    dropout: bool = False
    overlaps_collectives: bool = False
    gradient_sums: GradientSums | None = None

    @property
    def writes_scores(self) -> bool:
        """Attention writes its scores to memory, and keeps them for its backward."""
        return self.attention in _WRITE_SCORES


def have_like_costs(a: AttentionKernel, b: AttentionKernel | None) -> bool:
    """Return whether one estimate holds for both kernels: they are the same, or neither writes the scores."""
    return a == b or (b is not None and a not in _WRITE_SCORES and b not in _WRITE_SCORES)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Measured seconds of one layer and microbatch on one of ``tp`` ranks.

    kind: of halves of blocks only the proportion counts, so that both together are the block.
    forward_s, backward_s: medians of the measurer's repetitions; the backward is of weights and inputs together.
    forward_spread, backward_spread: between the first and the third quartile, as a part of the median.
    saved_bytes: of tensors that the forward keeps for the backward, weights not counted.
    peak_bytes: the most that both passes allocate beyond weights, gradients, the input and its gradient.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: ModuleKind
    tp: int
    micro_batch_size: int
    forward_s: float
    backward_s: float
    forward_spread: float | None = None
    backward_spread: float | None = None
    repetitions: int | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_measured(self, self.kind, "forward_s", "backward_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputedTime:
    """Measured seconds and bytes of a block that recomputes activations, as :class:`LayerTime` has them without."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    recompute: Literal["selective", "full"]
    tp: int
    micro_batch_size: int
    forward_s: float
    backward_s: float
    forward_spread: float | None = None
    backward_spread: float | None = None
    repetitions: int | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_measured(self, f"block with {self.recompute} recomputation", "forward_s", "backward_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitBackwardTime:
    """Measured seconds of a block's backward in two: first the gradient of the input, later those of the weights."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    tp: int
    micro_batch_size: int
    input_gradients_s: float
    weight_gradients_s: float
    input_gradients_spread: float | None = None
    weight_gradients_spread: float | None = None
    repetitions: int | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "split backward", "input_gradients_s", "weight_gradients_s")

    @property
    def weights_share(self) -> float:
        """The weights' gradients as a part of both."""
        whole_s = self.input_gradients_s + self.weight_gradients_s
        return self.weight_gradients_s / whole_s if whole_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTime:
    """Measured seconds of the optimizer's update of one layer's parameters on one of ``tp`` ranks.

    spread: as those of :class:`LayerTime`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: LayerKind
    tp: int
    update_s: float
    spread: float | None = None
    repetitions: int | None = None

    def __post_init__(self) -> None:
        if self.update_s < 0:
            where = f"profile: {self.kind} at tp {self.tp}"
            raise ConfigError(f"{where}: update_s is {self.update_s}, must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMemory:
    """Measured memory of one layer on one of ``tp`` ranks.

    parameters: elements, not bytes.
    saved_bytes: activations kept from forward to backward, of one sample.
    output_bytes: what it hands to the next layer, of one sample; the head's are its logits and the loss. Recorded
        only: no cost is computed from it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: LayerKind
    tp: int
    parameters: int
    saved_bytes: int
    output_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where measured numbers come from.

    measured_by: who ran the measurements.
    licence: under which the numbers may be passed on, with the copyright notice that it asks for.
    notes: what a reader must know before using them.
    date: of the day on which the first of them was measured, as 2026-11-23.
    command: that measured them, as it was typed.
    hardware: what the device calls itself: CUDA's name, or the processor's and how many threads compute on it.
    versions: of the driver and the libraries that the numbers may depend on.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    measured_by: str
    source: AnyText
    licence: str
    notes: tuple[AnyText, ...] = ()
    date: str = ""
    command: AnyText = ""
    hardware: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


def _from_version_1(profile: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no halves, spreads, recomputation nor split backwards, which are absent by default."""
    return profile


def _from_version_2(profile: dict[str, Any]) -> dict[str, Any]:
    """Version 2 does not say who adds gradients to their sums; what ``hetero profile run`` timed had the passes.

    It called every kernel of attention that writes no scores ``flash``: which one ran, it did not know.
    """
    layers, implementation = profile.get("layers"), profile.get("implementation", {})
    sums = {"local": "separate", "transformer_engine": "fused_in_blocks"}.get(layers if isinstance(layers, str) else "")
    if sums is None or not isinstance(implementation, dict):
        return profile
    return {**profile, "implementation": {"gradient_sums": sums, **implementation}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measured seconds and bytes of one model's layers on one device type.

    device: the name of a device type that ships (:mod:`hetero.spec.shipped_devices`) or that a cluster describes.
    model: its common name; only :attr:`shape`, :attr:`seq_length` and :attr:`precision` are compared.
    precision: of weights and activations in memory; ``arithmetic``: of the matrix products.
    tp_collectives_included: the times of ``tp`` > 1 contain their all-reduces. Where they do not, as one device alone
        measures them, costs add what the links of the cluster take.
    head_has_projection: false where the measurer's last layer stopped before the projection onto the vocabulary.
    isolation_s: what measuring one layer alone adds to each of its passes: the device idles before the first kernel
        and after the last, which in a row of layers is hidden behind the neighbours. Not part of a layer's cost.
    in_a_step: how many times as long the kernels of a layer take in a running step, in which a device never rests, as
        they take timed alone.
    all_reduce: bandwidths of the collectives that the times contain, on the machine that was measured.
    implementation: of the layers that were timed, with the kernel of attention that ran.
    layers: whose they were, where somebody said so; of two profiles that differ in nothing else the first counts.
    recomputed, split_backwards: of blocks; without them what recomputation and the weights' gradients take is an
        estimate.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    format_version: Literal[3] = 3
    __format_upgrades__: ClassVar[FormatUpgrades] = {1: _from_version_1, 2: _from_version_2}

    device: str
    model: str
    shape: LayerShape
    seq_length: int
    precision: Literal["fp64", "fp32", "bf16", "fp16"]
    arithmetic: Arithmetic
    tp_collectives_included: bool = True
    head_has_projection: bool = True
    isolation_s: float = 0.0
    in_a_step: float = 1.0
    all_reduce: tuple[GroupLink, ...] = ()
    implementation: LayerImplementation = LayerImplementation()
    layers: Literal["local", "transformer_engine"] | None = None
    provenance: Provenance
    times: tuple[LayerTime, ...]
    recomputed: tuple[RecomputedTime, ...] = ()
    split_backwards: tuple[SplitBackwardTime, ...] = ()
    updates: tuple[UpdateTime, ...] = ()
    memory: tuple[LayerMemory, ...] = ()

    def __post_init__(self) -> None:
        where = f"profile of {self.model} on {self.device}"
        if self.seq_length < 1:
            raise ConfigError(f"{where}: seq_length is {self.seq_length}, must be at least 1")
        if self.isolation_s < 0:
            raise ConfigError(f"{where}: isolation_s is {self.isolation_s}, must be at least 0")
        if not self.in_a_step > 0:
            raise ConfigError(f"{where}: in_a_step is {self.in_a_step}, must be above 0")
        if not self.times:
            raise ConfigError(f"{where}: times is empty, so it says nothing; measure a block at least")
        _refuse_repeated(where, "times", ((t.kind, t.tp, t.micro_batch_size) for t in self.times))
        _refuse_repeated(where, "recomputed", ((r.recompute, r.tp, r.micro_batch_size) for r in self.recomputed))
        _refuse_repeated(where, "split_backwards", ((b.tp, b.micro_batch_size) for b in self.split_backwards))
        _refuse_repeated(where, "updates", ((u.kind, u.tp) for u in self.updates))
        _refuse_repeated(where, "memory", ((m.kind, m.tp) for m in self.memory))

    def tps(self, kind: ModuleKind) -> tuple[int, ...]:
        """The tensor-parallel degrees at which ``kind`` was measured, ascending."""
        return tuple(sorted({time.tp for time in self.times if time.kind == kind}))

    def times_of(self, kind: ModuleKind, *, tp: int) -> tuple[LayerTime, ...]:
        """Measured times of ``kind`` at ``tp`` in ascending micro_batch_size; empty if there are none."""
        found = [time for time in self.times if time.kind == kind and time.tp == tp]
        return tuple(sorted(found, key=lambda time: time.micro_batch_size))

    def recomputed_of(self, recompute: str, *, tp: int) -> tuple[RecomputedTime, ...]:
        """Measured times of a block with ``recompute`` at ``tp`` in ascending micro_batch_size."""
        found = [each for each in self.recomputed if (each.recompute, each.tp) == (recompute, tp)]
        return tuple(sorted(found, key=lambda each: each.micro_batch_size))

    def split_backwards_of(self, *, tp: int) -> tuple[SplitBackwardTime, ...]:
        """Measured split backwards of a block at ``tp`` in ascending micro_batch_size."""
        found = [each for each in self.split_backwards if each.tp == tp]
        return tuple(sorted(found, key=lambda each: each.micro_batch_size))

    def update_of(self, kind: LayerKind, *, tp: int) -> float | None:
        """Measured seconds of the update of ``kind`` at ``tp``, ``None`` if there are none."""
        return next((u.update_s for u in self.updates if u.kind == kind and u.tp == tp), None)

    def memory_of(self, kind: LayerKind, *, tp: int) -> LayerMemory | None:
        """Measured bytes of ``kind`` at ``tp``, ``None`` if there are none."""
        return next((m for m in self.memory if m.kind == kind and m.tp == tp), None)


class ProfileStore:
    """Looks up profiles by device type and layer shape. Immutable; :meth:`plus` makes a larger store.

    Args:
        device_types: those that it may be asked about, profiled or not.
        all_reduce: by device, the bandwidths inside the nodes of the cluster that is priced; of other devices those
            that their profiles were measured with.

    Raises:
        ConfigError: a profile is of a device type that is none of these.
    """

    def __init__(
        self,
        profiles: Iterable[Profile],
        *,
        device_types: DeviceCatalogue = SHIPPED_DEVICES,
        all_reduce: Mapping[str, tuple[GroupLink, ...]] | None = None,
    ) -> None:
        self._profiles = tuple(profiles)
        self.device_types = device_types
        self._all_reduce = dict(all_reduce or {})
        for profile in self._profiles:
            try:
                device_types.of(profile.device)
            except ConfigError as error:
                raise ConfigError(f"profile of {profile.model} on {profile.device}: {error}") from None

    def __iter__(self) -> Iterator[Profile]:
        return iter(self._profiles)

    def __len__(self) -> int:
        return len(self._profiles)

    def plus(self, profiles: Iterable[Profile]) -> "ProfileStore":
        """A store of these and ``profiles``, of which the latter are found first where both describe the same."""
        return ProfileStore((*profiles, *self._profiles), device_types=self.device_types, all_reduce=self._all_reduce)

    def on_links(self, all_reduce: Mapping[str, tuple[GroupLink, ...]]) -> "ProfileStore":
        """These profiles where the devices of a cluster sum over other links; unchanged without a cluster."""
        if not self._all_reduce:
            return self
        return ProfileStore(self._profiles, device_types=self.device_types, all_reduce=all_reduce)

    def all_reduce_of(self, device: str) -> tuple[GroupLink, ...]:
        """Bandwidths of the all-reduces of tensor parallelism on ``device``; none where nobody knows them."""
        profiled = (profile.all_reduce for profile in self._profiles if profile.device == device)
        return self._all_reduce.get(device) or next(profiled, ())

    def devices(self) -> tuple[str, ...]:
        """Device types that have a profile of any model, in the order of the store."""
        return tuple(dict.fromkeys(profile.device for profile in self._profiles))

    def of_device(self, device: str) -> tuple[Profile, ...]:
        """All profiles of ``device``.

        Raises:
            ConfigError: there is none, or no such device type.
        """
        found = tuple(profile for profile in self._profiles if profile.device == device)
        if not found:
            self.device_types.of(device)
            known = list(self.devices())
            hint = near_match(device, known) or f" (profiled: {', '.join(known)})"
            raise ConfigError(
                f"no profile of any model on {device!r}{hint}; measure one with `hetero profile run`, "
                "leave these devices out, or allow estimates from data sheets"
            )
        return found

    def find(self, shape: LayerShape, *, device: str, seq_length: int, precision: str) -> Profile | None:
        """The profile whose blocks have exactly this shape, length and precision; the first of several.

        The vocabulary may differ: only the embedding and the head depend on it.
        """
        alike = [
            profile
            for profile in self._profiles
            if profile.device == device
            and profile.seq_length == seq_length
            and profile.precision == precision
            and profile.shape.dense_block == shape.dense_block
        ]
        exact = [profile for profile in alike if profile.shape.vocabulary == shape.vocabulary]
        return next(iter(exact or alike), None)


def _check_measured(measured: Any, what: str, *fields: str) -> None:
    """That the place of a measurement is one, and its seconds are some."""
    where = f"profile: {what} at tp {measured.tp}, micro_batch_size {measured.micro_batch_size}"
    for name in ("tp", "micro_batch_size"):
        if getattr(measured, name) < 1:
            raise ConfigError(f"{where}: {name} is {getattr(measured, name)}, must be at least 1")
    for name in fields:
        if getattr(measured, name) < 0:
            raise ConfigError(f"{where}: {name} is {getattr(measured, name)}, must be at least 0")


def _refuse_repeated(where: str, what: str, keys: Iterable[Any]) -> None:
    if repeated := [key for key, count in Counter(keys).items() if count > 1]:
        raise ConfigError(f"{where}: {what} lists {', '.join(map(str, repeated[0]))} more than once; keep one")
