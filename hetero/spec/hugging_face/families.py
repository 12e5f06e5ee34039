"""Lists every key that the configurations of each family have, with the rule that accounts for it.

Defaults are those of the family's class in ``transformers``; tests/unit/spec/test_hugging_face_keys.py holds the tables
against these classes, key by key.
"""

from collections.abc import Mapping
from types import MappingProxyType

from hetero.spec.hugging_face.generation import GENERATION_PARAMETERS
from hetero.spec.hugging_face.keys import (
    COUNT,
    COUNT_FROM_0,
    NO_MODEL_CODE,
    OBJECT,
    POSITIVE,
    SWITCH,
    TEXTS,
    Ignored,
    KeyRule,
    KeyTable,
    Only,
    Read,
    SameAs,
    texts_of,
)

GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
"""The tanh form of GELU, which differs from the exact one (``gelu``) by up to 5e-4."""

_DROPOUT = Ignored("dropout belongs to a run: --attention-dropout and --hidden-dropout")
_NO_BIAS = Only((False,), "the linear layers of this family have no biases but those that its class gives them")
_NO_WINDOW = "attention sees the whole sequence"


def _ignored(because: str, keys: str) -> dict[str, KeyRule]:
    return dict.fromkeys(keys.split(), Ignored(because))


_COMMON: dict[str, KeyRule] = {
    **_ignored(
        "says who wrote the file, or for which program",
        "model_type transformers_version _name_or_path name_or_path _commit_hash unsloth_fixed unsloth_version "
        "transformers.js_config",
    ),
    **_ignored(
        "the type that weights are stored in; every tensor says its own",
        "dtype torch_dtype use_bfloat16 _pre_quantization_dtype",
    ),
    **_ignored("initial weights are drawn with --init-method-std", "initializer_range init_std"),
    **_ignored(
        "names tokens, which the tokenizer does; samples here have no padding",
        "bos_token_id eos_token_id eos_token_ids pad_token_id sep_token_id decoder_start_token_id tokenizer_class "
        "prefix",
    ),
    **_ignored(
        "what a forward returns beside the logits",
        "output_hidden_states output_attentions return_dict use_return_dict tie_last_hidden_states",
    ),
    **_ignored(
        "which kernel computes, or in which pieces",
        "attn_implementation _attn_implementation _attn_implementation_autoset experts_implementation "
        "_experts_implementation chunk_size_feed_forward torchscript pretraining_tp gradient_checkpointing "
        "_flash_attn_2_enabled use_flash_attention_2 _attn_implementation_internal xla_device",
    ),
    **_ignored(
        "of heads for other tasks, which ``architectures`` would name",
        "id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params tf_legacy_loss",
    ),
    **_ignored(
        "of encoders, which these families have none of; that they are decoders goes without saying",
        "is_decoder tie_encoder_decoder cross_attention_hidden_size",
    ),
    **_ignored(
        "of text generation",
        f"use_cache output_past {' '.join(GENERATION_PARAMETERS)}",
    ),
    **_ignored("of fine-tuning: noise that its trainer adds to embeddings", "neftune_noise_alpha"),
    **_ignored(
        "the longest sequence of a tokenizer or a training; ``max_position_embeddings`` is the model's",
        "max_sequence_length model_max_length",
    ),
    "auto_map": Read((), NO_MODEL_CODE.or_null(), default=None),
    "quantization": Only((None,), "weights are plain floating-point numbers"),
    "is_encoder_decoder": Only((False,), "there is no encoder"),
    "add_cross_attention": Only((False,), "there is no encoder"),
    "per_layer_config": Only((None, {}), "all layers are alike"),
    "pruned_heads": Only(({}, None), "all layers have all heads"),
    "quantization_config": Only((None,), "weights are plain floating-point numbers"),
    "vocab_size": Read(("vocab_size", "padded_vocab_size"), COUNT),
}

