"""Shrinks a model to a small one, which really computes while the large one is emulated.

Everything that a plan refers to stays: layers, heads and query groups, so that any legal tensor parallelism still
divides them; microbatches and samples; experts. What is shrunk is the size of a head, the MLP, the sequence and the
vocabulary. It depends on the described model alone, so that two plans of one model train the same small model.
"""

import dataclasses
import math

from hetero.plan.ir import Plan
from hetero.spec.model import ModelSpec

HEAD_SIZE = 2
"""Channels of a head; rotary embeddings want an even number."""


def small_model(model: ModelSpec, *, vocab_size: int, seq_length: int) -> ModelSpec:
    """``model`` with ``HEAD_SIZE`` channels per head, an MLP as narrow as that, and ``vocab_size`` words.

    Whatever tensor parallelism divides the heads also divides the MLP and the padded vocabulary.
    """
    hidden_size = HEAD_SIZE * model.num_attention_heads
    return dataclasses.replace(
        model,
        hidden_size=hidden_size,
        kv_channels=HEAD_SIZE,
        ffn_hidden_size=2 * hidden_size,
        moe_ffn_hidden_size=None if model.moe_ffn_hidden_size is None else hidden_size,
        vocab_size=vocab_size,
        padded_vocab_size=math.ceil(vocab_size / model.num_attention_heads) * model.num_attention_heads,
        max_position_embeddings=seq_length,
    )


def small_plan(plan: Plan, *, vocab_size: int, seq_length: int) -> Plan:
    """``plan`` for the small model, in fp32: this machine's processor computes, whatever the devices would.

    Each rank has the same layers, microbatches and neighbours as under ``plan``. Its buckets are another matter:
    ``plan`` states their size for the described model.
    """
    return dataclasses.replace(
        plan.with_precision("fp32"),
        model=small_model(plan.model, vocab_size=vocab_size, seq_length=seq_length),
        seq_length=seq_length,
        gradient_sync=dataclasses.replace(plan.gradient_sync, bucket_numel=None),
    )
