"""Malformed and extreme questions to ``hetero plan``: one clear message each, and never a traceback.

What is malformed is refused before anything is planned. What is merely extreme is planned by counted work, and ends
where its limit is; ``tests/bench/bench_limits.py`` holds the same against seconds that pass.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero.cli import main
from hetero.errors import PlanError
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from tests.unit.planner.extreme_questions import EXTREME

CLUSTER: dict[str, Any] = {
    "node_types": [
        {
            "name": "fast",
            "device": "A100-40",
            "gpus_per_node": 2,
            "inside_node": {"bandwidth_gb_per_s": 200, "latency_us": 10},
        },
        {
            "name": "slow",
            "device": "V100-16",
            "gpus_per_node": 2,
            "inside_node": {"bandwidth_gb_per_s": 60, "latency_us": 10},
        },
    ],
    "links": {"between_nodes": {"bandwidth_gb_per_s": 2, "latency_us": 30}},
}

PRESET = Path(__file__).parents[3] / "scripts/presets/models/opt-350m.yaml"

MODEL: dict[str, Any] = {**yaml.safe_load(PRESET.read_text(encoding="utf-8")), "num_layers": 6}

MISSING = object()
"""The key is left out."""

Path_ = tuple[str | int, ...]

TYPE: Path_ = ("node_types", 0)
BANDWIDTH: Path_ = (*TYPE, "inside_node", "bandwidth_gb_per_s")
LATENCY: Path_ = (*TYPE, "inside_node", "latency_us")
PAIR = {"bandwidth_gb_per_s": 1, "latency_us": 1}

CLUSTERS: Sequence[tuple[Path_, Any, str]] = [
    ((*TYPE, "name"), "", "node type of 'A100-40': name is '', give it one"),
    ((*TYPE, "name"), "  ", "node type of 'A100-40': name is '  ', give it one"),
    ((*TYPE, "name"), 7, "node_types.0.name: Input should be a valid string, got 7"),
    ((*TYPE, "device"), "", "node type 'fast': unknown device type '' (known: "),
    ((*TYPE, "device"), "H1000", "unknown device type 'H1000' (did you mean 'H100'?)"),
    ((*TYPE, "zone"), "", "node type 'fast': zone is '', give it a name, or leave it out"),
    ((*TYPE, "count"), 0, "node type 'fast': count is 0, must be at least 1"),
    ((*TYPE, "count"), -1, "node type 'fast': count is -1, must be at least 1"),
    ((*TYPE, "count"), 10_000_000, "it has 20,000,002 devices, at most 200,000 are planned for; node type 'fast' has"),
    ((*TYPE, "count"), 1.5, "node_types.0.count: Input should be a valid integer, got 1.5"),
    ((*TYPE, "count"), "2", "node_types.0.count: Input should be a valid integer, got '2'"),
    ((*TYPE, "gpus_per_node"), 0, "node type 'fast': gpus_per_node is 0, must be at least 1"),
    ((*TYPE, "gpus_per_node"), 4096, "gpus_per_node is 4,096, at most 1,024 is planned for"),
    ((*TYPE, "memory_gib"), 0, "node type 'fast': memory_gib is 0, must be at least 1"),
    ((*TYPE, "memory_gib"), 10**9, "memory_gib is 1,000,000,000, at most 1,000,000 is planned for; is it in another"),
    ((*TYPE, "nics_per_node"), 0, "node type 'fast': nics_per_node is 0, must be at least 1"),
    ((*TYPE, "nics_per_node"), 64, "nics_per_node is 64, must be at most gpus_per_node, which is 2: each device uses"),
    ((*TYPE, "price_per_hour"), -1.0, "price_per_hour is -1, must be at least 0 and at most 1e+09; state the price"),
    ((*TYPE, "price_per_hour"), 1e300, "price_per_hour is 1e+300, must be at least 0 and at most 1e+09"),
    ((*TYPE, "price_per_hour"), float("nan"), "price_per_hour: Input should be a finite number, got nan"),
    ((*TYPE, "inside_node"), MISSING, "no link between ranks 0 (node 0, fast, zone default) and 1"),
    ((*TYPE, "nics"), 2, "unknown key 'node_types.0.nics' (did you mean 'nics_per_node'?)"),
    (BANDWIDTH, 0, "bandwidth_gb_per_s is 0.0, must be above 0"),
    (BANDWIDTH, -5, "bandwidth_gb_per_s is -5.0, must be above 0"),
    (BANDWIDTH, 1e-30, "bandwidth_gb_per_s is 1e-30, must be at least 1e-09 and at most 1e+09; is it in another unit?"),
    (BANDWIDTH, 1e30, "bandwidth_gb_per_s is 1e+30, must be at least 1e-09 and at most 1e+09; is it in another unit?"),
    (BANDWIDTH, "fast", "'fast' is no number with a unit; write 25 GB/s"),
    (BANDWIDTH, [], "bandwidth_gb_per_s is an empty table, give it a number or one pair at least"),
    (BANDWIDTH, [[2, 1], [1, 1]], "bandwidth_gb_per_s lists 1 bytes after 2; sort the pairs by ascending size"),
    (LATENCY, -1, "latency_us is -1.0, must be at least 0 and at most 6e+07, a minute"),
    (LATENCY, 1e300, "latency_us is 1e+300, must be at least 0 and at most 6e+07, a minute"),
    (LATENCY, "1 hour", "'hour' is no unit of time; write 50us"),
    (("node_types",), [], "node_types is empty, it must list at least one"),
    (("node_types",), {}, "node_types: Input should be a valid array, got {}"),
    (("node_types",), [{**CLUSTER["node_types"][0], "name": f"t{i}"} for i in range(200)], "it has 200 node types, at"),
    (("node_types", 1, "name"), "fast", "node_types lists 'fast' more than once; give each type its own name"),
    (("node_types", 1, "zone"), "far", "add [default, far] under links.zone_pairs"),
    (("links",), MISSING, "add links.between_nodes, or [fast, slow] under links.node_pairs"),
    (("links", "node_pairs"), [{"node_types": ["fast", "other"], "link": PAIR}], "node_pairs.0: unknown node type"),
    (
        ("links", "node_pairs"),
        [{"node_types": ["fast"], "link": PAIR}],
        "missing key 'links.node_pairs.0.node_types.1'",
    ),
    (("links", "zone_pairs"), [{"zones": ["default"] * 2, "link": PAIR}], "zone_pairs.0: names zone 'default' twice"),
    (("host",), {}, "unknown key 'host' (known keys: devices, node_types, links)"),
]
"""What is changed in the cluster's file, and what the message says."""

