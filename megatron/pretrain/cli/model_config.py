"""Declares the flags of the model: its shape, and the options with which its layers are built."""

import dataclasses
from operator import itemgetter
from typing import Literal, get_args

from hetero.errors import ConfigError
from hetero.runtime.options import AuxiliaryLoss
from hetero.spec.model import VOCABULARY_DIVISOR, Activation, ModelSpec, RotaryScaling, padded_vocab_size
from megatron.pretrain.cli import derived
from megatron.pretrain.cli.fields import (
    Condition,
    Flag,
    Relations,
    computed,
    config_dataclass,
    equals,
    flag,
    given,
    off_switch,
    switch,
)
from megatron.pretrain.cli.value_types import (
    BELOW_1,
    COUNT,
    FRACTION,
    FROM_1,
    NOT_NEGATIVE,
    POSITIVE,
    one_of,
    only,
    or_off,
)

_IS_ROPE = Condition(derived.is_rope, "--position-embedding-type rope")
_OF_ROPE = Relations(needs=(_IS_ROPE,))
_OF_ROPE_SCALING = Relations(needs=(given("--use-rope-scaling"),))
_NO_PADDING = ("--no-pad-vocab-size", "--disable-pad-vocab-size")
_OF_NO_PADDING = Relations(excludes=("--make-vocab-size-divisible-by",))
_OF_EXPERTS = Relations(needs=(given("--num-experts"),))


