"""Any cut loads any other cut, and what is not right is refused by name."""

import dataclasses
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero.checkpoint.reader import LoadedCheckpoint, load_checkpoint
from hetero.errors import CheckpointError
from tests.helpers.checkpoints import (
    MODEL,
    Touch,
    assert_filled,
    expected,
    make_slices,
    plan_of,
    save_alone,
    sign,
    state_of,
)

MIXED = ("weights", "master", "exp_avg", "exp_avg_sq")
RNG = {"cpu": torch.arange(7, dtype=torch.uint8)}
SHARD = "rank_00001.safetensors"


def save(folder: Path, *, num_ranks: int = 2, cut: int = 0, step: int = 5, **options: object) -> Path:
    plan = plan_of(world_size=num_ranks)
    ranks = [make_slices(step=step, rank=r, num_ranks=num_ranks, cut=cut, **options) for r in range(num_ranks)]
    return save_alone(folder, ranks, state_of(plan, step=step), rank_state=RNG)


def load(folder: Path, **options: object) -> LoadedCheckpoint:
    return load_checkpoint(
        folder,
        **{"step": None, "slices": make_slices(step=None, cut=99), "plan": plan_of(), "rank": 0, **options},
    )


@pytest.mark.parametrize("num_saving", [1, 2, 5])
@pytest.mark.parametrize("num_loading", [1, 3])
def test_any_cut_loads_any_other(tmp_path: Path, num_saving: int, num_loading: int) -> None:
    save(tmp_path, num_ranks=num_saving, cut=num_saving)
    for rank in range(num_loading):
        slices = make_slices(step=None, rank=rank, num_ranks=num_loading, cut=20 + num_loading)
        load(tmp_path, slices=slices, rank=rank, plan=plan_of(world_size=num_loading))
        assert_filled(slices, step=5)


def test_a_step_is_chosen(tmp_path: Path) -> None:
    save(tmp_path, step=5)
    save(tmp_path, step=6)
    for step, wanted in ((5, 5), (6, 6), (None, 6)):
        slices = make_slices(step=None)
        assert load(tmp_path, step=step, slices=slices).state.step == wanted
        assert_filled(slices, step=wanted)


def test_scalars_and_what_belongs_to_a_rank_come_back_under_the_same_plan(tmp_path: Path) -> None:
    save(tmp_path, num_ranks=2)
    plan = plan_of(world_size=2)
    loaded = load(tmp_path, plan=plan, rank=1)
    assert loaded.state == state_of(plan, step=5)
    assert loaded.rank_state is not None
    assert torch.equal(loaded.rank_state["cpu"], RNG["cpu"])
    assert loaded.notes == ()


def test_another_plan_is_told_that_random_numbers_start_anew(tmp_path: Path) -> None:
    save(tmp_path, num_ranks=2)
    loaded = load(tmp_path, plan=plan_of(world_size=1))
    assert loaded.rank_state is None
    assert "saved under another plan" in loaded.notes[0]


class TestPrecision:
    def test_master_weights_come_from_weights_where_there_are_none(self, tmp_path: Path) -> None:
        save(tmp_path)
        slices = make_slices(step=None, kinds=MIXED, dtypes={"weights": torch.bfloat16})
        loaded = load(tmp_path, slices=slices, plan=dataclasses.replace(plan_of(), precision="bf16"))
        for box in slices:
            name = box.name.replace("master/", "weights/")
            assert torch.equal(box.tensor, expected(box, step=5, name=name).to(box.tensor.dtype)), box.name
        assert "saved in fp32, loaded in bf16" in loaded.notes[-1]

    @pytest.mark.parametrize(
        ("wanted", "source"), [(torch.float32, "master"), (torch.float16, "master"), (torch.bfloat16, "weights")]
    )
    def test_weights_come_from_master_weights_but_in_their_own_precision(
        self, tmp_path: Path, wanted: torch.dtype, source: str
    ) -> None:
        save(tmp_path, kinds=MIXED, dtypes={"weights": torch.bfloat16})
        slices = make_slices(step=None, kinds=["weights"], dtypes={"weights": wanted})
        load(tmp_path, slices=slices)
        for box in slices:
            name = box.name.replace("weights/", f"{source}/")
            assert torch.equal(box.tensor, expected(box, step=5, name=name).to(wanted)), box.name