MODELS: Sequence[tuple[str, Any, str]] = [
    ("num_layers", 0, "model: num_layers is 0, must be at least 1"),
    ("num_layers", -3, "model: num_layers is -3, must be at least 1"),
    ("num_layers", 100_000, "model: num_layers is 100,000, must be at most 10,000; is the number wrong?"),
    ("num_layers", 10**30, "num_layers is 1,000,000,000,000,000,000,000,000,000,000, must be at most 10,000"),
    ("num_layers", "6", "num_layers: Input should be a valid integer, got '6'"),
    ("num_layers", 2.5, "num_layers: Input should be a valid integer, got 2.5"),
    ("hidden_size", 0, "model: hidden_size is 0, must be at least 1"),
    ("hidden_size", 10**12, "model: hidden_size is 1,000,000,000,000, must be at most 1,000,000,000"),
    ("hidden_size", 2**20, "the model does not fit: no stage of any node type holds the embedding and the head beside"),
    ("hidden_size", 2**20, "tokens; the closest is tp 2 on A100-40, where each device needs "),
    ("hidden_size", MISSING, "missing key 'hidden_size'"),
    ("hidden", 5, "unknown key 'hidden' (did you mean 'hidden_size'?)"),
    ("num_attention_heads", 0, "model: num_attention_heads is 0, must be at least 1"),
    ("num_query_groups", 3, "model: num_query_groups 3 does not divide num_attention_heads 16"),
    ("kv_channels", 0, "model: kv_channels is 0, must be at least 1"),
    ("ffn_hidden_size", 10**15, "model: ffn_hidden_size is 1,000,000,000,000,000, must be at most 1,000,000,000"),
    ("vocab_size", 0, "model: vocab_size is 0, must be at least 1"),
    ("vocab_size", 10**8, "model: padded_vocab_size 50304 is below vocab_size 100000000"),
    ("max_position_embeddings", 0, "model: max_position_embeddings is 0, must be at least 1"),
    ("norm_epsilon", 0, "model: norm_epsilon is 0.0, must be above 0"),
    ("norm_epsilon", float("inf"), "norm_epsilon: Input should be a finite number, got inf"),
    ("rotary_base", -1, "model: rotary_base is -1.0, must be above 0"),
    ("rotary_percent", 2, "model: rotary_percent is 2.0, must be above 0 and at most 1"),
    ("num_experts", 0, "model: num_experts is 0, must be at least 1"),
    ("num_experts", 4, "model: num_experts is set, so moe_ffn_hidden_size must be set as well"),
    ("activation", "tanh", "activation: Input should be 'gelu', 'relu' or 'swiglu', got 'tanh'"),
    ("position_embedding", "alibi", "position_embedding: Input should be 'learned_absolute' or 'rope', got 'alibi'"),
    ("tied_embeddings", "yes", "tied_embeddings: Input should be a valid boolean, got 'yes'"),
]

