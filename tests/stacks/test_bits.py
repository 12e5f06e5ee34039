"""A few of the 65 trainings: the same bits when run again, and the same bits in both lanes of ``scripts/test.sh``."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.stacks.bits import digests
from tests.stacks.trainings import trainings

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

CHOSEN = (
    "gpt2-tied bf16 dropout",
    "llama-gqa fp32 delay",
    "llama-tied fp16 recompute",
    "moe fp64 dropout",
    "moe bf16 aux_loss",
)
"""Every precision, feature and kind of plan, and both families of layers."""

LANES_MEET_IN = "MEGATRON_HETERO_DIGESTS"
"""Environment variable of ``scripts/test.sh``: the folder in which its lanes leave their digests."""


@pytest.fixture(scope="module")
def trained() -> dict[str, str]:
    return _digests(*CHOSEN)


def _digests(*names: str) -> dict[str, str]:
    return digests({name: training for name, training in trainings().items() if name in names})


def test_a_training_has_the_same_bits_again(trained: Mapping[str, str]) -> None:
    """Also with another training before it on the same ranks."""
    again = ("moe bf16 aux_loss", "llama-tied fp16 recompute")
    assert _digests(*again) == {name: trained[name] for name in CHOSEN if name in again}


def test_unlike_trainings_have_unlike_digests(trained: Mapping[str, str]) -> None:
    assert list(trained) == list(CHOSEN)
    assert len(set(trained.values())) == len(CHOSEN)


def test_both_lanes_train_the_same_bits(trained: Mapping[str, str]) -> None:
    """The lane that comes first leaves its digests; run without the other lane, this compares nothing."""
    if LANES_MEET_IN not in os.environ:
        pytest.skip(f"{LANES_MEET_IN} is not set: scripts/test.sh compares its two lanes")
    kept = Path(os.environ[LANES_MEET_IN]) / "bits.json"
    if not kept.exists():
        kept.write_text(json.dumps(trained), encoding="utf-8")
    assert trained == json.loads(kept.read_text(encoding="utf-8"))


def test_there_are_65_trainings() -> None:
    """As the docstring of :mod:`tests.stacks.trainings` counts them."""
    by_style: dict[str, int] = {}
    for name in trainings():
        style = name.split()[0]
        by_style[style] = by_style.get(style, 0) + 1
    assert by_style.pop("moe") == 4 * 5
    assert list(by_style.values()) == [3 * 3] * 5
