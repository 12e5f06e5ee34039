"""A profile that grows in its file: what is left of it, and what it does not go on with."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.profiling.points import points
from hetero.profiling.profile_file import ProfileFile
from hetero.serialization import load
from hetero.spec.profile import (
    LayerMemory,
    LayerTime,
    Profile,
    RecomputedTime,
    SplitBackwardTime,
    UpdateTime,
)
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import PROVENANCE, profile

HERE = dataclasses.replace(PROVENANCE, hardware="an abacus", versions={"torch": "2.13.0"})
HEAD = dataclasses.replace(profile(gpt2_model(), provenance=HERE, tps=(1,), micro_batch_sizes=(1,)), updates=())
BLOCK = LayerTime(kind="block", tp=1, micro_batch_size=1, forward_s=1.0, backward_s=2.0, saved_bytes=7)
MEMORY = LayerMemory(kind="block", tp=1, parameters=3, saved_bytes=7, output_bytes=2)


def test_every_point_is_in_the_file_before_the_next_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    file = ProfileFile(path, HEAD)
    assert not path.exists()
    file.add(BLOCK, MEMORY)
    assert load(Profile, path) == dataclasses.replace(HEAD, times=(BLOCK,), memory=(MEMORY,))
    more = [
        dataclasses.replace(BLOCK, kind="mlp"),
        RecomputedTime(recompute="full", tp=1, micro_batch_size=1, forward_s=1.0, backward_s=3.0),
        SplitBackwardTime(tp=1, micro_batch_size=1, input_gradients_s=1.0, weight_gradients_s=1.0),
        UpdateTime(kind="block", tp=1, update_s=0.5),
    ]
    for each in more:
        file.add(each, MEMORY)
        assert load(Profile, path) == file.profile
    found = load(Profile, path)
    assert (found.times, found.recomputed, found.split_backwards, found.updates) == (
        (BLOCK, more[0]),
        (more[1],),
        (more[2],),
        (more[3],),
    )
    assert found.memory == (MEMORY,)


def test_what_the_file_has_is_not_left(tmp_path: Path) -> None:
    path, wanted = tmp_path / "p.json", points([1], [1, 2], recomputes=[])
    ProfileFile(path, HEAD).add(BLOCK, None)
    left = ProfileFile(path, HEAD).left(wanted)
    assert [each for each in wanted if each not in left] == [points([1], [1], recomputes=[])[0]]


def test_what_is_measured_again_takes_the_place_of_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    file = ProfileFile(path, HEAD)
    larger, update = dataclasses.replace(BLOCK, micro_batch_size=8), UpdateTime(kind="block", tp=1, update_s=1.0)
    for each in (BLOCK, update, larger):
        file.add(each, None)
    better, again = dataclasses.replace(BLOCK, forward_s=7.0), dataclasses.replace(update, update_s=2.0)
    for another in (better, again):
        file.add(another, None)
    found = load(Profile, path)
    assert found.times == (better, larger)
    assert found.updates == (again,)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"device": "V100-16"}, "its device is A100-40, here it is V100-16"),
        ({"seq_length": 32}, "its seq_length is 16, here it is 32"),
        ({"precision": "bf16", "arithmetic": "bf16"}, "its precision is fp32, here it is bf16"),
        ({"layers": "local"}, "its layers is None, here it is local"),
        (
            {"provenance": dataclasses.replace(HERE, hardware="a slide rule")},
            "its hardware is an abacus, here it",
        ),
        ({"provenance": dataclasses.replace(HERE, versions={})}, "its version of torch is 2.13.0, here it is none"),
        ({"shape": dataclasses.replace(HEAD.shape, ffn=77)}, "its shape's ffn is 64, here it is 77"),
        (
            {"implementation": dataclasses.replace(HEAD.implementation, gradient_sums="separate")},
            "its implementation's gradient_sums is fused, here it is separate",
        ),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, other: dict[str, object], said: str) -> None:
    path = tmp_path / "p.json"
    ProfileFile(path, HEAD).add(BLOCK, None)
    before = path.read_bytes()
    with pytest.raises(ConfigError) as raised:
        ProfileFile(path, dataclasses.replace(HEAD, **other))  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"{path}: this run cannot go on with it: {said}")
    assert str(raised.value).endswith("; give another --out, or remove the file to measure again")
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[1]"])
def test_a_damaged_profile_is_refused_by_name(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = tmp_path / "p.json"
    ProfileFile(path, HEAD).add(BLOCK, None)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=rf"^{path}: "):
        ProfileFile(path, HEAD)


def test_a_profile_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    ProfileFile(path, HEAD).add(BLOCK, None)
    path.write_text(path.read_text().replace('"format_version": 3', '"format_version": 4'))
    with pytest.raises(ConfigError, match=r"format_version is 4, .* up to 3"):
        ProfileFile(path, HEAD)
