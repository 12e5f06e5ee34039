"""The kernels of one layer and their seconds, from its shape and from how it is implemented.

b samples of s tokens with e bytes per element, hidden size h, q and kv channels of queries and of keys, ffn size f
(g projections up to it: 2 if gated, else 1), vocabulary v, tensor parallelism t; t' = t with sequence parallelism, else
1. On one rank, T = s b tokens (arXiv 2104.04473, appendix; arXiv 2205.05198, section 4):

    products    T x (q + 2 kv) / t x h     T x h x q / t     T x g f / t x h     T x h x f / t     head: T x v / t x h
                once in a forward; in a backward twice, for the inputs and for the weights
    scores      a / t batches of b products s x s x (q / a), twice in a forward, four times in a backward; beside them a
                forward moves the scores (e a s^2 b / t bytes) so many times, with p = 2 + 1 / e for dropout:
                    fused softmax (scale, mask, softmax)     2 (+ p)         backward  3 (+ p)
                    Megatron-LM's in fp32, one by one        6 (+ p)         backward  9 (+ p)
                    unfused, as in the shipped profiles      6 (+ p)         backward  18 (+ p)
    flash       2 s^2 b q / t operations with a causal mask, 2.5 times as many in a backward
    sums        a microbatch's weight gradients are added to a sum of E = max(e, 4) bytes per element. Where the product
                adds (``LayerImplementation.gradient_sums``), it moves 2 E bytes per weight in place of e; else a pass
                of its own moves e + 2 E. The embedding's gradient has the size of its weight, v h / t, whatever the
                number of tokens: a backward sets e bytes per element to zero, and the pass follows. Where all sums are
                fused there is no such tensor: rows are read, cast to E (written and read) and added to at most
                min(T, v / t) rows of the sum, 2 E per element
    rows        e T h / t' bytes for each read and write by two norms (2 each), two residual sums (3 each, and a mask);
                e T (g + 1) f / t by the activation, e T (q + 2 kv) / t to arrange the heads; in a backward 3, 2 and
                the mask, (2 g + 1) f
    loss        of e T v / t logits: a copy in fp32, maximum, difference, exponentials, sum, quotient
    collectives two all-reduces of e T h in a forward and two in a backward (with sequence parallelism each is a
                reduce-scatter and an all-gather)

All moves are counted but the last: how often the profiled layers move their scores in a backward is not published; 18
lies between what is left of the backwards of GPT-Neo on A100 (15) and of OPT-350M on GH200 (24) once everything else is
taken off.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hetero.cost.layers.kernels import Kernels
from hetero.spec.link import GroupLink
from hetero.spec.profile import HALVES, GradientSums, LayerImplementation, LayerShape, ModuleKind
from hetero.units import US_PER_S

ComputePass = Literal["forward", "backward"]

UNFUSED_MOVES: dict[ComputePass, int] = {"forward": 6, "backward": 18}
MEGATRON_FP32_MOVES: dict[ComputePass, int] = {"forward": 6, "backward": 9}
FUSED_SOFTMAX_MOVES: dict[ComputePass, int] = {"forward": 2, "backward": 3}
"""Times that attention moves its scores through memory beside its products, as above."""

FLASH_BACKWARD = 2.5
"""Operations of the backward of attention without scores over those of its forward: the scores are computed again."""

SUM_BYTES = 4
"""The sum of a weight's gradients over microbatches has fp32 at least."""

LOSS_MOVES: dict[ComputePass, int] = {"forward": 8, "backward": 3}
"""Times that the loss moves its logits in fp32, as above; in a backward: read, written, and cast."""