_LLAMA_LIKE: dict[str, KeyRule] = {
    **_COMMON,
    "hidden_size": Read(("hidden_size", "kv_channels"), COUNT),
    "intermediate_size": Read(("ffn_hidden_size",), COUNT),
    "num_hidden_layers": Read(("num_layers",), COUNT),
    "num_attention_heads": Read(("num_attention_heads", "num_query_groups", "kv_channels"), COUNT),
    "num_key_value_heads": Read(("num_query_groups",), COUNT.or_null(), default=None),
    "head_dim": Read(("kv_channels",), COUNT.or_null(), default=None),
    "hidden_act": Only(("silu", "swish"), "the MLP is gated with SiLU"),
    "rms_norm_eps": Read(("norm_epsilon",), POSITIVE, default=1e-6),
    "tie_word_embeddings": Read(("tied_embeddings",), SWITCH, default=False),
    "attention_dropout": _DROPOUT,
    "attention_bias": _NO_BIAS,
    "mlp_bias": _NO_BIAS,
    "rope_theta": Read(("rotary_base",), POSITIVE.or_null(), default=None),
    "rope_scaling": Read(("rotary_base", "rotary_scaling"), OBJECT.or_null(), default=None),
    "rope_parameters": Read(("rotary_base", "rotary_scaling"), OBJECT.or_null(), default=None),
    "partial_rotary_factor": Only((None, 1.0), "heads rotate whole in this family"),
    "sliding_window": Only((None,), _NO_WINDOW),
    "use_sliding_window": Only((False,), _NO_WINDOW),
    "layer_types": Read((), texts_of("full_attention").or_null(), default=None),
}

_LLAMA: dict[str, KeyRule] = {
    **_LLAMA_LIKE,
    "architectures": Read((), texts_of("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM").or_null(), default=None),
    **_ignored("nanotron's name of the family", "is_llama_config"),
    "rope_interleaved": Only((False,), "rotations pair channels that are half a head apart"),
    "max_position_embeddings": Read(("max_position_embeddings",), COUNT, default=2048),
    "attention_bias": Read(("linear_bias", "qkv_bias", "proj_bias"), SWITCH, default=False),
    "mlp_bias": Read(("linear_bias", "proj_bias"), SWITCH, default=False),
}

_MISTRAL: dict[str, KeyRule] = {
    **_LLAMA_LIKE,
    "architectures": Read((), texts_of("MistralForCausalLM", "MistralModel").or_null(), default=None),
    "max_position_embeddings": Read(("max_position_embeddings",), COUNT, default=131_072),
    "num_key_value_heads": Read(("num_query_groups",), COUNT, default=8),
    "sliding_window": Read((), COUNT.or_null(), default=4096),
    "use_sliding_window": Ignored("this family reads ``sliding_window`` alone"),
}

_MIXTRAL: dict[str, KeyRule] = {
    **_MISTRAL,
    "architectures": Read((), texts_of("MixtralForCausalLM", "MixtralModel").or_null(), default=None),
    "sliding_window": Read((), COUNT.or_null(), default=None),
    "rms_norm_eps": Read(("norm_epsilon",), POSITIVE, default=1e-5),
    "intermediate_size": Read(("ffn_hidden_size", "moe_ffn_hidden_size"), COUNT),
    "num_local_experts": Read(("num_experts",), COUNT),
    "num_experts_per_tok": Read(("moe_router_topk",), COUNT, default=2),
    "output_router_logits": Only((False,), "the loss that spreads tokens over experts is --moe-aux-loss-coeff"),
    "router_aux_loss_coef": Ignored("that loss belongs to a run: --moe-aux-loss-coeff"),
    "router_jitter_noise": Only((0.0,), "there is no noise before the router"),
}

_QWEN: dict[str, KeyRule] = {
    **_LLAMA_LIKE,
    "max_position_embeddings": Read(("max_position_embeddings",), COUNT, default=32_768),
    "num_key_value_heads": Read(("num_query_groups",), COUNT.or_null(), default=32),
    "sliding_window": Read((), COUNT.or_null(), default=4096),
    "use_sliding_window": Read((), SWITCH, default=False),
    "max_window_layers": Read((), COUNT_FROM_0, default=28),
    "layer_types": Read((), TEXTS.or_null(), default=None),
}

_QWEN2: dict[str, KeyRule] = {
    **_QWEN,
    "architectures": Read((), texts_of("Qwen2ForCausalLM", "Qwen2Model").or_null(), default=None),
    "head_dim": Read(("kv_channels",), COUNT, default=None),
    "attention_bias": Ignored("queries, keys and values have biases and the output has none, whatever it says"),
    "use_mrope": Only((False,), "positions have one dimension"),
}