class TestMissingOptimizer:
    def test_it_is_refused_with_the_way_out(self, tmp_path: Path) -> None:
        save(tmp_path, kinds=["weights"])
        slices = make_slices(step=None)
        message = r"it has no exp_avg/embedding.*it holds weights only.*--finetune"
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, slices=slices)
        assert not any(box.tensor.any() for box in slices)

    def test_weights_alone_can_be_loaded(self, tmp_path: Path) -> None:
        save(tmp_path)
        slices = make_slices(step=None)
        loaded = load(tmp_path, slices=slices, only_weights=True, plan=plan_of(world_size=2))
        assert_filled([box for box in slices if box.name.startswith("weights/")], step=5)
        assert not any(box.tensor.any() for box in slices if not box.name.startswith("weights/"))
        assert loaded.rank_state is None


class TestAnotherModel:
    def test_the_fields_that_differ_are_named(self, tmp_path: Path) -> None:
        save(tmp_path)
        model = dataclasses.replace(MODEL, num_layers=3, rotary_base=500.5)
        message = "another model: num_layers 1 != 3, rotary_base 10000.0 != 500.5 here"
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, plan=plan_of(model))

    def test_another_vocabulary_padding(self, tmp_path: Path) -> None:
        save(tmp_path)
        model = dataclasses.replace(MODEL, padded_vocab_size=128)
        with pytest.raises(CheckpointError, match=r"padded_vocab_size 64 != 128 here; .*-divisible-by .* to 64"):
            load(tmp_path, plan=plan_of(model))


class TestDamage:
    def test_every_flipped_byte_is_found(self, tmp_path: Path) -> None:
        checkpoint = save(tmp_path)
        draw = random.Random(0)
        slices = make_slices(step=None)
        for path in sorted(checkpoint.iterdir()):
            content = path.read_bytes()
            # The first bytes are the length of a shard's header.
            for position in {*range(0, 16, 3), *draw.sample(range(len(content)), 25)}:
                flipped = bytearray(content)
                flipped[position] ^= 1 << draw.randrange(8)
                path.write_bytes(flipped)
                with pytest.raises(CheckpointError, match=str(checkpoint)):
                    load(tmp_path, slices=slices, plan=plan_of(world_size=2))
            path.write_bytes(content)
        load(tmp_path, slices=slices)
        assert_filled(slices, step=5)

    def test_a_header_that_calls_the_same_bytes_something_else(self, tmp_path: Path) -> None:
        path = save(tmp_path) / SHARD
        path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
        with pytest.raises(CheckpointError, match=rf"{SHARD}: the checksum of its header is wrong"):
            load(tmp_path)

    def test_a_shard_without_its_end(self, tmp_path: Path) -> None:
        checkpoint = save(tmp_path)
        size = (checkpoint / SHARD).stat().st_size
        os.truncate(checkpoint / SHARD, size - 1)
        slices = make_slices(step=None)
        with pytest.raises(CheckpointError, match=rf"{SHARD}: it has {size - 1} bytes, not {size}"):
            load(tmp_path, slices=slices)
        assert not any(box.tensor.any() for box in slices)

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        checkpoint = save(tmp_path)
        (checkpoint / SHARD).unlink()
        with pytest.raises(CheckpointError, match=rf"{SHARD}: shard missing; .*file system that all hosts see"):
            load(tmp_path)

    @pytest.mark.parametrize("name", ["state.json", "manifest.json", "SHA256SUMS"])
    def test_a_missing_index(self, tmp_path: Path, name: str) -> None:
        checkpoint = save(tmp_path)
        (checkpoint / name).unlink()
        with pytest.raises(CheckpointError, match=f"damaged checkpoint.*{name}"):
            load(tmp_path)

    def test_a_shard_of_another_checkpoint(self, tmp_path: Path) -> None:
        """As large, as sound, and from another step."""
        save(tmp_path, step=5)
        shutil.copy(save(tmp_path, step=6) / SHARD, tmp_path / "step_00000005" / SHARD)
        with pytest.raises(CheckpointError, match=rf"{SHARD}: the checksum of .* is wrong"):
            load(tmp_path, step=5)

    def test_damage_that_this_rank_does_not_read_is_none_of_its_business(self, tmp_path: Path) -> None:
        checkpoint = save(tmp_path)
        path = checkpoint / SHARD
        moments = [key for key in load_file(path) if key.startswith("exp_avg/")]
        content = path.read_bytes()
        begin, _ = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])[moments[0]]["data_offsets"]
        flipped = bytearray(content)
        flipped[8 + int.from_bytes(content[:8], "little") + begin] ^= 1
        path.write_bytes(flipped)
        load(tmp_path, only_weights=True)
        with pytest.raises(CheckpointError, match=r"the checksum of exp_avg/"):
            load(tmp_path)