@config_dataclass
class ModelConfig:
    """Describes the model, except for its vocabulary, which may come from the tokenizer.

    vocab_size: ``None`` takes the tokenizer's.
    """

    num_layers: int = flag("Transformer layers of the whole model.", COUNT)
    hidden_size: int = flag("Width of the residual stream.", COUNT)
    ffn_hidden_size: int = computed(
        derived.ffn_hidden_size,
        Flag(
            "--ffn-hidden-size",
            "Width of the MLP; without it 4 x hidden size, with --swiglu two thirds of that.",
            COUNT,
        ),
    )
    num_attention_heads: int = flag("Query heads of each layer.", COUNT)
    kv_channels: int = computed(
        derived.kv_channels, Flag("--kv-channels", "Size of one head; without it hidden size / heads.", COUNT)
    )
    num_query_groups: int = computed(
        derived.num_query_groups,
        switch("--group-query-attention", "Let query heads share keys and values, in --num-query-groups groups."),
        Flag(
            "--num-query-groups",
            "Heads of keys and values; must divide the query heads.",
            COUNT,
            default=1,
            relations=Relations(
                needs=(given("--group-query-attention"),),
                idle=lambda flags: flags["--num-query-groups"] == flags["--num-attention-heads"],
            ),
        ),
    )
    max_position_embeddings: int = flag("Positions that the model knows, at least --seq-length.", COUNT)
    position_embedding: Literal["learned_absolute", "rope"] = computed(
        derived.position_embedding,
        Flag(
            "--position-embedding-type",
            "A learned vector per position, or rotated queries and keys.",
            dataclasses.replace(
                one_of("learned_absolute", "rope"),
                limit="one of learned_absolute, rope; --use-rope-scaling and --rotary-seq-len-interpolation-factor "
                "stretch rope for long sequences",
            ),
            default="learned_absolute",
        ),
        switch("--use-rotary-position-embeddings", "Old name of --position-embedding-type rope."),
    )
    rotary_base: float = flag(
        "Base of the wavelengths at which positions rotate.", POSITIVE, default=10_000.0, relations=_OF_ROPE
    )
    rotary_percent: float = flag("Part of each head that is rotated.", FRACTION, default=1.0, relations=_OF_ROPE)
    rotary_scaling: RotaryScaling | None = computed(
        derived.rotary_scaling,
        Flag(
            "--rotary-seq-len-interpolation-factor",
            "Divide positions by this, for sequences as much longer.",
            FROM_1,
            relations=Relations(
                needs=(_IS_ROPE,),
                excludes=("--use-rope-scaling",),
                idle=lambda flags: flags["--rotary-seq-len-interpolation-factor"] == 1,
            ),
        ),
        switch(
            "--use-rope-scaling",
            "Divide the frequency of long wavelengths alone, as Llama 3.1 does.",
            relations=_OF_ROPE,
        ),
        Flag("--rope-scaling-factor", "With that: by this.", FROM_1, default=8.0, relations=_OF_ROPE_SCALING),
        Flag(
            "--hetero-rope-low-freq-factor",
            "With that: where wavelengths are long.",
            POSITIVE,
            default=1.0,
            relations=_OF_ROPE_SCALING,
        ),
        Flag(
            "--hetero-rope-high-freq-factor",
            "With that: where they are short and kept.",
            POSITIVE,
            default=4.0,
            relations=_OF_ROPE_SCALING,
        ),
        Flag(
            "--hetero-rope-original-max-positions",
            "With that: positions before the scaling.",
            COUNT,
            default=8192,
            relations=_OF_ROPE_SCALING,
        ),
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("Norm before attention and MLP.", default="LayerNorm")
    norm_epsilon: float = flag("Added to the variance in norms.", POSITIVE, default=1e-5)
    activation: Activation = computed(
        derived.activation,
        switch("--swiglu", "Gate the MLP with SiLU; without it the MLP is a plain one with GeLU."),
        switch(
            "--hetero-relu",
            "Give the plain MLP ReLU in place of GeLU, as OPT has it.",
            relations=Relations(excludes=("--swiglu",)),
        ),
    )
    linear_bias: bool = off_switch("--disable-bias-linear", "No biases in linear layers.")
    qkv_bias: bool = computed(
        derived.qkv_bias,
        switch("--add-qkv-bias", "With --disable-bias-linear: keep the bias of queries, keys and values."),
    )
    proj_bias: bool = flag(
        "With --disable-bias-linear: keep the bias of attention's output.",
        name="--hetero-add-proj-bias",
        default=False,
        relations=Relations(needs=(given("--disable-bias-linear"),)),
    )
    qk_layernorm: bool = flag("Normalize queries and keys of each head.", default=False)
    tied_embeddings: bool = off_switch(
        "--untie-embeddings-and-output-weights", "Give the output layer a matrix of its own."
    )
    vocab_size: int | None = flag(
        "Tokens of the model, at least the tokenizer's; without it, the tokenizer's.", COUNT, default=None
    )
    make_vocab_size_divisible_by: int = computed(
        derived.make_vocab_size_divisible_by,
        Flag(
            "--make-vocab-size-divisible-by",
            "Pad the embedding to a multiple of this. Unlike Megatron-LM, the tensor-parallel size plays no part.",
            COUNT,
            default=VOCABULARY_DIVISOR,
            relations=Relations(
                idle=lambda flags: (
                    flags["--make-vocab-size-divisible-by"] == 1 and derived.is_vocabulary_unpadded(flags)
                )
            ),
        ),
        switch(
            _NO_PADDING[0],
            "Do not pad the embedding. Every tensor-parallel size of the plan must divide the vocabulary.",
            relations=_OF_NO_PADDING,
        ),
        switch(_NO_PADDING[1], "The same.", relations=_OF_NO_PADDING),
    )
    num_experts: int | None = flag(
        "Make every MLP a mixture of this many experts; 0 for none.", or_off(COUNT), default=None
    )
    moe_router_topk: int = flag("Experts that each token visits.", COUNT, default=2, relations=_OF_EXPERTS)
    moe_ffn_hidden_size: int | None = computed(
        derived.moe_ffn_hidden_size,
        Flag(
            "--moe-ffn-hidden-size",
            "Width of one expert; without it, --ffn-hidden-size.",
            COUNT,
            relations=_OF_EXPERTS,
        ),
    )


def model_spec(config: ModelConfig, *, tokenizer_vocab_size: int) -> ModelSpec:
    """Complete the model with its vocabulary: the configured size, else the tokenizer's, padded.

    Raises:
        ConfigError: the configured vocabulary is smaller than the tokenizer's.
    """
    shape = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    divisible_by: int = shape.pop("make_vocab_size_divisible_by")
    configured: int | None = shape.pop("vocab_size")
    vocab_size = tokenizer_vocab_size if configured is None else configured
    if vocab_size < tokenizer_vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is below the {tokenizer_vocab_size} tokens of the tokenizer: "
            f"raise it to at least {tokenizer_vocab_size}, or leave it out"
        )
    padded = padded_vocab_size(vocab_size, divisible_by=divisible_by)
    return ModelSpec(**shape, vocab_size=vocab_size, padded_vocab_size=padded)


KERNELS = "model: kernels"
"""A group of ``--help`` beside that of the config."""

_HAS_FP8 = Condition(lambda flags: flags["--fp8-format"] or derived.has_plan_file(flags), "--fp8-format")
_HAS_AUXILIARY_LOSS = Condition(
    lambda flags: flags["--moe-router-load-balancing-type"] != "none",
    "--moe-router-load-balancing-type aux_loss or seq_aux_loss",
)
_OF_DELAYED_SCALES = Relations(needs=(_HAS_FP8, equals("--fp8-recipe", "delayed")))

