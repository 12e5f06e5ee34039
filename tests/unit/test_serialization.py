"""Files in, dataclasses out: what is accepted, and what each refusal says."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings

from hetero import serialization
from hetero.errors import ConfigError
from hetero.plan.ir import Plan
from hetero.serialization import from_json, load, near_match, parse_json, read_text, save, to_json
from hetero.spec.cluster import ClusterSpec, NodeType
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
        (
            ("activation: swiglu", "activation: tanh"),
            "activation: Input should be 'gelu', 'relu' or 'swiglu', got 'tanh'",
        ),
        (("num_layers: 6", "num_layers: 0"), "model.yaml: .*num_layers is 0, must be at least 1"),
        (("num_layers: 6", "num_layers: [6"), "model.yaml: not YAML: while parsing"),
        (("num_layers: 6", "num_layers: &a [*a]"), "model.yaml: not plain data: Circular reference"),
        (
            ("num_layers: 6", "num_layers: 6\nnum_layers: 8"),
            r"model\.yaml: key 'num_layers' is given twice \(lines 1 and 2\); keep one of the two",
        ),
        (("num_layers: 6", "num_layers: {a: 1, a: 2}"), r"key 'a' is given twice \(lines 1 and 1\)"),
        # Numbers are as they look, or are none.
        (("num_layers: 6", "num_layers: 012"), "num_layers: Input should be a valid integer, got '012'"),
        (("num_layers: 6", "num_layers: 1:30"), "num_layers: Input should be a valid integer, got '1:30'"),
        (("num_layers: 6", "num_layers: 0x10"), "num_layers: Input should be a valid integer, got '0x10'"),
        (
            ("num_layers: 6", "num_layers: " + "9" * 5000),
            r"model\.yaml: line 1: a number of 5,000 digits \(999999999999",
        ),
        (("norm_epsilon: 1e-5", "norm_epsilon: 1e999"), "norm_epsilon: Input should be a finite number"),
        # What PyYAML's own constructors trip over.
        (("num_layers: 6", "num_layers: 2024-13-45"), "num_layers: Input should be a valid integer, got '2024-13-45'"),
        (("num_layers: 6", "num_layers: !!bool maybe"), "model.yaml: not plain data: KeyError"),
        (("num_layers: 6", "num_layers: !!int x"), "model.yaml: not plain data: ValueError"),
        (("num_layers: 6", "num_layers: !!timestamp x"), "model.yaml: not plain data: AttributeError"),
        (("num_layers: 6", "num_layers: !!binary aGk="), "model.yaml: not plain data: .*bytes"),
        (
            ("num_layers: 6", "num_layers: " + "[" * 100 + "]" * 100),
            r"line 1: lists or objects .* deeper than 64 levels",
        ),
    ],
)
def test_yaml_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, "model.yaml", LLAMA_YAML.replace(*change))


def test_an_empty_file_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is empty; is it the right file"):
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


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"absent\.json: no such file \(looked in {tmp_path}\)"):
        load(Plan, tmp_path / "absent.json")


BOMBS = {
    "aliases": "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
    "merges": "a0: &a0 {k: 1, l: 2}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_that_stands_for_more_than_it_has_is_refused(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(BOMBS[bomb])
    with pytest.raises(ConfigError, match=r"cluster\.yaml: line \d+: more than 200,000 values, aliases counted"):
        load(ModelSpec, path)


def test_yaml_of_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "MAX_YAML_VALUES", 1000)
    path = tmp_path / "cluster.yaml"
    path.write_text("a: [" + "1," * 997 + "]")
    with pytest.raises(ConfigError, match="missing key"):
        load(ModelSpec, path)
    path.write_text("a: [" + "1," * 998 + "]")
    with pytest.raises(ConfigError, match="line 1: more than 1,000 values"):
        load(ModelSpec, path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"a": {"b": [1, ' + "9" * 5000 + "]}}",
            r"a\.b\.1: a number of 5,000 digits \(999999999999\.\.\.\), at most 40",
        ),
        ('{"a": -' + "9" * 41 + "}", "a: a number of 41 digits"),
        ('{"a": 1e999}', "a: '1e999' is too large for a number"),
        ('{"a": [NaN]}', r"a\.0: NaN is no number of JSON"),
        ("9" * 41, "the top level: a number of 41 digits"),
        ('{"a": ' + "9" * 41 + ", ]", "a number: a number of 41 digits"),
        ("[" * 65 + "]" * 65, "lists or objects in each other, deeper than 64 levels"),
        ("[" * 100_000, "lists or objects in each other, deeper than 64 levels"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is given twice"),
    ],
)
def test_json_beyond_a_limit_is_refused_by_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^f\.json: {message}"):
        parse_json(text, source="f.json")


def test_json_up_to_the_limits_is_read() -> None:
    assert parse_json("[" * 64 + "]" * 64, source="") is not None
    assert parse_json("9" * 40, source="") == 10**40 - 1
    assert parse_json('{"a": [1, -2.5e3, true, null, "x"]}', source="") == {"a": [1, -2500.0, True, None, "x"]}
    nan, infinity = parse_json("[NaN, 1e999]", source="", allow_nan=True)
    assert math.isnan(nan)
    assert infinity == math.inf


def test_a_file_beyond_its_size_is_not_read(tmp_path: Path) -> None:
    """A hole takes no space on the disk; its zeros would in memory."""
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ConfigError, match=r"plan\.json: it has 1,000,000,000,000 bytes, .* at most 268,435,456"):
        load(Plan, path)
    path.rename(tmp_path / "model.yaml")
    with pytest.raises(ConfigError, match=r"model\.yaml: it has 1,000,000,000,000 bytes, .* at most 1,048,576"):
        load(ModelSpec, tmp_path / "model.yaml")


def test_what_may_never_end_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "plan.json"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(ConfigError, match=rf"{path}: no regular file but {kind}"):
            load(Plan, path)


def test_a_message_stays_short() -> None:
    text = json.dumps({"replicas": [{"num_samples": "x" * 10_000}] * 1000})
    with pytest.raises(ConfigError, match=r"; and [\d,]+ more$") as error:
        from_json(Plan, text, source="plan.json")
    assert len(str(error.value)) < 1000


@pytest.mark.slow
def test_the_largest_real_files_are_within_the_limits(tmp_path: Path) -> None:
    nodes = [
        NodeType(name=f"node-{i}", device="A100-40", gpus_per_node=8, count=8, zone=f"zone-{i % 4}", price_per_hour=2.5)
        for i in range(64)
    ]
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "node_types:\n"
        + "".join(f"  - {{name: {n.name}, device: {n.device}, gpus_per_node: 8, count: 8}}\n" for n in nodes)
    )
    assert load(ClusterSpec, path).num_devices == 4096
    save(ClusterSpec(node_types=tuple(nodes)), tmp_path / "cluster.json")
    assert load(ClusterSpec, tmp_path / "cluster.json").num_devices == 4096


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


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("--master-addr", "--mup-base-head-dim", False),
        ("--deepspeed", "--seed", False),
        ("tpu", "cpu", False),
        ("slwo", "slow", True),
        ("--num_layers", "--num-layers", True),
        ("ByteTokenizer", "ByteLevelTokenizer", True),
    ],
)
def test_only_a_word_that_is_near_is_suggested(word: str, known: str, meant: bool) -> None:
    assert near_match(word, [known, "zzzz"]) == (f" (did you mean {known!r}?)" if meant else "")
