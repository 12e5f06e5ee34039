"""Profiles: what they refuse, and which one prices which layer."""

import dataclasses
import json
import re
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.serialization import from_json, to_json
from hetero.spec.devices import DeviceType
from hetero.spec.link import GroupLink, Link
from hetero.spec.profile import LayerShape, LayerTime, Profile, ProfileStore, UpdateTime
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.synthetic_profiles import profile

MODEL = gpt2_model()
SHAPE = LayerShape.of(MODEL)


def test_a_shape_is_what_a_layers_time_depends_on() -> None:
    assert LayerShape.of(gpt2_model(num_layers=2, tied_embeddings=False)) == SHAPE
    assert LayerShape.of(gpt2_model(ffn_hidden_size=128)) != SHAPE
    assert LayerShape.of(llama_model()).gated
    assert LayerShape.of(moe_model()).ffn == 48, "the size of one expert"
    assert LayerShape.of(moe_model()).experts_per_token == 2


def test_a_profile_survives_its_file() -> None:
    written = profile(MODEL, isolation_s=1e-4)
    assert from_json(Profile, to_json(written), source="test") == written


@pytest.mark.parametrize(
    ("layers", "sums"), [("local", "separate"), ("transformer_engine", "fused_in_blocks"), (None, None)]
)
def test_a_profile_of_format_2_has_the_gradient_sums_of_the_layers_that_were_timed(
    layers: str | None, sums: str | None
) -> None:
    data = json.loads(to_json(profile(MODEL)))
    del data["implementation"]["gradient_sums"]
    read = from_json(Profile, json.dumps({**data, "format_version": 2, "layers": layers}), source="test")
    assert (read.format_version, read.implementation.gradient_sums) == (3, sums)


@pytest.mark.parametrize("wrong", [["local"], {"local": 1}, 7])
def test_layers_of_the_wrong_type_in_format_2_are_refused(wrong: object) -> None:
    data = json.loads(to_json(profile(gpt2_model())))
    with pytest.raises(ConfigError, match=r"^test: layers: "):
        from_json(Profile, json.dumps({**data, "format_version": 2, "layers": wrong}), source="test")


def test_unknown_keys_are_refused_with_the_near_match() -> None:
    text = to_json(profile(MODEL)).replace('"seq_length"', '"sequence_length"')
    with pytest.raises(ConfigError, match=r"unknown key 'sequence_length' \(did you mean 'seq_length'\?\)"):
        from_json(Profile, text, source="test")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"seq_length": 0}, "profile of synthetic on A100-40: seq_length is 0, must be at least 1"),
        ({"isolation_s": -1.0}, "isolation_s is -1.0, must be at least 0"),
        ({"in_a_step": 0.0}, "in_a_step is 0.0, must be above 0"),
        ({"times": ()}, "times is empty, so it says nothing; measure a block at least"),
    ],
)
def test_what_a_profile_refuses(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        profile(MODEL, **overrides)


def test_a_time_is_listed_once() -> None:
    time = LayerTime(kind="block", tp=1, micro_batch_size=2, forward_s=1.0, backward_s=2.0)
    with pytest.raises(ConfigError, match="times lists block, 1, 2 more than once; keep one"):
        profile(MODEL, times=(time, time))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tp": 0}, "block at tp 0, micro_batch_size 1: tp is 0, must be at least 1"),
        ({"forward_s": -0.5}, "block at tp 1, micro_batch_size 1: forward_s is -0.5, must be at least 0"),
    ],
)
def test_what_a_time_refuses(overrides: dict[str, Any], message: str) -> None:
    legal = {"kind": "block", "tp": 1, "micro_batch_size": 1, "forward_s": 1.0, "backward_s": 2.0}
    with pytest.raises(ConfigError, match=message):
        LayerTime(**{**legal, **overrides})


def test_an_update_takes_time() -> None:
    with pytest.raises(ConfigError, match=r"block at tp 2: update_s is -1\.0, must be at least 0"):
        UpdateTime(kind="block", tp=2, update_s=-1.0)


