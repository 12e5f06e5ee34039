"""The cost model that a user's arguments ask for."""

import dataclasses
from pathlib import Path

import pytest

from hetero.cost.memory import memory_costs
from hetero.cost.runtime_model import HETERO
from hetero.data import shipped_profiles
from hetero.data.cost_models import model_costs, plan_costs
from hetero.errors import ConfigError
from hetero.serialization import save
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.published_runs import opt350m
from tests.helpers.synthetic_profiles import nodes, profile

MODEL = gpt2_model(num_layers=2)


def test_a_profile_of_ones_own_wins_over_the_shipped_ones(tmp_path: Path) -> None:
    save(profile(MODEL, block_s=(1.0, 2.0)), tmp_path / "profile.json")
    own = model_costs(MODEL, seq_length=16, precision="fp32", profiles=[tmp_path / "profile.json"])
    assert own.layer("block", device="A100-40", tp=1, micro_batch_size=1).forward_s == 1.0
    assert model_costs(MODEL, seq_length=16, precision="fp32").profile_of("A100-40") is None


def test_all_shipped_profiles_are_there() -> None:
    costs = model_costs(MODEL, seq_length=16, precision="fp32")
    for device in shipped_profiles().devices():
        assert costs.layer("block", device=device, tp=1, micro_batch_size=1).forward_s > 0


def test_data_sheets_price_what_nobody_measured() -> None:
    with pytest.raises(ConfigError, match="no profile of any model on 'L40S'"):
        model_costs(MODEL, seq_length=16, precision="fp32").layer("block", device="L40S", tp=1, micro_batch_size=1)
    costs = model_costs(MODEL, seq_length=16, precision="fp32", data_sheets=True)
    assert costs.layer("block", device="L40S", tp=1, micro_batch_size=1).forward_s > 0


def test_a_plan_says_what_its_costs_are_of() -> None:
    made = plan(MODEL, [replica(stage(layers=(0, 2), ranks=(0,)))], seq_length=24, precision="bf16")
    runtime = dataclasses.replace(HETERO, bucket_numel=7)
    costs = plan_costs(made, runtime=runtime)
    assert (costs.model, costs.seq_length, costs.precision) == (MODEL, 24, "bf16")
    assert costs.runtime == runtime.with_dropout(hidden=0.1, attention=0.1), "Megatron-LM's"
    assert costs.runtime != runtime
    for stated in (0.0, 0.3):
        drops = dataclasses.replace(made, hidden_dropout=stated, attention_dropout=0.0)
        assert {each.runtime.drops for each in (plan_costs(drops), memory_costs(drops))} == {stated > 0}


def test_the_cluster_says_what_carries_collectives() -> None:
    """A plan alone says nothing of links: then those that the profiles were made with count. On slow ones a block takes
    longer by about two all-reduces of its rows over two ranks; the fit has its own multiple of them."""
    model = opt350m.published_model("OPT-350")
    one = stage(layers=(0, 24), ranks=(0, 1), tp=2, device="A100-40")
    made = plan(model, [replica(one)], seq_length=2048, precision="fp32")
    slow = nodes(1, gpus_per_node=2, gb_per_s=0.1)
    seconds = [
        costs.layer("block", device="A100-40", tp=2, micro_batch_size=1).forward_s
        for costs in (plan_costs(made), plan_costs(made, slow))
    ]
    rows = 4 * 2048 * 1024
    assert seconds[1] - seconds[0] == pytest.approx(2 * rows / 0.1e9, rel=0.2)
