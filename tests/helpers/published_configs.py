"""Published configurations: the ``config.json`` of ``huggingface.co/NAME``, from copies in public repositories.

Order of keys and spelling of numbers are not theirs. unsloth's and SmolLM2-1.7B-Instruct's are put together from the
files of their families and the keys that they add.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
_LLAMA_OF_2023: dict[str, Any] = {
    "architectures": ["LLaMAForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_sequence_length": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pad_token_id": -1,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
_SMOLLM2 = _LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "vocab_size": 49152,
}
_LLAMA_3_2_1B = _LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "vocab_size": 128256,
}
_OPT: dict[str, Any] = {
    "_name_or_path": "facebook/opt-125m",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.21.0.dev0",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
OPT_350M: Mapping[str, Any] = MappingProxyType(
    _OPT
    | {
        "_name_or_path": "facebook/opt-350m",
        "do_layer_norm_before": False,
        "ffn_dim": 4096,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "transformers_version": "4.19.2",
        "word_embed_proj_dim": 512,
    }
)
"""The one OPT with norms behind attention and MLP, and an embedding that is narrower than its layers."""

_MISTRAL_V01: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_V01: Mapping[str, Any] = MappingProxyType(_MISTRAL_V01)
"""Its window is shorter than its longest sequence."""

PUBLISHED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "openai-community/gpt2": _GPT2,
        "openai-community/gpt2-medium": _GPT2
        | {"n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True},
        "openai-community/gpt2-xl": _GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
        "distilbert/distilgpt2": _GPT2
        | {
            "_num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "n_layer": 6,
            "gradient_checkpointing": False,
            "n_inner": None,
        },
        "HuggingFaceTB/SmolLM2-135M": _SMOLLM2,
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": _SMOLLM2
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "num_key_value_heads": 32,
            "pad_token_id": 2,
            "rope_theta": 130000,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        },
        "unsloth/Llama-3.2-1B": _LLAMA_3_2_1B
        | {"pad_token_id": 128004, "unsloth_fixed": True, "unsloth_version": "2024.9"},
        "decapoda-research/llama-7b-hf": _LLAMA_OF_2023,
        "lmsys/vicuna-7b-v1.5": _LLAMA
        | {"_name_or_path": "vicuna-7b-v1.5", "pad_token_id": 0, "transformers_version": "4.31.0"},
        "lmsys/vicuna-7b-v1.5-16k": _LLAMA
        | {
            "_name_or_path": "vicuna-7b-v1.5-16k",
            "max_sequence_length": 16384,
            "pad_token_id": 0,
            "rope_scaling": {"factor": 4.0, "type": "linear"},
            "transformers_version": "4.31.0",
        },
        "mistralai/Mistral-7B-v0.3": _MISTRAL_V01
        | {"rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.42.0.dev0", "vocab_size": 32768},
        "facebook/opt-125m": _OPT,
        "facebook/opt-13b": _OPT
        | {
            "_name_or_path": "facebook/opt-13b",
            "_remove_final_layer_norm": False,
            "ffn_dim": 20480,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "output_projection": True,
            "word_embed_proj_dim": 5120,
        },
    }
)
"""By name, files that are read as they are."""