FLAGS: Sequence[tuple[str, str]] = [
    ("--global-batch-size 0", "global_batch_size is 0, must be at least 1 and at most 10,000,000 samples"),
    ("--global-batch-size -4", "global_batch_size is -4, must be at least 1 and at most 10,000,000 samples"),
    (f"--global-batch-size {10**18}", f"global_batch_size is {10**18}, must be at least 1 and at most 10,000,000"),
    ("--global-batch-size 1.5", "--global-batch-size is '1.5', must be a whole number"),
    ("--seq-length 0", "seq_length is 0, must be at least 1"),
    ("--seq-length -1", "seq_length is -1, must be at least 1"),
    ("--seq-length 1000000", "seq_length 1000000 exceeds the model's max_position_embeddings 2048"),
    ("--time-limit 0", "the time limit is 0 s, must be above 0 and at most 604,800, a week (--time-limit)"),
    ("--time-limit -1", "the time limit is -1 s, must be above 0 and at most 604,800, a week (--time-limit)"),
    ("--time-limit nan", "the time limit is nan s, must be above 0 and at most 604,800, a week (--time-limit)"),
    ("--time-limit 1e300", "the time limit is 1e+300 s, must be above 0 and at most 604,800, a week (--time-limit)"),
    ("--time-limit soon", "--time-limit is 'soon', must be a number"),
    ("--time-limit 1e-9", "time ran out: no plan was found within 1e-09 s, which does not mean that none fits; raise"),
    ("--seed -1", "the seed is -1, must be at least 0 and at most 2147483647 (--seed)"),
    (f"--seed {2**31}", "the seed is 2147483648, must be at least 0 and at most 2147483647 (--seed)"),
    ("--budget-per-hour 0", "the budget is 0 per hour, must be at least 0.001 and at most 1e+15 (--budget-per-hour)"),
    ("--budget-per-hour nan", "the budget is nan per hour, must be at least 0.001 and at most 1e+15"),
    ("--budget-per-hour 5", "node type 'fast' has no price_per_hour, which planning by money needs"),
    ("--objective money", "node type 'fast' has no price_per_hour, which planning by money needs"),
    ("--hidden-dropout 1", "--hidden-dropout is 1, must be at least 0 and below 1"),
    ("--attention-dropout nan", "--attention-dropout is nan, must be at least 0 and below 1"),
    ("--precision int8", "--precision is 'int8', must be one of fp64"),
    ("--fp8", "fp8 is asked for, but device A100-40 has compute capability 8.0, fp8 begins with 8.9"),
    ("--profile no.json", "no.json: no such file"),
    ("--out /no/such/folder/plan.json", "there is no folder /no/such/folder; make it first"),
    ("--cluster nowhere.yaml", "nowhere.yaml: no such file"),
]


def changed(document: Mapping[str, Any], path: Path_, value: object) -> dict[str, Any]:
    """``document`` with another value at ``path``, or without that key."""
    found: Any = copy.deepcopy(dict(document))
    *ways, last = path
    place = found
    for way in ways:
        place = place[way]
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    return dict(found)


def said(tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: object, model: object, flags: str) -> str:
    """The one message of the command, which it ends with."""
    for name, document in (("cluster.yaml", cluster), ("model.yaml", model)):
        (tmp_path / name).write_text(yaml.safe_dump(document), encoding="utf-8")
    known = f"--cluster {tmp_path}/cluster.yaml --model {tmp_path}/model.yaml --global-batch-size 16 --time-limit 0.5"
    code = main(["plan", *known.split(), *flags.split()])
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    (message,) = [line for line in printed.err.splitlines() if line.startswith(("hetero: ", "hetero plan: "))]
    assert printed.err.endswith(f"{message}\n")
    return message


@pytest.mark.parametrize(("path", "value", "message"), CLUSTERS)
def test_a_cluster_that_cannot_be_meant_is_refused(
    path: Path_, value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(tmp_path, capsys, changed(CLUSTER, path, value), MODEL, "")


@pytest.mark.parametrize(("key", "value", "message"), MODELS)
def test_a_model_that_cannot_be_meant_is_refused(
    key: str, value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(tmp_path, capsys, CLUSTER, changed(MODEL, (key,), value), "")


@pytest.mark.parametrize(("flags", "message"), FLAGS)
def test_flags_that_cannot_be_meant_are_refused(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(tmp_path, capsys, CLUSTER, MODEL, flags)


LIMIT_S = 0.3


def outcome(question: Problem, deadline: Deadline) -> str:
    """``a plan``, which is not below the bound on all of them, or what the error says."""
    try:
        result = plan_cluster(question, deadline=deadline)
    except PlanError as error:
        return str(error)
    assert result.simulation.step_s >= result.lower_bound_s > 0
    return "a plan"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, question in EXTREME.items() if question.is_quick])
def test_an_extreme_question_ends_where_its_limit_is(name: str) -> None:
    """With a plan, or by saying that time ran out: of counted work at most as much more as one step may take."""
    deadline = Deadline(LIMIT_S, CountedWork())
    said = outcome(EXTREME[name].make(LIMIT_S), deadline)
    assert said == "a plan" or said.startswith("planner: time ran out: no plan was found within 0.3 s, which does not")
    assert deadline.elapsed_s <= LIMIT_S + 1.0
