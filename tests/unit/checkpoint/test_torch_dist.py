"""torch_dist folders are read without running what they say; those of other models and layouts are refused."""

import collections
import dataclasses
import io
import json
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from hetero.checkpoint.interchange.metadata_pickle import read_metadata
from hetero.checkpoint.interchange.torch_dist import TorchDistSource, write_torch_dist
from hetero.errors import CheckpointError, HeteroError
from hetero.serialization import to_json
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import Parameter, parameters
from tests.helpers.checkpoints import Touch, full_tensor
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tools.convert_checkpoint import main

LLAMA = llama_model(num_layers=2)


class RandomWeights:
    """Weights that depend on their names alone."""

    step = 12
    dtype = torch.float32

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    def tensor(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        return full_tensor(parameter.name, parameter.shape, step=1, dtype=dtype)


def assert_weights(source: TorchDistSource, dtype: torch.dtype = torch.float32) -> None:
    for parameter in parameters(source.model):
        expected = RandomWeights(source.model).tensor(parameter, dtype)
        assert torch.equal(source.tensor(parameter, dtype), expected), parameter.name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    write_torch_dist(RandomWeights(LLAMA), folder, dtype=torch.float32)
    return folder


@pytest.mark.parametrize("model", [LLAMA, gpt2_model(num_layers=1), moe_model(num_layers=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read(tmp_path: Path, model: ModelSpec, dtype: torch.dtype) -> None:
    write_torch_dist(RandomWeights(model), tmp_path / "a", dtype=dtype)
    source = TorchDistSource(tmp_path / "a", model=model)
    assert source.dtype == dtype
    assert_weights(source, dtype)


def test_what_is_written_names_nothing_that_depends_on_the_python(saved: Path) -> None:
    """Python 3.13 has a module of its own for the classes of paths, which others cannot import."""
    strings = [
        value for _, value, _ in pickletools.genops((saved / ".metadata").read_bytes()) if isinstance(value, str)
    ]
    assert [text for text in strings if text.startswith("pathlib")] == []


def test_every_torch_reads_what_is_written(saved: Path) -> None:
    """Those before 2.15 take five fields and no other number."""
    states: list[tuple[object, ...]] = []
    with mock.patch.object(TensorProperties, "__setstate__", lambda _, state: states.append(state)):
        pickle.loads((saved / ".metadata").read_bytes())
    assert {len(state) for state in states} == {5}


def test_properties_of_torch_2_15_are_read(saved: Path) -> None:
    """It writes strides as a sixth field."""
    state = (torch.float32, torch.strided, False, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, False, (4, 1))
    path = saved / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    with mock.patch.object(TensorProperties, "__getstate__", return_value=state):
        path.write_bytes(pickle.dumps(metadata))
    assert b"TensorProperties" in path.read_bytes()
    assert_weights(TorchDistSource(saved, model=LLAMA))


def test_layers_under_names_of_their_own(tmp_path: Path) -> None:
    """As megatron-core saves layers that are not alike."""
    tensors = {}
    for parameter in parameters(LLAMA):
        name = parameter.name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        tensors[name] = RandomWeights(LLAMA).tensor(parameter, torch.float32)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert_weights(TorchDistSource(tmp_path, model=LLAMA))


@pytest.mark.parametrize(("word", "name", "step"), [("12", "iter_0000012", 12), ("release", "release", 0)])
def test_the_newest_of_many(tmp_path: Path, saved: Path, word: str, name: str, step: int) -> None:
    saved.rename(tmp_path / name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(f"{word}\n")
    source = TorchDistSource(tmp_path, model=LLAMA)
    assert source.step == step
    assert_weights(source)


@pytest.mark.parametrize("saved_rows", [61, 64, 128, 1024])
@pytest.mark.parametrize("rows", [61, 64, 128, 512])
@pytest.mark.parametrize("tied", [False, True])
def test_padding_may_be_another(tmp_path: Path, saved_rows: int, rows: int, tied: bool) -> None:
    """Megatron-LM pads to a multiple of 128 x tp, or of what --make-vocab-size-divisible-by says instead of 128."""
    theirs = dataclasses.replace(LLAMA, padded_vocab_size=saved_rows, tied_embeddings=tied)
    write_torch_dist(RandomWeights(theirs), tmp_path / "a", dtype=torch.float32)
    source = TorchDistSource(tmp_path / "a", model=dataclasses.replace(theirs, padded_vocab_size=rows))
    for parameter, saved in zip(parameters(source.model), parameters(theirs), strict=True):
        tensor = source.tensor(parameter, torch.float32)
        expected = RandomWeights(theirs).tensor(saved, torch.float32)
        both = min(len(tensor), len(expected))
        assert tensor.shape == parameter.shape
        assert torch.equal(tensor[:both], expected[:both]), parameter.name
        assert not tensor[both:].any(), parameter.name
    if saved_rows == rows:
        assert source.notes == ()
        return
    [note] = source.notes
    assert f"of 61 tokens is padded to {saved_rows:,} rows in the checkpoint and to {rows:,} here" in note
    assert ("cut off" if saved_rows > rows else "rows of zeros are added") in note


def test_the_tool_takes_an_export_of_ours_that_is_padded_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asked whether --model was the model that was saved."""
    write_torch_dist(RandomWeights(LLAMA), tmp_path / "out", dtype=torch.float32)
    (tmp_path / "model.json").write_text(to_json(dataclasses.replace(LLAMA, padded_vocab_size=256)))
    paths = ["--input", str(tmp_path / "out"), "--model", str(tmp_path / "model.json")]
    assert main(["--from", "megatron", "--to", "hetero", *paths, "--output", str(tmp_path / "ours")]) == 0
    assert "is padded to 64 rows in the checkpoint and to 256 here" in capsys.readouterr().out
    flags = ["--make-vocab-size-divisible-by", "64"]
    assert main(["--from", "megatron", "--to", "hetero", *paths, *flags, "--output", str(tmp_path / "same")]) == 0
    assert "is padded to" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["decoder.layers.mlp.router.expert_bias", "mtp.layers.0.eh_proj.weight"])
def test_a_tensor_that_would_be_lost_is_refused(tmp_path: Path, name: str) -> None:
    tensors = {p.name: RandomWeights(LLAMA).tensor(p, torch.float32) for p in parameters(LLAMA)}
    optimizer = {"optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(32), "rng_state": torch.ones(1)}
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    for more in ({}, {name: torch.ones(2, 32)}):
        dcp.save({**tensors, **optimizer, **more}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
        if not more:
            assert_weights(TorchDistSource(tmp_path, model=LLAMA))
    with pytest.raises(CheckpointError, match=f"{name} is no part of the model that --model describes, and would be"):
        TorchDistSource(tmp_path, model=LLAMA)


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": 40}, r"has shape \[64, 32\]; the model needs \[64, 40\]"),
            ({"num_layers": 3}, r"the model needs \[32\] at index \[2\] of it. Is --model"),
            ({"num_layers": 1}, r"layer_norm_weight holds 2 layers or experts, --model has 1; is --model"),
            ({"tied_embeddings": True}, "output_layer.weight is no part of the model that --model describes"),
            ({"vocab_size": 65, "padded_vocab_size": 128}, r"has 64 rows, and --model a vocabulary of 65 tokens; is"),
            (
                {"padded_vocab_size": 2**17},
                r"has 64 rows, and --model 61 tokens in 131,072 rows, which differs by more",
            ),
            ({"qkv_bias": True}, "no decoder.layers.self_attention.linear_qkv.bias"),
        ],
    )
    def test_another_model(self, saved: Path, change: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            TorchDistSource(saved, model=dataclasses.replace(LLAMA, **change))

    def test_another_backend(self, saved: Path) -> None:
        (saved / "metadata.json").write_text('{"sharded_backend": "zarr"}')
        with pytest.raises(
            CheckpointError, match=r"sharded_backend is 'zarr', only 'torch_dist'.*--ckpt-format torch_d"
        ):
            TorchDistSource(saved, model=LLAMA)

    def test_half_a_folder(self, saved: Path) -> None:
        (saved / ".metadata").unlink()
        with pytest.raises(HeteroError, match=r"\.metadata: (no such file|cannot be read)"):
            TorchDistSource(saved, model=LLAMA)

    def test_formats_of_fsdp(self, saved: Path) -> None:
        """Megatron-LM tells them by a .metadata without a metadata.json."""
        (saved / "metadata.json").unlink()
        with pytest.raises(CheckpointError, match=r"as Megatron-LM's formats torch_dcp and fsdp_dtensor have; only"):
            TorchDistSource(saved, model=LLAMA)

    @pytest.mark.parametrize("rank", ["mp_rank_00", "mp_rank_00_000"])
    @pytest.mark.parametrize("given", [".", "iter_0000012", "iter_0000012/{rank}"])
    def test_the_older_format(self, tmp_path: Path, rank: str, given: str) -> None:
        """A pickle of each rank, which is not opened: it is named, and how Megatron-LM converts it."""
        trace = tmp_path / "was_run"
        folder = tmp_path / "run"
        (folder / "iter_0000012" / rank).mkdir(parents=True)
        torch.save({"args": Touch(trace), "iteration": 12}, folder / "iter_0000012" / rank / "model_optim_rng.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text("12")
        with pytest.raises(CheckpointError) as caught:
            TorchDistSource(folder / given.format(rank=rank), model=LLAMA)
        said = str(caught.value)
        assert "Megatron-LM's older format torch, which has a pickle of each rank" in said
        assert f"--load {folder} --ckpt-format torch --ckpt-convert-format torch_dist --ckpt-convert-save NEW" in said
        assert not trace.exists()

    def test_a_folder_of_checkpoints_without_a_tracker(self, tmp_path: Path, saved: Path) -> None:
        saved.rename(tmp_path / "iter_0000012")
        (tmp_path / "iter_0000004").mkdir()
        with pytest.raises(CheckpointError, match=r"no latest_chec.*give one of .*: iter_0000004, iter_0000012$"):
            TorchDistSource(tmp_path, model=LLAMA)

    @pytest.mark.parametrize("word", ["13", "release"])
    def test_a_tracker_of_a_checkpoint_that_is_gone(self, tmp_path: Path, saved: Path, word: str) -> None:
        saved.rename(tmp_path / "iter_0000012")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(word)
        with pytest.raises(CheckpointError, match=rf"it says {word}, and there is no .*: iter_0000012$"):
            TorchDistSource(tmp_path, model=LLAMA)

    @pytest.mark.parametrize("given", [".", "empty", "deepspeed"])
    def test_a_folder_above_or_another(self, tmp_path: Path, given: str) -> None:
        (tmp_path / "runs" / "run" / "iter_0000012").mkdir(parents=True)
        (tmp_path / "runs" / "empty").mkdir()
        (tmp_path / "runs" / "deepspeed").mkdir()
        (tmp_path / "runs" / "deepspeed" / "mp_rank_00_model_states.pt").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"no checkpoint of Megatron-LM, which has a metadata.json; give the"):
            TorchDistSource(tmp_path / "runs" / given, model=LLAMA)

    def test_a_tracker_that_leads_elsewhere(self, saved: Path) -> None:
        (saved / "latest_checkpointed_iteration.txt").write_text("../other")
        with pytest.raises(CheckpointError, match="must be a number or release"):
            TorchDistSource(saved, model=LLAMA)

    def test_a_file_without_its_end(self, saved: Path) -> None:
        [file] = saved.glob("*.distcp")
        file.write_bytes(file.read_bytes()[:-2000])
        with pytest.raises(CheckpointError, match=rf"{file.name}: it has .* bytes, and should have .*complete"):
            TorchDistSource(saved, model=LLAMA)

    def test_a_flipped_byte_of_a_tensor(self, saved: Path) -> None:
        [file] = saved.glob("*.distcp")
        content = file.read_bytes()
        at = content.index(full_tensor("output_layer.weight", (64, 32), step=1).numpy().tobytes()) + 77
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match=r"output_layer\.weight cannot be read: the checksum of .* is wrong"):
            assert_weights(TorchDistSource(saved, model=LLAMA))

    def test_a_missing_file(self, saved: Path) -> None:
        [file] = saved.glob("*.distcp")
        file.unlink()
        with pytest.raises(CheckpointError, match=rf"{file.name}: no such file, and .*weight should be in it"):
            TorchDistSource(saved, model=LLAMA)

    @pytest.mark.parametrize("keep", [0, 1, 100, 1000])
    def test_metadata_without_its_end(self, saved: Path, keep: int) -> None:
        (saved / ".metadata").write_bytes((saved / ".metadata").read_bytes()[:keep])
        with pytest.raises(CheckpointError, match=r"\.metadata: (damaged|refused)"):
            TorchDistSource(saved, model=LLAMA)


class CallsEval:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1 + 1",)


class TestHostile:
    def test_metadata_that_would_touch_a_file(self, tmp_path: Path, saved: Path) -> None:
        trace = tmp_path / "was_run"
        path = saved / ".metadata"
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            path.write_bytes(pickle.dumps(Touch(trace), protocol=protocol))
            with pytest.raises(CheckpointError, match=r"refused: it (names \w+\.\w+|has the instruction 0x)"):
                TorchDistSource(saved, model=LLAMA)
            assert not trace.exists()
        pickle.loads(path.read_bytes())
        assert trace.exists(), "the trap itself does not work"

    def test_metadata_that_carries_the_trap_inside(self, tmp_path: Path, saved: Path) -> None:
        trace = tmp_path / "was_run"
        self.change(saved, lambda metadata: setattr(metadata, "planner_data", Touch(trace)))
        with pytest.raises(CheckpointError, match="refused: it names"):
            TorchDistSource(saved, model=LLAMA)
        assert not trace.exists()

    @pytest.mark.parametrize(
        "trap",
        [
            CallsEval(),
            collections.OrderedDict(),
            json.loads,
            io.BytesIO(),
            torch.nn.Linear,
            Metadata.__init__,
        ],
    )
    def test_anything_but_records_is_refused(self, tmp_path: Path, trap: object) -> None:
        (tmp_path / "m").write_bytes(pickle.dumps(trap))
        with pytest.raises(CheckpointError, match="refused: it names"):
            read_metadata(tmp_path / "m")

    def test_plain_data_is_no_metadata(self, tmp_path: Path) -> None:
        (tmp_path / "m").write_bytes(pickle.dumps({"a": 1}))
        with pytest.raises(CheckpointError, match="holds a dict, not a checkpoint's metadata"):
            read_metadata(tmp_path / "m")

    @pytest.mark.parametrize(
        ("shared", "change"),
        [
            (Metadata, b"}\x8c\x06markerNsb."),
            (Metadata, b"N}\x8c\x06markerNs\x86b."),
            (torch.serialization._get_layout, b"}\x8c\x06markerNsb."),
            (torch.serialization._get_layout, b"N}\x8c\x06markerNs\x86b."),
            (WriteItemType.SHARD, b"}\x8c\x06markerNsb."),
            (torch.bfloat16, b"N}\x8c\x06markerNs\x86b."),
        ],
        ids=["type", "slots of a type", "function", "slots of a function", "member", "slots of a dtype"],
    )
    def test_what_the_process_shares_is_not_changed(self, tmp_path: Path, shared: object, change: bytes) -> None:
        """Not even before the refusal: types, functions and members of enumerations are those of everybody."""
        (tmp_path / "m").write_bytes(pickle.dumps(shared, protocol=4)[:-1] + change)
        with pytest.raises(CheckpointError, match="refused: it changes a"):
            read_metadata(tmp_path / "m")
        assert not hasattr(shared, "marker")

    def test_a_record_is_filled_in_by_its_fields_alone(self, tmp_path: Path) -> None:
        record = pickle.dumps(Metadata({}), protocol=4)
        assert record.endswith(b"ub.")
        (tmp_path / "m").write_bytes(record[:-1] + b"N}\x8c\x06markerNs\x86b.")
        with pytest.raises(CheckpointError, match="refused: it fills in a Metadata from a tuple"):
            read_metadata(tmp_path / "m")

    @pytest.mark.parametrize(
        ("code", "name"),
        [(b"\x82\x01", "EXT1"), (b"Q", "BINPERSID"), (b"\x96" + b"\x01" + bytes(7), "BYTEARRAY8"), (b"(o", "OBJ")],
    )
    def test_instructions_that_records_have_no_use_for(self, tmp_path: Path, code: bytes, name: str) -> None:
        instruction = next(each for each in pickletools.opcodes if each.name == name)
        (tmp_path / "m").write_bytes(pickle.PROTO + b"\x04" + code + b".")
        with pytest.raises(CheckpointError, match=f"refused: it has the instruction 0x{ord(instruction.code):02x}"):
            read_metadata(tmp_path / "m")

    @pytest.mark.parametrize("key", [3, (), (("a",), ("b",)), torch.Size((1,)), MetadataIndex(("a",)), None])
    def test_only_texts_and_places_of_parts_are_keys(self, tmp_path: Path, key: Any) -> None:
        (tmp_path / "m").write_bytes(pickle.dumps(Metadata({}, planner_data={key: 1}), protocol=4))
        with pytest.raises(CheckpointError, match=r"refused: it has .* for a key"):
            read_metadata(tmp_path / "m")

    def test_a_shared_list_counts_for_each_tensor_that_has_it(self, tmp_path: Path) -> None:
        size = torch.Size((1,))
        one = TensorStorageMetadata(TensorProperties(), size, [ChunkStorageMetadata(torch.Size((0,)), size)] * 500)
        (tmp_path / "m").write_bytes(
            pickle.dumps(Metadata({str(i): one for i in range(50)}, storage_data={}), protocol=4)
        )
        with pytest.raises(CheckpointError, match=r"refused: it counts more blocks than it has bytes \("):
            read_metadata(tmp_path / "m")

    def test_a_tensor_of_many_dimensions(self, tmp_path: Path) -> None:
        size = torch.Size((1,) * 33)
        one = TensorStorageMetadata(TensorProperties(), size, [ChunkStorageMetadata(torch.Size((0,) * 33), size)])
        (tmp_path / "m").write_bytes(pickle.dumps(Metadata({"a": one}, storage_data={}), protocol=4))
        with pytest.raises(CheckpointError, match="refused: a is not cut into blocks"):
            read_metadata(tmp_path / "m")

    @pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a/b.distcp", ".metadata", 3])
    def test_a_file_outside_the_folder(self, saved: Path, name: object) -> None:
        def lead_away(metadata: Metadata) -> None:
            info = next(iter(metadata.storage_data.values()))
            info.relative_path = name

        self.change(saved, lead_away)
        with pytest.raises(CheckpointError, match=r"is not a \.distcp file of this folder"):
            TorchDistSource(saved, model=LLAMA)

    @pytest.mark.parametrize("field", ["storage_data", "state_dict_metadata"])
    def test_records_without_their_fields(self, saved: Path, field: str) -> None:
        self.change(saved, lambda metadata: vars(metadata).pop(field))
        with pytest.raises(CheckpointError, match="damaged: AttributeError"):
            TorchDistSource(saved, model=LLAMA)

    def test_blocks_of_another_dimension(self, saved: Path) -> None:
        def flatten(metadata: Metadata) -> None:
            stored = next(s for s in metadata.state_dict_metadata.values() if hasattr(s, "chunks"))
            stored.chunks = [ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([9]))]

        self.change(saved, flatten)
        with pytest.raises(CheckpointError, match="is not cut into blocks"):
            TorchDistSource(saved, model=LLAMA)

    def test_boxes_that_leave_something_out(self, saved: Path) -> None:
        def shrink(metadata: Metadata) -> None:
            metadata.state_dict_metadata["output_layer.weight"].chunks = []

        self.change(saved, shrink)
        with pytest.raises(CheckpointError, match=r"output_layer\.weight has 0 of 2048 elements"):
            TorchDistSource(saved, model=LLAMA)

    def test_a_tensor_that_would_touch_a_file(self, tmp_path: Path, saved: Path) -> None:
        trace = tmp_path / "was_run"
        buffer = io.BytesIO()
        torch.save([Touch(trace), "as large as a tensor" * 1000], buffer)
        (saved / "trap.distcp").write_bytes(buffer.getvalue())

        def point_to_it(metadata: Metadata) -> None:
            for info in metadata.storage_data.values():
                info.relative_path, info.offset, info.length = "trap.distcp", 0, len(buffer.getvalue())

        self.change(saved, point_to_it)
        source = TorchDistSource(saved, model=LLAMA)
        with pytest.raises(CheckpointError, match="cannot be read"):
            source.tensor(parameters(LLAMA)[0], torch.float32)
        assert not trace.exists()
        torch.load(saved / "trap.distcp", weights_only=False)
        assert trace.exists(), "the trap itself does not work"

    def test_something_else_in_place_of_a_tensor(self, saved: Path) -> None:
        buffer = io.BytesIO()
        torch.save({"a": "as large as a tensor" * 1000}, buffer)
        [file] = saved.glob("*.distcp")
        file.write_bytes(buffer.getvalue())

        def point_to_it(metadata: Metadata) -> None:
            for info in metadata.storage_data.values():
                info.offset, info.length = 0, len(buffer.getvalue())

        self.change(saved, point_to_it)
        source = TorchDistSource(saved, model=LLAMA)
        with pytest.raises(CheckpointError, match="is something else"):
            source.tensor(parameters(LLAMA)[0], torch.float32)

    def change(self, saved: Path, change: Callable[[Metadata], None]) -> None:
        path = saved / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        # The keys of storage_data hash by value, the records can be changed in place.
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))