def test_times_are_found_in_ascending_size() -> None:
    measured = profile(MODEL, tps=(2, 1), micro_batch_sizes=(4, 1, 2))
    assert measured.tps("block") == (1, 2)
    assert [time.micro_batch_size for time in measured.times_of("block", tp=2)] == [1, 2, 4]
    assert measured.times_of("block", tp=8) == ()


class TestStore:
    ON_A100 = profile(MODEL)
    ON_V100 = profile(MODEL, device="V100-16")
    OTHER_MODEL = profile(gpt2_model(hidden_size=64), name="wide")
    OTHER_VOCABULARY = profile(gpt2_model(padded_vocab_size=128), name="wordy")
    STORE = ProfileStore([OTHER_VOCABULARY, OTHER_MODEL, ON_V100, ON_A100])

    def test_it_finds_the_exact_layers(self) -> None:
        assert self.STORE.find(SHAPE, device="A100-40", seq_length=16, precision="fp32") is self.ON_A100

    def test_another_vocabulary_does_for_the_blocks(self) -> None:
        shape = dataclasses.replace(SHAPE, vocabulary=999)
        assert self.STORE.find(shape, device="A100-40", seq_length=16, precision="fp32") is self.OTHER_VOCABULARY

    @pytest.mark.parametrize("asked", [{"device": "H100"}, {"seq_length": 32}, {"precision": "bf16"}])
    def test_another_device_length_or_precision_is_not_the_same(self, asked: dict[str, Any]) -> None:
        same = {"device": "A100-40", "seq_length": 16, "precision": "fp32"}
        assert self.STORE.find(SHAPE, **{**same, **asked}) is None

    def test_other_sizes_are_not_the_same(self) -> None:
        gated = LayerShape.of(llama_model())
        assert self.STORE.find(gated, device="A100-40", seq_length=16, precision="fp32") is None

    def test_later_profiles_win(self) -> None:
        newer = profile(MODEL, block_s=(9.0, 9.0))
        assert self.STORE.plus([newer]).find(SHAPE, device="A100-40", seq_length=16, precision="fp32") is newer

    def test_a_device_without_a_profile(self) -> None:
        with pytest.raises(ConfigError, match=r"no profile of any model on 'H100' \(profiled: A100-40, V100-16\)"):
            self.STORE.of_device("H100")

    def test_a_profile_of_no_known_device_is_refused(self) -> None:
        strange = profile(MODEL, device="A100_40")
        message = r"profile of synthetic on A100_40: unknown device type 'A100_40' \(did you mean 'A100-40'\?\)"
        with pytest.raises(ConfigError, match=message):
            ProfileStore([strange])
        described = SHIPPED_DEVICES.plus([DeviceType(name="A100_40", memory_gib=40)])
        assert ProfileStore([strange], device_types=described).of_device("A100_40") == (strange,)

    def test_links_of_the_cluster_come_before_those_of_profiles(self) -> None:
        ours, theirs = ((GroupLink(size=2, bus=Link(bandwidth_gb_per_s=n, latency_us=0)),) for n in (1.0, 2.0))
        measured = profile(MODEL, device="V100-16", all_reduce=theirs)
        store = ProfileStore([self.ON_A100, measured], all_reduce={"H100": ours})
        assert store.all_reduce_of("V100-16") == theirs
        assert store.all_reduce_of("H100") == ours
        assert store.all_reduce_of("A100-40") == store.all_reduce_of("T4") == ()
        both = ProfileStore([measured], all_reduce={"V100-16": ours})
        assert both.all_reduce_of("V100-16") == both.plus([self.ON_A100]).all_reduce_of("V100-16") == ours

    def test_a_device_that_does_not_exist(self) -> None:
        with pytest.raises(ConfigError, match="unknown device type 'B52'"):
            self.STORE.of_device("B52")