class TestForgery:
    """Files whose checksums a forger made right."""

    @pytest.fixture
    def forge(self, tmp_path: Path) -> Callable[[Callable[[dict], None]], None]:
        checkpoint = save(tmp_path)

        def edit(change: Callable[[dict], None]) -> None:
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            change(manifest)
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))
            sign(checkpoint)

        return edit

    def test_a_file_outside_the_folder(self, tmp_path: Path, forge: Callable) -> None:
        forge(lambda manifest: manifest["shards"][0].update(file="../../../etc/passwd"))
        with pytest.raises(CheckpointError, match="etc/passwd' is not a plain file name"):
            load(tmp_path)

    def test_an_unknown_key(self, tmp_path: Path, forge: Callable) -> None:
        forge(lambda manifest: manifest.update(run="this"))
        with pytest.raises(CheckpointError, match="unknown key 'run'"):
            load(tmp_path)

    def test_a_format_of_the_future(self, tmp_path: Path, forge: Callable) -> None:
        forge(lambda manifest: manifest.update(format_version=2))
        with pytest.raises(CheckpointError, match="not a file of this version of the format"):
            load(tmp_path)

    def test_another_shape(self, tmp_path: Path, forge: Callable) -> None:
        def widen(manifest: dict) -> None:
            name = "weights/decoder.final_layernorm.weight"
            manifest["tensors"][name]["shape"] = [9]
            extra = {"name": name, "offsets": [8], "shape": [1], "crc32": 0}
            manifest["shards"][0]["boxes"].append(extra)

        forge(widen)
        with pytest.raises(CheckpointError, match=r"final_layernorm.weight has shape \[9\], the model needs \[8\]"):
            load(tmp_path)

    def test_json_too_deep_to_parse(self, tmp_path: Path) -> None:
        checkpoint = save(tmp_path)
        (checkpoint / "manifest.json").write_text("[" * 100_000)
        sign(checkpoint)
        with pytest.raises(CheckpointError, match="not a file of this version"):
            load(tmp_path)

    def test_a_header_that_points_outside_its_file(self, tmp_path: Path, forge: Callable) -> None:
        path = tmp_path / "step_00000005" / SHARD
        header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(path.stat().st_size))
        forge(lambda manifest: trust(manifest, path))
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            load(tmp_path)

    def test_a_pickle_is_not_run(self, tmp_path: Path, forge: Callable) -> None:
        path, trace = tmp_path / "step_00000005" / SHARD, tmp_path / "was_run"
        path.write_bytes(pickle.dumps(Touch(trace)) + bytes(path.stat().st_size))
        forge(lambda manifest: trust(manifest, path))
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            load(tmp_path)
        assert not trace.exists()
        pickle.loads(path.read_bytes())
        assert trace.exists(), "the trap itself does not work"

    def test_tensors_under_other_names(self, tmp_path: Path, forge: Callable) -> None:
        path = tmp_path / "step_00000005" / SHARD
        save_file({"a": torch.zeros(path.stat().st_size)}, path)
        forge(lambda manifest: trust(manifest, path))
        with pytest.raises(CheckpointError, match="cannot be read"):
            load(tmp_path)


def trust(manifest: dict, path: Path) -> None:
    """Make size and header checksum those of the file that is there."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[: 8 + min(length, len(content))]
    shard = next(each for each in manifest["shards"] if each["file"] == path.name)
    shard.update(size_bytes=len(content), header_crc32=zlib.crc32(header))