_QWEN3: dict[str, KeyRule] = {
    **_QWEN,
    "architectures": Read((), texts_of("Qwen3ForCausalLM", "Qwen3Model").or_null(), default=None),
    "head_dim": Read(("kv_channels",), COUNT, default=128),
    "attention_bias": Read(("qkv_bias", "proj_bias"), SWITCH, default=False),
}

_GPT2: dict[str, KeyRule] = {
    **_COMMON,
    **_ignored(
        "of heads for other tasks, which ``architectures`` would name",
        "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
    ),
    "architectures": Read((), texts_of("GPT2LMHeadModel", "GPT2Model").or_null(), default=None),
    "n_layer": Read(("num_layers",), COUNT),
    "n_embd": Read(("hidden_size", "kv_channels", "ffn_hidden_size"), COUNT),
    "n_head": Read(("num_attention_heads", "num_query_groups", "kv_channels"), COUNT),
    "n_inner": Read(("ffn_hidden_size",), COUNT.or_null(), default=None),
    "n_positions": Read(("max_position_embeddings",), COUNT),
    "n_ctx": SameAs("n_positions"),
    # transformers' other names for the same sizes.
    "hidden_size": SameAs("n_embd"),
    "max_position_embeddings": SameAs("n_positions"),
    "num_attention_heads": SameAs("n_head"),
    "num_hidden_layers": SameAs("n_layer"),
    "n_special": Only((0,), "all tokens are in vocab_size"),
    "predict_special_tokens": Ignored("whether those extra tokens have logits, of which there are none"),
    "activation_function": Only((*GELU_TANH, "relu"), "GELU is its tanh form"),
    "layer_norm_epsilon": Read(("norm_epsilon",), POSITIVE, default=1e-5),
    "tie_word_embeddings": Read(("tied_embeddings",), SWITCH, default=True),
    "resid_pdrop": _DROPOUT,
    "embd_pdrop": _DROPOUT,
    "attn_pdrop": _DROPOUT,
    "scale_attn_weights": Only((True,), "attention scores are divided by the square root of a head's size"),
    "scale_attn_by_inverse_layer_idx": Only((False,), "attention scores are scaled alike in all layers"),
    "reorder_and_upcast_attn": Ignored("in which order and precision attention rounds"),
}

_OPT: dict[str, KeyRule] = {
    **_COMMON,
    "architectures": Read((), texts_of("OPTForCausalLM", "OPTModel").or_null(), default=None),
    "hidden_size": Read(("hidden_size", "kv_channels"), COUNT),
    "num_hidden_layers": Read(("num_layers",), COUNT),
    "num_attention_heads": Read(("num_attention_heads", "num_query_groups", "kv_channels"), COUNT),
    "ffn_dim": Read(("ffn_hidden_size",), COUNT),
    "max_position_embeddings": Read(("max_position_embeddings",), COUNT),
    "word_embed_proj_dim": SameAs("hidden_size"),
    "activation_function": Only((*GELU_TANH, "relu"), "GELU is its tanh form", default="relu"),
    "tie_word_embeddings": Read(("tied_embeddings",), SWITCH, default=True),
    "do_layer_norm_before": Only((True,), "norms stand before attention and MLP"),
    "_remove_final_layer_norm": Only((False,), "a norm stands before the head"),
    "enable_bias": Only((True,), "all linear layers have biases"),
    "output_projection": Only((True,), "logits are computed"),
    # Of Galactica's files; transformers reads neither.
    "learned_embeddings": Only((True,), "positions are learned"),
    "scale_embeddings": Only((False,), "embeddings are not scaled"),
    "layer_norm_elementwise_affine": Only((True,), "norms have weights and biases"),
    "dropout": _DROPOUT,
    "attention_dropout": _DROPOUT,
    "activation_dropout": Only((0.0,), "the inside of the MLP has no dropout"),
    "layerdrop": Only((0.0,), "no layer is left out"),
}

TABLES: Mapping[str, KeyTable] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _MISTRAL,
        "qwen2": _QWEN2,
        "qwen3": _QWEN3,
        "mixtral": _MIXTRAL,
        "gpt2": _GPT2,
        "opt": _OPT,
    }
)