CONTENTION = 0.5
"""Share of a collective's seconds that it costs although products run beside it: it takes multiprocessors and memory
bandwidth from them. A heuristic: the published runs hardly determine it (docs/cost_model.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """One layer and what one of its tensor-parallel ranks computes of a microbatch at a time.

    all_reduce: bandwidths of the all-reduces of tensor parallelism; none where nothing is known of them.
    """

    kind: ModuleKind
    shape: LayerShape
    seq_length: int
    element_bytes: int
    implementation: LayerImplementation
    tp: int
    micro_batch_size: int
    sequence_parallel: bool = False
    all_reduce: Sequence[GroupLink] = field(default=(), repr=False)

    @property
    def num_tokens(self) -> int:
        return self.micro_batch_size * self.seq_length

    def with_gradient_sums(self, sums: GradientSums | None) -> "LayerConfig":
        """The same layer whose weight gradients are added up so."""
        return dataclasses.replace(self, implementation=dataclasses.replace(self.implementation, gradient_sums=sums))

    @property
    def sum_bytes(self) -> int:
        """Bytes per element of the sum of a weight's gradients."""
        return max(self.element_bytes, SUM_BYTES)

    @property
    def fuses_sums(self) -> bool:
        """What makes the gradients of this layer's weights adds them to their sums."""
        fused = self.implementation.gradient_sums
        return fused == "fused" or (fused == "fused_in_blocks" and self.kind in ("block", *HALVES))

    @property
    def adds_sums(self) -> bool:
        """A pass of its own adds the gradients of this layer's weights to their sums."""
        return self.implementation.gradient_sums is not None and not self.fuses_sums


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSeconds:
    """Seconds of one pass of a layer by what its kernels do.

    linear_s: products with weights, ``weight_gradients_s`` of them for the weights' gradients.
    gradient_sums_s: of passes that add the weights' gradients to their sums, where the products do not.
    attention_s: from queries and keys to the context, which selective recomputation repeats.
    rows_s: everything else that moves rows through memory, the loss among it.
    collectives_s: of tensor parallelism, as far as nothing hides them.
    """

    linear_s: float = 0.0
    weight_gradients_s: float = 0.0
    gradient_sums_s: float = 0.0
    attention_s: float = 0.0
    rows_s: float = 0.0
    collectives_s: float = 0.0

    def __add__(self, other: "KernelSeconds") -> "KernelSeconds":
        return KernelSeconds(
            linear_s=self.linear_s + other.linear_s,
            weight_gradients_s=self.weight_gradients_s + other.weight_gradients_s,
            gradient_sums_s=self.gradient_sums_s + other.gradient_sums_s,
            attention_s=self.attention_s + other.attention_s,
            rows_s=self.rows_s + other.rows_s,
            collectives_s=self.collectives_s + other.collectives_s,
        )


def kernel_seconds(kernels: Kernels, layer: LayerConfig, compute_pass: ComputePass) -> KernelSeconds:
    """Seconds of one pass of one layer, or of half a layer."""
    match layer.kind:
        case "attention":
            return _attention(kernels, layer, compute_pass)
        case "mlp":
            return _mlp(kernels, layer, compute_pass)
        case "block":
            return _attention(kernels, layer, compute_pass) + _mlp(kernels, layer, compute_pass)
        case "embedding":
            return _embedding(kernels, layer, compute_pass)
        case "head":
            return _head(kernels, layer, compute_pass)


def _embedding(kernels: Kernels, layer: LayerConfig, compute_pass: ComputePass) -> KernelSeconds:
    moved = 2 * layer.element_bytes * layer.num_tokens * layer.shape.hidden
    if compute_pass == "forward":
        return KernelSeconds(rows_s=kernels.moved_s(moved), collectives_s=_all_reduce_s(layer))
    vocabulary, hidden = layer.shape.vocabulary // layer.tp, layer.shape.hidden
    if layer.fuses_sums:
        cast = 2 * layer.sum_bytes * (layer.element_bytes < layer.sum_bytes)
        moved = (layer.element_bytes + cast) * layer.num_tokens * hidden
        moved += 2 * layer.sum_bytes * min(layer.num_tokens, vocabulary) * hidden
    weight = vocabulary * hidden
    if layer.adds_sums:
        moved += layer.element_bytes * weight
    return KernelSeconds(rows_s=kernels.moved_s(moved), gradient_sums_s=_sums_s(kernels, layer, weight))


