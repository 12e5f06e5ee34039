"""Files in, dataclasses out: what is accepted, and what each refusal says."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from hetero.errors import ConfigError
from hetero.plan.ir import Plan
from hetero.serialization import from_json, load, near_match, read_text, save, to_json
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.strategies import legal_plans

LLAMA_YAML = """\
num_layers: 6
hidden_size: 32
num_attention_heads: 8
num_query_groups: 4
kv_channels: 4
ffn_hidden_size: 64
vocab_size: 61
padded_vocab_size: 64
max_position_embeddings: 64
position_embedding: rope
normalization: RMSNorm
norm_epsilon: 1e-5
activation: swiglu
linear_bias: false
qkv_bias: false
tied_embeddings: false
"""


def small_plan() -> Plan:
    return plan(gpt2_model(), [replica(stage(layers=(0, 4), ranks=(0, 1), tp=2), stage(layers=(4, 6), ranks=(2,)))])


@given(legal_plans())
@settings(max_examples=30, deadline=None)
def test_every_plan_round_trips(random_plan: Plan) -> None:
    assert from_json(Plan, to_json(random_plan), source="memory") == random_plan


def test_lists_of_numbers_stay_on_one_line() -> None:
    assert '"ranks": [0, 1],\n' in to_json(small_plan())


def test_save_then_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(small_plan(), path)
    assert load(Plan, path) == small_plan()
    assert list(tmp_path.iterdir()) == [path], "the partial file is gone"


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_yaml_loads_as_the_same_model(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_text(LLAMA_YAML)
    assert load(ModelSpec, path) == llama_model()


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "+1e-5", "0.00001", ".1e-4"])
def test_yaml_numbers_are_what_they_look_like(tmp_path: Path, text: str) -> None:
    """YAML 1.1 reads ``1e-5`` as a text; people copy such numbers from JSON."""
    path = tmp_path / "model.yaml"
    path.write_text(LLAMA_YAML.replace("1e-5", text))
    assert load(ModelSpec, path).norm_epsilon == pytest.approx(1e-5)


def load_text(tmp_path: Path, name: str, text: str) -> ModelSpec:
    path = tmp_path / name
    path.write_text(text)
    return load(ModelSpec, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("num_layers: 6", "num_layer: 6"), r"model.yaml: missing key 'num_layers'; unknown key 'num_layer' \(did you"),
        (("num_layers: 6", "num_layers: '6'"), "num_layers: Input should be a valid integer, got '6'"),
        (("num_layers: 6", "num_layers: 6.0"), r"num_layers: Input should be a valid integer, got 6\.0"),
        (("num_layers: 6", "num_layers: true"), "num_layers: Input should be a valid integer, got True"),
        (("num_layers: 6", "num_layers: 2024-01-31"), "num_layers: Input should be a valid integer, got '2024-01-31'"),
        (("norm_epsilon: 1e-5", "norm_epsilon: .nan"), "norm_epsilon: Input should be a finite number"),
        (("linear_bias: false", "linear_bias: 0"), "linear_bias: Input should be a valid boolean, got 0"),
        (("activation: swiglu", "activation: relu"), "activation: Input should be 'gelu' or 'swiglu', got 'relu'"),
        (("num_layers: 6", "num_layers: 0"), "model.yaml: .*num_layers is 0, must be at least 1"),
        (("num_layers: 6", "num_layers: [6"), "model.yaml: not YAML: while parsing"),
        (("num_layers: 6", "num_layers: &a [*a]"), "model.yaml: not plain data: Circular reference"),
        (
            ("num_layers: 6", "num_layers: 6\nnum_layers: 8"),
            r"model\.yaml: key 'num_layers' is given twice \(lines 1 and 2\); keep one of the two",
        ),
        (("num_layers: 6", "num_layers: {a: 1, a: 2}"), r"key 'a' is given twice \(lines 1 and 1\)"),
    ],
)
def test_yaml_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, "model.yaml", LLAMA_YAML.replace(*change))


def test_an_empty_file_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the top level: Input should be an object, got None"):
        load_text(tmp_path, "model.yaml", "")


def test_half_a_json_file_says_where_it_ends() -> None:
    text = to_json(small_plan())[:200]
    with pytest.raises(ConfigError, match=r"^plan\.json: not JSON, line \d+ column \d+.*Is the file complete\?"):
        from_json(Plan, text, source="plan.json")


def test_nested_keys_are_named_by_their_path() -> None:
    text = to_json(small_plan()).replace('"end_layer": 6', '"end_layr": 6')
    expected = (
        r"missing key 'replicas\.0\.stages\.1\.end_layer'; "
        r"unknown key 'replicas\.0\.stages\.1\.end_layr' \(did you mean 'end_layer'\?\)"
    )
    with pytest.raises(ConfigError, match=expected):
        from_json(Plan, text, source="plan.json")


def test_yaml_that_merges_others_may_replace_their_keys(tmp_path: Path) -> None:
    """``<<`` puts both into one mapping, which are not two of a kind."""
    text = "a: &a {num_layers: 1}\nb: &b {<<: *a, num_layers: 2}\nc: {<<: *b, num_layers: 3}\n"
    with pytest.raises(ConfigError, match=r"missing key 'num_layers'"):
        load_text(tmp_path, "model.yaml", text)


def test_a_repeated_key_is_refused_wherever_it_is() -> None:
    text = to_json(small_plan()).replace('"end_layer": 6', '"end_layer": 5, "end_layer": 6')
    with pytest.raises(ConfigError, match=r"^plan\.json: key 'end_layer' is given twice; keep one of the two"):
        from_json(Plan, text, source="plan.json")


def test_a_key_like_none_lists_the_known_ones() -> None:
    text = to_json(small_plan()).replace('"dp": 1', '"xyz": 1', 1)
    with pytest.raises(ConfigError, match=r"unknown key .*xyz' \(known keys: first_layer, end_layer, starts_with_mlp"):
        from_json(Plan, text, source="plan.json")


def test_another_format_version_is_refused() -> None:
    text = to_json(small_plan()).replace('"format_version": 1', '"format_version": 2')
    with pytest.raises(ConfigError, match="format_version: Input should be 1, got 2"):
        from_json(Plan, text, source="plan.json")


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"absent\.json: no such file \(looked in {tmp_path}\)"):
        load(Plan, tmp_path / "absent.json")


def test_a_binary_file_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"plan\.json: cannot be read as text"):
        read_text(path)


def test_near_match() -> None:
    assert near_match("hiden_size", ["hidden_size", "num_layers"]) == " (did you mean 'hidden_size'?)"
    assert near_match("num", ["hidden_size", "num_layers"]) == " (did you mean 'num_layers'?)"
    assert near_match("", ["hidden_size", "num_layers"]) == ""
    assert near_match("zzz", ["hidden_size", "num_layers"]) == ""
