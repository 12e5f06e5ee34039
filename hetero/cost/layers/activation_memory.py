"""Bytes that one layer keeps of a microbatch: between its forward and backward, until its weights' gradients, and while
it computes.

With b samples of s tokens, e bytes per element, hidden size h, q and kv channels, ffn size f with g projections up,
heads a and tensor parallelism t, a block of megatron-core saves (arXiv 2205.05198, section 4, counts the same tensors)

    e b s (4 h / t' + (2 q + 2 kv + (g + 1) f) / t + a s / t)        t' = t with sequence parallelism, else 1

of which its attention has e b s (2 h / t' + (2 q + 2 kv) / t + a s / t) and its MLP e b s (2 h / t' + (g + 1) f / t).
The term with a, the attention scores, is absent with flash attention and with selective recomputation; full
recomputation keeps the input, e b s h / t', alone, of each half where a stage has only one of them.

Dropout keeps what it has drawn, a byte per element: b s h / t' behind the attention, as much behind the MLP, and as
much behind the embedding. Where scores are kept, dropout of them keeps b s^2 a / t bytes, and the scores that are left,
as many bytes as the scores. With all of this a block of the paper has its 34 s b h + 5 a s^2 b bytes.

The loss keeps the softmax, in 4 bytes per logit; the logits themselves, and in half precision their gradient, are there
beside it for a moment only (:func:`logits_working_bytes`).

In fp8 TransformerEngine saves the inputs of the linear layers in one byte per element: the outputs of the norms and of
the activation function, and beside the context, which attention's backward has in e bytes, the projection's input. A
block then saves b s ((e - 1) (2 h / t' + f / t) - q / t) bytes less. But each microbatch casts the weights anew and
keeps them for its backward, in two copies, two bytes per weight (:data:`FP8_COPIES`), whatever its size. From
TransformerEngine's sources; not measured.

A split backward (arXiv 2401.10241) keeps, between a microbatch's I and its W, the inputs of the linear layers and the
gradients of their outputs. In a block those are, for the projections of attention and the MLP's,

    inputs     e b s ((h / t' + q / t) + (h / t' + f / t))
    gradients  e b s (((q + 2 kv) / t + h) + (g f / t + h))

where a gradient of width h is whole on every rank, since it is gathered before the product. TransformerEngine also
keeps the input that it has gathered for the product, h in place of h / t' (``inputmat_total`` in its pytorch/module/
linear.py, ``ln_out_total`` in layernorm_linear.py, version 2.11), where the local layers gather it once more. Experts
hold k copies of a token instead, k (h + f / t) and k (g f / t + h). In fp8 e is 1 there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.cost.layers.work import layer_work
from hetero.plan.ir import Recompute
from hetero.spec.profile import LayerShape, ModuleKind

FP8_COPIES = 2
"""Of every weight of a linear layer, a byte each: as it is, and transposed for the backward, since Hopper multiplies
rows by rows only. Each microbatch has its own: TransformerEngine would keep one for all of a step, but then overwrites
gradients in the first of them."""

LOSS_BYTES = 4
"""The loss of half-precision logits is computed in fp32."""

MASK_BYTES = 1
"""Dropout keeps a bool per element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchShape:
    """What one tensor-parallel rank works on at a time.

    sequence_ways: ranks that share the rows of a sequence between the layers' products: tp with sequence parallelism,
        else 1.
    fp8: its linear layers multiply in fp8.
    dropout: outputs of the embedding, of attention and MLP are dropped in part, and scores where attention writes any.
    """

    micro_batch_size: int
    seq_length: int
    element_bytes: int
    tp: int
    sequence_ways: int = 1
    fp8: bool = False
    dropout: bool = False

    @property
    def num_tokens(self) -> int:
        return self.micro_batch_size * self.seq_length

    @property
    def loss_bytes(self) -> int:
        """Of one logit, or its softmax, in the loss: at least fp32."""
        return max(self.element_bytes, LOSS_BYTES)


