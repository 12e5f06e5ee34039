"""Counts the work of a layer from its shape alone: operations and bytes.

b samples of s tokens with e bytes per element, hidden size h, q and kv channels of queries and of keys, ffn size f
(g projections up to it: 2 if gated, else 1), vocabulary v, tensor parallelism tp. One forward of one microbatch on
one rank (arXiv 2104.04473, appendix; arXiv 2205.05198, section 4):

    attention  operations  2 s b (h (q + 2 kv) + q h) / tp + 4 s^2 b q / tp
               score bytes e heads s^2 b / tp                         written and read several times, unless fused
               row bytes   e s b (2 h + (2 q + 2 kv) / tp)            norm, residual, biases
    mlp        operations  2 s b (g + 1) h f / tp
               row bytes   e s b (2 h + g f / tp)                     norm, residual, biases, activation
    block      attention and mlp
    embedding  row bytes e s b h
    head       operations 2 s b h v / tp, logit bytes e s b v / tp, row bytes 4 e s b h

A backward is twice the operations.
"""

from dataclasses import dataclass

from hetero.spec.profile import LayerShape, ModuleKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One forward of one layer for one microbatch on one rank.

    operations: floating-point operations of matrix products; ``attention_operations`` of them between the scores.
    score_bytes: of one copy of the attention scores, or of the logits.
    row_bytes: of everything else that is read and written once per token.
    """

    operations: float
    attention_operations: float
    score_bytes: float
    row_bytes: float


def layer_work(
    kind: ModuleKind, shape: LayerShape, *, tp: int, micro_batch_size: int, seq_length: int, element_bytes: int
) -> Work:
    """The work of one layer or half of one, as the head of this file has it."""
    match kind:
        case "attention":
            return _attention(shape, tp, micro_batch_size, seq_length, element_bytes)
        case "mlp":
            return _mlp(shape, tp, micro_batch_size, seq_length, element_bytes)
        case "block":
            return _block(shape, tp, micro_batch_size, seq_length, element_bytes)
        case "embedding":
            return _embedding(shape, tp, micro_batch_size, seq_length, element_bytes)
        case "head":
            return _head(shape, tp, micro_batch_size, seq_length, element_bytes)


def _block(shape: LayerShape, tp: int, samples: int, seq_length: int, element_bytes: int) -> Work:
    attention = _attention(shape, tp, samples, seq_length, element_bytes)
    mlp = _mlp(shape, tp, samples, seq_length, element_bytes)
    return Work(
        operations=attention.operations + mlp.operations,
        attention_operations=attention.attention_operations,
        score_bytes=attention.score_bytes,
        row_bytes=attention.row_bytes + mlp.row_bytes,
    )


def _attention(shape: LayerShape, tp: int, samples: int, seq_length: int, element_bytes: int) -> Work:
    tokens = samples * seq_length
    q, kv = shape.heads * shape.kv_channels, shape.query_groups * shape.kv_channels
    weights = shape.hidden * (q + 2 * kv) + q * shape.hidden
    scores = 4 * seq_length * tokens * q / tp
    return Work(
        operations=2 * tokens * weights / tp + scores,
        attention_operations=scores,
        score_bytes=element_bytes * shape.heads * seq_length * tokens / tp,
        row_bytes=element_bytes * tokens * (2 * shape.hidden + (2 * q + 2 * kv) / tp),
    )


def _mlp(shape: LayerShape, tp: int, samples: int, seq_length: int, element_bytes: int) -> Work:
    tokens = samples * seq_length
    up = 2 if shape.gated else 1
    experts = shape.experts_per_token or 1
    return Work(
        operations=2 * tokens * experts * (up + 1) * shape.hidden * shape.ffn / tp,
        attention_operations=0.0,
        score_bytes=0.0,
        row_bytes=element_bytes * tokens * (2 * shape.hidden + experts * up * shape.ffn / tp),
    )


def _embedding(shape: LayerShape, tp: int, samples: int, seq_length: int, element_bytes: int) -> Work:
    row_bytes = element_bytes * samples * seq_length * shape.hidden
    return Work(
        operations=0.0,
        attention_operations=0.0,
        score_bytes=0.0,
        row_bytes=row_bytes,
    )


def _head(shape: LayerShape, tp: int, samples: int, seq_length: int, element_bytes: int) -> Work:
    tokens = samples * seq_length
    return Work(
        operations=2 * tokens * shape.hidden * shape.vocabulary / tp,
        attention_operations=0.0,
        score_bytes=element_bytes * tokens * shape.vocabulary / tp,
        row_bytes=4 * element_bytes * tokens * shape.hidden,
    )


def parameters_of(kind: ModuleKind, shape: LayerShape, *, tp: int) -> int:
    """Elements of one layer's weights on one of ``tp`` ranks, biases and norms of width h included.

    A shape says nothing of positions: a learned embedding of theirs is left out.
    """
    h, q, kv = shape.hidden, shape.heads * shape.kv_channels, shape.query_groups * shape.kv_channels
    match kind:
        case "embedding":
            return shape.vocabulary // tp * h
        case "head":
            return shape.vocabulary // tp * h + 2 * h
        case "attention":
            return (h * (q + 2 * kv) + q * h + q + 2 * kv) // tp + 3 * h
        case "mlp":
            up = 2 if shape.gated else 1
            experts = shape.num_experts or 1
            return experts * ((up + 1) * h * shape.ffn + up * shape.ffn) // tp + 3 * h
        case "block":
            return parameters_of("attention", shape, tp=tp) + parameters_of("mlp", shape, tp=tp)