STAGE_OPTIONS = {
    "attention_dropout": flag("Share of attention weights dropped.", BELOW_1, default=0.1, group="regularization"),
    "hidden_dropout": flag(
        "Share of the outputs of attention and MLP dropped.", BELOW_1, default=0.1, group="regularization"
    ),
    "moe_router_load_balancing": computed(
        derived.moe_router_load_balancing,
        Flag(
            "--moe-router-load-balancing-type",
            "Extra loss that spreads tokens over the experts: aux_loss over each microbatch, which depends on the "
            "plan; seq_aux_loss over each sequence, which does not (recommended); or none.",
            # A near name is another loss, such as global_aux_loss.
            dataclasses.replace(one_of(*get_args(AuxiliaryLoss)), choices=()),
            default="aux_loss",
            relations=_OF_EXPERTS,
        ),
    ),
    "moe_aux_loss_coeff": flag(
        "Weight of that loss.",
        NOT_NEGATIVE,
        relations=Relations(needs=(given("--num-experts"), _HAS_AUXILIARY_LOSS)),
    ),
    "init_method_std": flag("Standard deviation of the initial weights.", POSITIVE),
    "transformer_impl": flag(
        "Whose layers: TransformerEngine's, megatron-core's own, or the former wherever they can run."
    ),
    "gradient_accumulation_fusion": off_switch(
        "--no-gradient-accumulation-fusion",
        "Add weights' gradients of each microbatch to their sum in a pass of its own, not inside the product.",
        group=KERNELS,
    ),
    "attention_backend": flag(
        "Kernels that attention tries first: FlashAttention; cuDNN's and torch's fused ones; products and softmax; "
        "local is torch's attention in TransformerEngine's layers, too.",
        group=KERNELS,
    ),
    "masked_softmax_fusion": off_switch(
        "--no-masked-softmax-fusion",
        "Accepted for Megatron-LM's scripts: no attention here has a softmax of its own.",
        group=KERNELS,
    ),
    "bias_gelu_fusion": off_switch(
        "--no-bias-gelu-fusion", "On CUDA, without --swiglu: bias and GeLU are two kernels.", group=KERNELS
    ),
    "bias_swiglu_fusion": off_switch(
        "--no-bias-swiglu-fusion", "On CUDA, with --swiglu: bias and SwiGLU are several kernels.", group=KERNELS
    ),
    "bias_dropout_fusion": off_switch(
        "--no-bias-dropout-fusion", "On CUDA: bias, dropout and residual sum are several kernels.", group=KERNELS
    ),
    "rope_fusion": off_switch(
        "--no-rope-fusion", "In TransformerEngine's layers: rotate by torch's kernels.", group=KERNELS
    ),
    "persist_layer_norm": off_switch(
        "--no-persist-layer-norm", "Where Apex normalizes: not by its persistent kernel.", group=KERNELS
    ),
    "cross_entropy_loss_fusion": computed(
        itemgetter("--cross-entropy-loss-fusion"),
        switch(
            "--cross-entropy-loss-fusion",
            "Compute the loss of a token by megatron-core's compiled kernels, which round its gradient to bf16.",
            KERNELS,
        ),
        Flag(
            "--cross-entropy-fusion-impl",
            "Accepted for Megatron-LM's scripts.",
            only(
                "native",
                "TransformerEngine's fused loss loses gradients until 2.17, and Megatron-LM 0.19 refuses all of it",
            ),
            default="native",
            group=KERNELS,
        ),
    ),
    "fp8_format": flag(
        "Format of the stages that the plan has in fp8, and without a plan file of all: e4m3, or hybrid, which has "
        "gradients in e5m2. Needs TransformerEngine.",
        group="precision",
        relations=Relations(
            needs=(Condition(lambda flags: flags["--bf16"] or derived.has_plan_file(flags), "--bf16"),)
        ),
    ),
    "fp8_recipe": flag(
        "With that: how scales are found, as TransformerEngine calls it.",
        group="precision",
        relations=Relations(needs=(_HAS_FP8,)),
    ),
    "fp8_amax_history_len": flag(
        "With --fp8-recipe delayed: microbatches whose largest values a scale looks back on.",
        COUNT,
        group="precision",
        relations=_OF_DELAYED_SCALES,
    ),
    "fp8_amax_compute_algo": flag(
        "With --fp8-recipe delayed: take the newest of these values or the largest.",
        group="precision",
        relations=_OF_DELAYED_SCALES,
    ),
}
"""Where the values of :class:`hetero.runtime.options.StageOptions` come from."""