def megatron_core_saved_bytes(
    kind: ModuleKind, shape: LayerShape, microbatch: MicrobatchShape, *, recompute: Recompute, flash_attention: bool
) -> int:
    """Bytes that a layer of megatron-core, or half of one, saves of one microbatch from forward to backward."""
    tokens, element, tp = microbatch.num_tokens, microbatch.element_bytes, microbatch.tp
    rows = shape.hidden // microbatch.sequence_ways
    mask = MASK_BYTES * tokens * rows if microbatch.dropout else 0
    if kind == "embedding":
        return mask
    if kind == "head":
        return element * tokens * 2 * rows + microbatch.loss_bytes * tokens * shape.vocabulary // tp
    if recompute == "full":
        return element * tokens * rows
    q, kv = shape.heads * shape.kv_channels, shape.query_groups * shape.kv_channels
    experts = shape.experts_per_token or 1
    mlp = experts * ((2 if shape.gated else 1) + 1) * shape.ffn
    # Experts work on copies of the tokens that were sent to them.
    dispatched = 2 * experts * rows if shape.num_experts else 0
    kept_scores = 0 if flash_attention or recompute == "selective" else shape.heads * microbatch.seq_length // tp
    score_bytes = (2 * element + MASK_BYTES) if microbatch.dropout else element
    attention = element * tokens * (2 * rows + (2 * q + 2 * kv) // tp) + score_bytes * tokens * kept_scores + mask
    less = _fp8_saving(kind, shape, microbatch) if microbatch.fp8 else 0
    if kind == "attention":
        return attention - less
    fed_forward = element * tokens * (2 * rows + dispatched + mlp // tp) + mask
    return (fed_forward if kind == "mlp" else attention + fed_forward) - less


def _fp8_saving(kind: ModuleKind, shape: LayerShape, microbatch: MicrobatchShape) -> int:
    """Bytes that a block, or half of one, saves less in fp8, as above."""
    rows, narrower = shape.hidden // microbatch.sequence_ways, microbatch.element_bytes - 1
    attention = narrower * rows - shape.heads * shape.kv_channels // microbatch.tp
    mlp = narrower * (rows + shape.ffn // microbatch.tp)
    return microbatch.num_tokens * (attention * (kind != "mlp") + mlp * (kind != "attention"))


def deferred_bytes(
    kind: ModuleKind, shape: LayerShape, microbatch: MicrobatchShape, *, keeps_gathered_inputs: bool
) -> int:
    """Bytes that a block, or half of one, keeps of one microbatch between I and W: inputs and gradients as above.

    Args:
        keeps_gathered_inputs: as TransformerEngine's layers do.
    """
    tp, whole = microbatch.tp, shape.hidden
    rows = whole if keeps_gathered_inputs else whole // microbatch.sequence_ways
    q, kv = shape.heads * shape.kv_channels, shape.query_groups * shape.kv_channels
    copies = shape.experts_per_token or 1
    mlp = whole + (whole if shape.num_experts else rows) + ((2 if shape.gated else 1) + 1) * shape.ffn // tp
    widths = {"attention": rows + whole + (2 * q + 2 * kv) // tp, "mlp": copies * mlp}
    width = widths[kind] if kind in widths else sum(widths.values())
    return (1 if microbatch.fp8 else microbatch.element_bytes) * microbatch.num_tokens * width


def working_bytes(
    modules: Sequence[ModuleKind], shape: LayerShape, microbatch: MicrobatchShape, *, flash_attention: bool
) -> int:
    """The largest of the layers' temporaries: a block's backward has the gradients of its scores before and after the
    softmax."""

    def work(kind: ModuleKind) -> tuple[float, float]:
        found = layer_work(
            kind,
            shape,
            tp=microbatch.tp,
            micro_batch_size=microbatch.micro_batch_size,
            seq_length=microbatch.seq_length,
            element_bytes=microbatch.element_bytes,
        )
        return found.score_bytes, found.row_bytes

    score_copies = 0 if flash_attention else 2
    return int(max(score_copies * score_bytes + row_bytes for score_bytes, row_bytes in map(work, set(modules))))


def logits_working_bytes(shape: LayerShape, microbatch: MicrobatchShape, *, loss_copies: int) -> int:
    """What the head's backward has beside the softmax: ``loss_copies`` of it, and in half precision the gradient of the
    logits, which were there in its place during the forward."""
    narrow = microbatch.element_bytes if microbatch.element_bytes < LOSS_BYTES else 0
    each = loss_copies * microbatch.loss_bytes + narrow
    return each * microbatch.num_tokens * shape.vocabulary // microbatch.tp


def collective_bytes(modules: Sequence[ModuleKind], shape: LayerShape, microbatch: MicrobatchShape) -> int:
    """Bytes of the tensors that tensor parallelism's collectives have worked on in one pass over ``modules``.

    Each half of a block all-reduces an output in its forward and the gradient of an input in its backward. With
    sequence parallelism its backward gathers its input and the gradient of its output, and scatters the gradient of its
    input: three tensors of whole rows, one more than its forward has.
    """
    if microbatch.tp == 1:
        return 0
    halves = sum(2 if kind == "block" else 1 for kind in modules)
    tensors = 3 if microbatch.sequence_ways > 1 else 1
    return halves * tensors * microbatch.element_bytes * microbatch.num_tokens * shape.hidden
