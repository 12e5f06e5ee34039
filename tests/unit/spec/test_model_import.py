"""Models from files: our own fields, and Hugging Face configurations."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.spec.model import RotaryScaling
from hetero.spec.model_import import from_hugging_face, load_model
from tests.helpers.published_configs import MISTRAL_V01, OPT_350M, PUBLISHED

ROOT = Path(__file__).parents[3]

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}

FAMILY_KEYS = {"mixtral": {"num_local_experts": 8}}

GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


MIXTRAL = LLAMA | {"model_type": "mixtral"} | FAMILY_KEYS["mixtral"]

OPT = {
    "model_type": "opt",
    "activation_function": "gelu_new",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
}


def imported(config: dict[str, Any], **changes: Any) -> Any:
    return from_hugging_face({**config, **changes}, source="config.json")


def test_llama() -> None:
    model = imported(LLAMA)
    assert (model.num_layers, model.num_query_groups, model.kv_channels) == (22, 4, 64)
    assert model.activation == "swiglu"
    assert model.normalization == "RMSNorm"
    assert not model.qkv_bias
    assert model.padded_vocab_size == 32000


def test_qwen2_has_biases_on_queries_keys_and_values() -> None:
    assert imported(LLAMA, model_type="qwen2").qkv_bias


def test_rotary_positions_where_transformers_5_puts_them() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    assert imported(config, rope_parameters=rope).rotary_base == 500_000
    assert imported(config, rope_parameters={"rope_theta": 0.5}).rotary_base == 0.5


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_scaled_rotary_positions(key: str, type_key: str) -> None:
    """``{"type": "linear"}`` under the old key was taken for no scaling at all."""
    assert imported(LLAMA, **{key: {type_key: "default"}}).rotary_scaling is None
    linear = imported(LLAMA, **{key: {type_key: "linear", "factor": 4}})
    assert linear.rotary_scaling == RotaryScaling(kind="linear", factor=4.0)
    llama3 = imported(LLAMA, **{key: {type_key: "llama3", **LLAMA3}})
    assert llama3.rotary_scaling == RotaryScaling(kind="llama3", **LLAMA3)
    without = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    filled = imported(LLAMA, **{key: {type_key: "llama3", **without}}).rotary_scaling
    assert filled.original_max_position_embeddings == LLAMA["max_position_embeddings"]
    for other in ("dynamic", "yarn", "longrope", ["linear"], None):
        with pytest.raises(ConfigError, match=rf"{key} is of type .*supported are default, linear, llama3"):
            imported(LLAMA, **{key: {type_key: other, "factor": 4}})


SCALED = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"factor": 8}}, r"rope_scaling\.factor \(its value is 8\) is no key of type default"),
        ({"rope_scaling": {"type": "linear"}}, "missing key 'factor' of rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, r"rope_scaling\.factor is '4', must be a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rotary_scaling: factor is 0.5, must be at least 1"),
        ({"rope_scaling": {**SCALED, "type": "default"}}, "has the rope_type 'linear' and the type 'default'"),
        (
            {"rope_scaling": {**SCALED, "partial_rotary_factor": 0.5}},
            "factor is 0.5: heads rotate whole",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": SCALED, "rope_scaling": {**SCALED, "factor": 2.0}}, "say different things"),
        (
            {"rope_parameters": {"rope_theta": 5e5}},
            "is 500000.0 in rope_parameters and 10000.0 in rope_theta",
        ),
        (
            {"rope_theta": None, "rope_scaling": SCALED, "rope_parameters": {**SCALED, "rope_theta": 5e5}},
            "rope_theta is in rope_parameters alone",
        ),
        ({"rope_parameters": {"full_attention": SCALED}}, "full_attention .* is no key of type default"),
        ({"rope_parameters": [1]}, "rope_parameters is .*, must be an object, or null"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor is 4.0 and high"),
        ({"rope_theta": True}, "rope_theta is True, must be a number above 0, or null"),
        ({"original_max_position_embeddings": 2048}, "'original_max_position_embeddings' .2048.* is not accounted for"),
    ],
)
def test_rotary_positions_that_mean_nothing_or_two_things(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: .*{message}"):
        imported(LLAMA, **changes)


WINDOW = "sliding_window 1024 is below max_position_embeddings 4096"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 1024, "use_sliding_window": False}, WINDOW),
        ("mixtral", {"sliding_window": 1024, "use_sliding_window": False}, WINDOW),
        ("mistral", {"sliding_window": 4096}, None),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"max_position_embeddings": 8192}, "sliding_window 4096 is below max_position_embeddings 8192"),
        ("mixtral", {"max_position_embeddings": 8192}, None),
        ("qwen2", {"sliding_window": 1024}, None),
        ("qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 22}, None),
        ("qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 21}, WINDOW),
        ("qwen3", {"sliding_window": 8192, "use_sliding_window": True, "max_window_layers": 0}, None),
        ("qwen3", {"layer_types": ["full_attention"] * 22}, None),
        ("qwen3", {"layer_types": ["full_attention"] * 21}, "layer_types has 21 entries for num_hidden_layers 22"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 22}, "there is no window"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 22, "use_sliding_window": True, "sliding_window": 1024},
            WINDOW,
        ),
        ("qwen3", {"layer_types": ["chunked_attention"] * 22}, "layer_types has 'chunked_attention'"),
        ("llama", {"layer_types": ["sliding_attention"] * 22}, "must be a list with nothing but full_attention"),
        ("llama", {"sliding_window": 4096}, "sliding_window is 4096"),
    ],
)
def test_windows_are_accepted_where_no_sequence_exceeds_them(
    family: str, changes: dict[str, Any], message: str | None
) -> None:
    """Mistral and Mixtral have theirs whatever ``use_sliding_window`` says; the files of others may have none."""
    config = LLAMA | FAMILY_KEYS.get(family, {}) | {"model_type": family}
    if message is None:
        longest = changes.get("max_position_embeddings", 4096)
        assert imported(config, **changes) == dataclasses.replace(imported(config), max_position_embeddings=longest)
        return
    with pytest.raises(ConfigError, match=message):
        imported(config, **changes)


def test_biases() -> None:
    def biases(family: str, **changes: bool) -> tuple[bool, bool, bool]:
        model = imported(LLAMA, model_type=family, **changes)
        return model.linear_bias, model.qkv_bias, model.proj_bias

    assert biases("llama", attention_bias=True) == (False, True, True)
    assert biases("llama", attention_bias=True, mlp_bias=True) == (True, True, False)
    assert biases("qwen3", attention_bias=True) == (False, True, True)
    assert biases("qwen2", attention_bias=True) == biases("qwen2") == (False, True, False)
    with pytest.raises(ConfigError, match="mlp_bias is true and attention_bias false"):
        biases("llama", mlp_bias=True)
    with pytest.raises(ConfigError, match="attention_bias is True, GPTModel here has False"):
        biases("mistral", attention_bias=True)


def test_qwen3_and_mixtral() -> None:
    assert imported(LLAMA, model_type="qwen3").qk_layernorm
    mixtral = imported(LLAMA, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert (mixtral.num_experts, mixtral.moe_router_topk, mixtral.moe_ffn_hidden_size) == (8, 2, 5632)


def test_gpt2() -> None:
    model = imported(GPT2)
    assert (model.ffn_hidden_size, model.position_embedding, model.tied_embeddings) == (3072, "learned_absolute", True)
    assert (model.vocab_size, model.padded_vocab_size) == (50257, 50304)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"model_type": "lama"}, "model_type 'lama' is not supported, those that are: llama, mistral, .*, opt;"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, GPTModel here has None"),
        (
            LLAMA,
            {"atention_bias": True},
            "key 'atention_bias' .True. .did you mean 'attention_bias'.. is not accounted",
        ),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures is .*LlamaForCausalLM"),
        (LLAMA, {"num_hidden_layers": "22"}, "num_hidden_layers is '22', must be a whole number of at least 1"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, must be a number above 0"),
        (LLAMA, {"tie_word_embeddings": None}, "tie_word_embeddings is None, must be true or false"),
        (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok is 1: Mixtral then weighs its expert with 1"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (MIXTRAL, {"output_router_logits": True}, "--moe-aux-loss-coeff"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "attention scores are scaled alike in all layers"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights is False"),
        (GPT2, {"hidden_size": 1024}, "hidden_size is 1024 and n_embd 768: they must be equal"),
        (GPT2, {"n_special": 3}, "n_special is 3, GPTModel here has 0: all tokens are in vocab_size"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved is True, GPTModel here has False: rotations pair"),
        (LLAMA, {"auto_map": {"AutoModel": "a.B"}}, "auto_map is .*without a model's class.*take it out if"),
        (LLAMA, {"auto_map": {"AutoConfig": "a.C", "AutoModelForCausalLM": "a.B"}}, "auto_map is .*take it out if"),
        (LLAMA, {"quantization": {"bits": 4}}, "quantization is {'bits': 4}, GPTModel here has None"),
        (GPT2, {"activation_function": "gelu"}, "GELU is its tanh form"),
        (GPT2, {"add_cross_attention": True}, "there is no encoder"),
        (GPT2, {"n_ctx": 512}, "n_ctx is 512 and n_positions 1024: they must be equal"),
        (GPT2, {"n_head": 11}, "n_head 11 does not divide n_embd 768"),
        (OPT, {"activation_function": "gelu"}, "activation_function is 'gelu', GPTModel here has 'gelu_new' or"),
        (OPT, {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32 and hidden_size 768: they must be equal"),
        (OPT, {"enable_bias": False}, "enable_bias is False"),
        (OPT, {"layerdrop": 0.1}, "layerdrop is 0.1"),
    ],
)
def test_what_would_be_computed_differently_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(config, **changes)


def test_relu() -> None:
    assert imported(OPT, activation_function="relu") == dataclasses.replace(imported(OPT), activation="relu")
    assert imported(GPT2, activation_function="relu").activation == "relu"


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_as_they_are_published_are_read(name: str) -> None:
    config = PUBLISHED[name]
    model = imported(dict(config))
    assert model.num_layers == config.get("n_layer", config.get("num_hidden_layers"))
    assert model.activation == {"gelu_new": "gelu", "relu": "relu", None: "swiglu"}[config.get("activation_function")]


def test_published_files_of_models_that_are_computed_differently_are_refused() -> None:
    """Both reasons at once for the OPT with norms at other places."""
    with pytest.raises(ConfigError) as error:
        imported(dict(OPT_350M))
    wrong = str(error.value).splitlines()
    assert [line.split(", ")[0] for line in wrong] == [
        "config.json: word_embed_proj_dim is 512 and hidden_size 1024: they must be equal",
        "config.json: do_layer_norm_before is False",
    ]
    with pytest.raises(ConfigError, match="sliding_window 4096 is below max_position_embeddings 32768"):
        imported(dict(MISTRAL_V01))


def test_all_that_is_wrong_with_a_file_is_said_at_once() -> None:
    """A line for all unknown keys, and one for each value."""
    without = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    with pytest.raises(ConfigError) as error:
        imported(without, frobnicate=3, hidden_act="gelu", blend=[1, 2], attention_bias=None)
    assert str(error.value).splitlines() == [
        "config.json: keys 'frobnicate' (3), 'blend' ([1, 2]) are not accounted for in llama models here; take them "
        "out of the file if the model computes the same without them",
        "config.json: missing key 'vocab_size' of a llama configuration",
        "config.json: hidden_act is 'gelu', GPTModel here has 'silu' or 'swish': the MLP is gated with SiLU; to plan "
        "for the same shape, write a model file as in scripts/presets/models/",
        "config.json: attention_bias is None, must be true or false",
    ]


def test_what_keys_say_together_is_checked_with_the_keys() -> None:
    """Code of its own and a kind of rotary positions came in two runs."""
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192, "finetuned": True}
    code = {"AutoModelForCausalLM": "modeling_mistral_yarn.MistralForCausalLM"}
    with pytest.raises(ConfigError) as error:
        imported(dict(MISTRAL_V01), sliding_window=131_072, rope_scaling=yarn, auto_map=code)
    wrong = str(error.value).splitlines()
    assert [line.split(", ")[0] for line in wrong] == [
        "config.json: auto_map is {'AutoModelForCausalLM': 'modeling_mis...alForCausalLM'}",
        "config.json: rope_scaling is of type 'yarn'",
    ]


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("learned_positions", {}),
        ("hidden_dropout", {}),
        ("layer_norm_eps", {}),
        ("scale_embeddings", {"tie_word_embeddings": False}),
        ("rope_thetas", {"rope_theta": 10000.0}),
    ],
)
def test_a_key_of_another_program_is_no_misspelt_one(key: str, changes: dict[str, Any]) -> None:
    """The hint led to another model, or to a key that the file has."""
    with pytest.raises(ConfigError, match="is not accounted for") as error:
        imported(LLAMA, **{key: 1}, **changes)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_neo", "llama4", "qwen4", "gemma"])
def test_another_model_is_no_misspelt_one(family: str) -> None:
    with pytest.raises(ConfigError) as error:
        imported(LLAMA, model_type=family)
    assert "did you mean" not in str(error.value)
    assert (
        f"model_type {family!r} is not supported, those that are: llama, mistral, qwen2, qwen3, mixtral, gpt2"
        in str(error.value)
    )


def test_an_early_file_without_a_model_type_is_no_model_file_of_ours(tmp_path: Path) -> None:
    """The message named 34 keys of our own model files."""
    path = tmp_path / "config.json"
    early = {key: value for key, value in PUBLISHED["openai-community/gpt2"].items() if key != "model_type"}
    path.write_text(json.dumps(early), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: missing key 'model_type'; add the one of the model: llama, "):
        load_model(path)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="missing key 'n_embd' of a gpt2 configuration"):
        from_hugging_face({k: v for k, v in GPT2.items() if k != "n_embd"}, source="config.json")


def test_what_a_file_leaves_out_is_the_familys_own() -> None:
    def without(config: dict[str, Any], *keys: str, **changes: Any) -> Any:
        return imported({key: value for key, value in config.items() if key not in keys}, **changes)

    assert without(LLAMA, "num_key_value_heads").num_query_groups == 32
    assert without(LLAMA, "num_key_value_heads", model_type="mistral").num_query_groups == 8
    assert without(LLAMA, model_type="qwen3").kv_channels == 128, "not hidden_size / heads"
    assert without(MIXTRAL, "rope_theta").rotary_base == 1_000_000
    assert without(LLAMA, "rms_norm_eps").norm_epsilon == 1e-6
    assert without(MIXTRAL, "rms_norm_eps").norm_epsilon == 1e-5
    assert without(GPT2).tied_embeddings
    assert without(OPT, "activation_function").activation == "relu"
    assert without(GPT2, "activation_function").activation == "gelu"


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2), encoding="utf-8")
    assert load_model(path) == imported(GPT2)


@pytest.mark.parametrize("path", sorted((ROOT / "scripts/presets/models").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_load(path: Path) -> None:
    assert load_model(path).padded_vocab_size in (50304, 51200)
