"""How much work a layer is: operations, bytes and collectives, from its shape alone.

b samples of s tokens with e bytes per element, hidden size h, q and kv channels of queries and of keys, ffn size f
(g projections up to it: 2 if gated, else 1), vocabulary v, tensor parallelism tp. One forward of one microbatch on
one rank (arXiv 2104.04473, appendix; arXiv 2205.05198, section 4):

    block      operations  2 s b (h (q + 2 kv) + q h + (g + 1) h f) / tp + 4 s^2 b q / tp
               score bytes e heads s^2 b / tp                         written and read several times, unless fused
               row bytes   e s b (4 h + (2 q + 2 kv + g f) / tp)      norms, residuals, biases, activation
               collectives 2 all-reduces of e s b h
    embedding  row bytes e s b h, 1 all-reduce of the same
    head       operations 2 s b h v / tp, logit bytes e s b v / tp, row bytes 4 e s b h

A backward is twice the operations and the same collectives.
"""

from dataclasses import dataclass

from hetero.spec.profile import LayerKind, LayerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One forward of one layer for one microbatch on one rank.

    operations: floating-point operations of matrix products; ``attention_operations`` of them between the scores.
    score_bytes: of one copy of the attention scores, or of the logits.
    row_bytes: of everything else that is read and written once per token.
    all_reduce_bytes: reduced by one collective, of which there are ``num_all_reduces``.
    """

    operations: float
    attention_operations: float
    score_bytes: float
    row_bytes: float
    all_reduce_bytes: int
    num_all_reduces: int


def layer_work(
    kind: LayerKind, shape: LayerShape, *, tp: int, micro_batch_size: int, seq_length: int, element_bytes: int
) -> Work:
    """The work of one layer, as the head of this file has it."""
    match kind:
        case "block":
            return _block(shape, tp, micro_batch_size, seq_length, element_bytes)
        case "embedding":
            return _embedding(shape, tp, micro_batch_size, seq_length, element_bytes)
        case "head":
            return _head(shape, tp, micro_batch_size, seq_length, element_bytes)


def _block(shape: LayerShape, tp: int, samples: int, seq_length: int, element_bytes: int) -> Work:
    tokens = samples * seq_length
    q, kv = shape.heads * shape.kv_channels, shape.query_groups * shape.kv_channels
    up = 2 if shape.gated else 1
    experts = shape.experts_per_token or 1
    weights = shape.hidden * (q + 2 * kv) + q * shape.hidden + experts * (up + 1) * shape.hidden * shape.ffn
    attention = 4 * seq_length * tokens * q / tp
    return Work(
        operations=2 * tokens * weights / tp + attention,
        attention_operations=attention,
        score_bytes=element_bytes * shape.heads * seq_length * tokens / tp,
        row_bytes=element_bytes * tokens * (4 * shape.hidden + (2 * q + 2 * kv + experts * up * shape.ffn) / tp),
        all_reduce_bytes=element_bytes * tokens * shape.hidden,
        num_all_reduces=2 if tp > 1 else 0,
    )


def _embedding(shape: LayerShape, tp: int, samples: int, seq_length: int, element_bytes: int) -> Work:
    row_bytes = element_bytes * samples * seq_length * shape.hidden
    return Work(
        operations=0.0,
        attention_operations=0.0,
        score_bytes=0.0,
        row_bytes=row_bytes,
        all_reduce_bytes=row_bytes,
        num_all_reduces=1 if tp > 1 else 0,
    )


def _head(shape: LayerShape, tp: int, samples: int, seq_length: int, element_bytes: int) -> Work:
    tokens = samples * seq_length
    return Work(
        operations=2 * tokens * shape.hidden * shape.vocabulary / tp,
        attention_operations=0.0,
        score_bytes=element_bytes * tokens * shape.vocabulary / tp,
        row_bytes=4 * element_bytes * tokens * shape.hidden,
        all_reduce_bytes=0,
        num_all_reduces=0,
    )


def parameters_of(kind: LayerKind, shape: LayerShape, *, tp: int, positions: int = 0) -> int:
    """Elements of one layer's weights on one of ``tp`` ranks, biases and norms of width h included.

    positions: rows of a learned position embedding.
    """
    h, q, kv = shape.hidden, shape.heads * shape.kv_channels, shape.query_groups * shape.kv_channels
    match kind:
        case "embedding":
            return shape.vocabulary // tp * h + positions * h
        case "head":
            return shape.vocabulary // tp * h + 2 * h
        case "block":
            up = 2 if shape.gated else 1
            experts = shape.num_experts or 1
            attention = h * (q + 2 * kv) + q * h + q + 2 * kv
            return (attention + experts * ((up + 1) * h * shape.ffn + up * shape.ffn)) // tp + 6 * h