def _sums_s(kernels: Kernels, layer: LayerConfig, weights: int) -> float:
    """Return the seconds of passes that add the gradients of ``weights`` elements; 0 where the products add them."""
    return kernels.moved_s((layer.element_bytes + 2 * layer.sum_bytes) * weights) if layer.adds_sums else 0.0


def _weight_gradient_s(kernels: Kernels, layer: LayerConfig, *, n: int, k: int, tokens: int, copies: int = 1) -> float:
    """Return the seconds of the product that makes the gradient of a weight of n x k; experts have ``copies`` of it."""
    written = 2 * layer.sum_bytes * copies if layer.fuses_sums else None
    return kernels.product_s(n, k, tokens, element_bytes=layer.element_bytes, across=True, result_bytes=written)


def _attention(kernels: Kernels, layer: LayerConfig, compute_pass: ComputePass) -> KernelSeconds:
    shape, tp, tokens = layer.shape, layer.tp, layer.num_tokens
    q, kv = shape.heads * shape.kv_channels, shape.query_groups * shape.kv_channels
    projections = [(tokens, (q + 2 * kv) // tp, shape.hidden), (tokens, shape.hidden, q // tp)]
    arranged = layer.element_bytes * tokens * (q + 2 * kv) / tp
    return _half(kernels, layer, compute_pass, products=projections, moved=arranged) + KernelSeconds(
        attention_s=_core_attention_s(kernels, layer, compute_pass)
    )


def _mlp(kernels: Kernels, layer: LayerConfig, compute_pass: ComputePass) -> KernelSeconds:
    shape, tp, up = layer.shape, layer.tp, 2 if layer.shape.gated else 1
    # Experts work on copies of the tokens that were sent to them.
    tokens = layer.num_tokens * (shape.experts_per_token or 1)
    products = [(tokens, up * shape.ffn // tp, shape.hidden), (tokens, shape.hidden, shape.ffn // tp)]
    rows = {"forward": up + 1, "backward": 2 * up + 1}[compute_pass]
    moved = layer.element_bytes * tokens * rows * shape.ffn / tp
    copies = shape.num_experts or 1
    return _half(kernels, layer, compute_pass, products=products, moved=moved, copies=copies)


def _half(
    kernels: Kernels,
    layer: LayerConfig,
    compute_pass: ComputePass,
    *,
    products: Sequence[tuple[int, int, int]],
    moved: float,
    copies: int = 1,
) -> KernelSeconds:
    """Products with weights, norm, residual sum and collective of attention or MLP; ``moved`` bytes between them.

    copies: of each weight, one per expert.
    """
    element = layer.element_bytes
    rows = element * layer.num_tokens * layer.shape.hidden / (layer.tp if layer.sequence_parallel else 1)
    mask = 1 / element if layer.implementation.dropout else 0.0
    passes = {"forward": 2 + 3 + mask, "backward": 3 + 2 + mask}[compute_pass]
    inputs_s = sum(kernels.product_s(m, n, k, element_bytes=element) for m, n, k in products)
    weights_s = sums_s = 0.0
    if compute_pass == "backward":
        inputs_s = sum(kernels.product_s(m, k, n, element_bytes=element, across=True) for m, n, k in products)
        weights_s = sum(_weight_gradient_s(kernels, layer, n=n, k=k, tokens=m, copies=copies) for m, n, k in products)
        sums_s = _sums_s(kernels, layer, copies * sum(n * k for _, n, k in products))
    return KernelSeconds(
        linear_s=inputs_s + weights_s,
        weight_gradients_s=weights_s,
        gradient_sums_s=sums_s,
        rows_s=kernels.moved_s(passes * rows + moved),
        collectives_s=_exposed_s(layer, compute_pass, beside_s=weights_s),
    )


def _core_attention_s(kernels: Kernels, layer: LayerConfig, compute_pass: ComputePass) -> float:
    shape, implementation = layer.shape, layer.implementation
    length, backward = layer.seq_length, compute_pass == "backward"
    heads = shape.heads * layer.micro_batch_size / layer.tp
    if not implementation.writes_scores:
        operations = 2 * heads * length**2 * shape.kv_channels
        return kernels.flash_s(operations * (FLASH_BACKWARD if backward else 1), backward=backward)
    channels, element = shape.kv_channels, layer.element_bytes
    to_scores_s = kernels.product_s(length, length, channels, element_bytes=element, batch=heads, across=backward)
    from_scores_s = kernels.product_s(length, channels, length, element_bytes=element, batch=heads, across=True)
    if implementation.attention == "unfused":
        moves = float(UNFUSED_MOVES[compute_pass])
    else:
        moves = float((FUSED_SOFTMAX_MOVES if element < 4 else MEGATRON_FP32_MOVES)[compute_pass])
    moves += (2 + 1 / element) * implementation.dropout
    products_s = (to_scores_s + from_scores_s) * (2 if backward else 1)
    return products_s + kernels.moved_s(moves * element * heads * length**2)


def _head(kernels: Kernels, layer: LayerConfig, compute_pass: ComputePass) -> KernelSeconds:
    shape, tokens, element = layer.shape, layer.num_tokens, layer.element_bytes
    rows = shape.vocabulary // layer.tp
    linear_s = kernels.product_s(tokens, rows, shape.hidden, element_bytes=element)
    weights_s = sums_s = 0.0
    if compute_pass == "backward":
        linear_s = kernels.product_s(tokens, shape.hidden, rows, element_bytes=element, across=True)
        weights_s = _weight_gradient_s(kernels, layer, n=rows, k=shape.hidden, tokens=tokens)
        sums_s = _sums_s(kernels, layer, rows * shape.hidden)
    cast = (element + 4) * (element < 4)
    loss_bytes = tokens * rows * (4 * LOSS_MOVES[compute_pass] + cast)
    norm_bytes = 2 * element * tokens * shape.hidden
    return KernelSeconds(
        linear_s=linear_s + weights_s,
        weight_gradients_s=weights_s,
        gradient_sums_s=sums_s,
        rows_s=kernels.moved_s(loss_bytes + norm_bytes),
    )


def _exposed_s(layer: LayerConfig, compute_pass: ComputePass, *, beside_s: float) -> float:
    """Seconds of the collective of half a layer that nothing hides.

    In a backward the collective of the input's gradient may run beside ``beside_s`` seconds of products. With sequence
    parallelism that is the reduce-scatter, half of it; the gather of the output's gradient comes before any product.
    """
    seconds = _all_reduce_s(layer)
    if compute_pass == "forward" or not layer.implementation.overlaps_collectives:
        return seconds
    can_hide_s = seconds / 2 if layer.sequence_parallel else seconds
    hidden_s = min(can_hide_s, beside_s)
    return seconds - (1 - CONTENTION) * hidden_s


def _all_reduce_s(layer: LayerConfig) -> float:
    """Seconds of one all-reduce of a microbatch's rows; 0 without tensor parallelism or where nothing is known."""
    if layer.tp == 1 or not layer.all_reduce:
        return 0.0
    group = next((group for group in layer.all_reduce if group.size >= layer.tp), layer.all_reduce[-1])
    num_bytes = layer.element_bytes * layer.num_tokens * layer.shape.hidden
    crossing = 2 * (layer.tp - 1) / layer.tp * num_bytes
    return group.bus.latency_us / US_PER_S + crossing / group.bus.bytes_per_s(num_bytes)
