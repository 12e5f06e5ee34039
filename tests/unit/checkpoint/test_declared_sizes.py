"""What a file says that it holds is held against its bytes before memory is allocated for it.

Address space is limited while these run: 32 GB that are allocated and never used would not show otherwise.
"""

import io
import json
import pickle
import re
import resource
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero.checkpoint.folder import read_state
from hetero.checkpoint.interchange.huggingface import HuggingFaceSource, write_hugging_face
from hetero.checkpoint.interchange.metadata_pickle import read_metadata
from hetero.checkpoint.interchange.native import NativeSource
from hetero.checkpoint.interchange.torch_dist import TorchDistSource, write_torch_dist
from hetero.checkpoint.manifest import RankTensor, SavedBlock, Shard
from hetero.checkpoint.shards import ShardReader
from hetero.errors import CheckpointError, ConfigError, HeteroError
from hetero.serialization import from_json
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import Parameter, parameters
from hetero.units import GIB
from tests.helpers.checkpoints import MODEL, full_tensor, make_slices, plan_of, save_alone, sign, state_of
from tools.convert_checkpoint import main

FIRST = "embedding.word_embeddings.weight"


@pytest.fixture(autouse=True)
def limited_address_space() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (1024 * int(mapped.split()[1]) + 4 * GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


class Weights:
    model = MODEL
    step = 3
    dtype = torch.float32

    def tensor(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        return full_tensor(parameter.name, parameter.shape, step=1, dtype=dtype)


class TestOfAPeer:
    """A node that serves a shard describes it as well: description and file may claim the same wrong size."""

    class File:
        where = "node x"

        def __init__(self, entries: dict[str, object], *, size_bytes: int, header_bytes: int | None = None) -> None:
            text = json.dumps(entries).encode()
            self.header = (len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text
            self.read_to = 0
            self._size_bytes = size_bytes

        def size_bytes(self) -> int:
            return self._size_bytes

        def read_into(self, buffer: memoryview, *, start: int) -> None:
            self.read_to = max(self.read_to, start + len(buffer))
            buffer[:] = self.header[start : start + len(buffer)].ljust(len(buffer), b" ")

        def shard(self, **tensors: Any) -> Shard:
            return Shard(
                file="x.safetensors",
                size_bytes=self._size_bytes,
                header_crc32=zlib.crc32(self.header),
                boxes=tensors.get("boxes", ()),
                rank_state=tensors.get("rank_state", ()),
            )

    def test_a_block_that_is_larger_in_the_file_than_its_description_says(self) -> None:
        block = SavedBlock(name="weights/x", offsets=(0,), shape=(4,), crc32=0)
        entry = {"dtype": "F64", "shape": [2**42], "data_offsets": [0, 2**45]}
        file = self.File({block.key: entry}, size_bytes=2**46)
        with pytest.raises(CheckpointError, match=rf"node x: weights/x\[0:4\] has shape \[{2**42}\]: damaged"):
            next(ShardReader(file, file.shard(boxes=(block,))).blocks([block]))
        assert file.read_to == len(file.header)

    def test_a_state_of_one_rank_that_no_generator_has(self) -> None:
        own = RankTensor(name="cpu", crc32=0)
        file = self.File({own.key: {"dtype": "U8", "shape": [2**45], "data_offsets": [0, 2**45]}}, size_bytes=2**46)
        with pytest.raises(CheckpointError, match=rf"node x: the state of one rank has {2**45:,} bytes, at most 1,048"):
            ShardReader(file, file.shard(rank_state=(own,))).rank_state()
        assert file.read_to == len(file.header)

    @pytest.mark.parametrize(
        ("shape", "offsets"), [([-2, -3], [0, 48]), ([2.0], [0, 16]), ([2], [0.0, 16.0]), ([2], [-16, 0])]
    )
    def test_numbers_that_are_none_of_a_size(self, shape: list[float], offsets: list[float]) -> None:
        own = RankTensor(name="cpu", crc32=0)
        file = self.File({own.key: {"dtype": "F64", "shape": shape, "data_offsets": offsets}}, size_bytes=2**20)
        with pytest.raises(CheckpointError, match="node x: not a safetensors file: rank_state/cpu"):
            ShardReader(file, file.shard(rank_state=(own,))).rank_state()

    def test_a_file_of_less_than_no_bytes(self) -> None:
        with pytest.raises(ConfigError, match=r"shard: size_bytes: .* greater than or equal to 0"):
            from_json(Shard, '{"file": "x", "size_bytes": -1, "header_crc32": 0, "boxes": []}', source="shard")

    def test_a_header_that_is_longer_than_its_tensors_need(self) -> None:
        file = self.File({}, size_bytes=2**46, header_bytes=90_000_000)
        with pytest.raises(CheckpointError, match="node x: the checksum of its header is wrong"):
            ShardReader(file, file.shard()).check()
        assert file.read_to <= 4096


class TestOurs:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        return save_alone(tmp_path, [make_slices(step=5)], state_of(plan_of(), step=5))

    def forge(self, checkpoint: Path, name: str, change: Callable[[dict], object]) -> None:
        content = json.loads((checkpoint / name).read_text())
        change(content)
        (checkpoint / name).write_text(json.dumps(content))
        sign(checkpoint)

    def converted(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> str:
        flags = ["--from", "hetero", "--to", "hf", "--output", str(checkpoint.parent / "out")]
        assert main([*flags, "--input", str(checkpoint.parent)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "Traceback" not in said
        return said

    def test_a_huge_shape_in_manifest_and_model(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """32 GB were asked for."""
        rows = 10**9

        def widen(manifest: dict) -> None:
            for name, tensor in manifest["tensors"].items():
                if name.endswith(FIRST):
                    tensor["shape"][0] = rows
            for box in manifest["shards"][0]["boxes"]:
                if box["name"].endswith(FIRST):
                    box["offsets"], box["shape"] = [0, 0], [rows, MODEL.hidden_size]

        self.forge(checkpoint, "manifest.json", widen)
        self.forge(checkpoint, "state.json", lambda state: state["model"].update(padded_vocab_size=rows))
        assert re.search(
            r"manifest\.json: the blocks of rank_00000\.safetensors are .* bytes", self.converted(checkpoint, capsys)
        )

    def test_a_huge_shape_in_the_model_alone(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.forge(checkpoint, "state.json", lambda state: state["model"].update(padded_vocab_size=10**9))
        assert re.search(r"has shape \[64, 8\], the model needs \[1000000000, 8\]", self.converted(checkpoint, capsys))

    def test_more_layers_than_can_be_listed(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.forge(checkpoint, "state.json", lambda state: state["model"].update(num_layers=10**12))
        assert re.search(
            r"state\.json.*num_layers is 1,000,000,000,000, must be at", self.converted(checkpoint, capsys)
        )

    @pytest.mark.parametrize("name", ["manifest.json", "state.json"])
    def test_a_number_of_5000_digits(self, checkpoint: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        path = checkpoint / name
        path.write_text(path.read_text().replace(" 64", " 64" + "0" * 5000).replace(":64", ":64" + "0" * 5000))
        path.write_text(path.read_text().replace("[64", "[64" + "0" * 5000))
        sign(checkpoint)
        assert re.search(rf"{name}.*a number of 5,002 digits", self.converted(checkpoint, capsys))

    def test_a_missing_tensor(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        def remove(manifest: dict) -> None:
            del manifest["tensors"][f"weights/{FIRST}"]
            [shard] = manifest["shards"]
            shard["boxes"] = [box for box in shard["boxes"] if box["name"] != f"weights/{FIRST}"]

        self.forge(checkpoint, "manifest.json", remove)
        assert f"step_00000005: its manifest has no tensor weights/{FIRST}" in self.converted(checkpoint, capsys)

    def test_a_type_that_the_shard_has_not(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """It was converted to the other type without a word."""
        name = "weights/decoder.final_layernorm.weight"
        self.forge(checkpoint, "manifest.json", lambda manifest: manifest["tensors"][name].update(dtype="float16"))
        assert re.search(r"is torch\.float32, its manifest says float16", self.converted(checkpoint, capsys))

    def test_a_state_of_another_step(self, checkpoint: Path) -> None:
        self.forge(checkpoint, "state.json", lambda state: state.update(step=6))
        with pytest.raises(CheckpointError, match=r"state\.json: it is of step 6, its folder is not"):
            read_state(checkpoint)

    @pytest.mark.slow
    def test_a_shard_header_that_says_it_is_the_whole_file(self, checkpoint: Path) -> None:
        path = checkpoint / "rank_00000.safetensors"
        with path.open("r+b") as file:
            file.write((2**40).to_bytes(8, "little"))
            file.truncate(10**13)  # a hole
        self.forge(checkpoint, "manifest.json", lambda manifest: manifest["shards"][0].update(size_bytes=10**13))
        with pytest.raises(CheckpointError, match=r"the checksum of its header is wrong"):
            NativeSource(checkpoint.parent, step=None)


class TestHuggingFace:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_hugging_face(Weights(), tmp_path / "hf", dtype=torch.float32, model_type=None, max_shard_bytes=10**9)
        return tmp_path / "hf"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": 10**9}, r"config\.json: it makes .* all tensors of the folder have [\d,]+ bytes"),
            (
                {"hidden_size": 10**30, "vocab_size": 10**30},
                r"config\.json: model: hidden_size is 1,000,.*, must be at most",
            ),
            ({"num_hidden_layers": 10**12}, r"config\.json: model: num_layers is 1,000,000,000,000, must be at"),
            ({"num_hidden_layers": 0}, r"config\.json: .*num_hidden_layers is 0, must be a whole number of at least 1"),
            ({"num_attention_heads": 0, "head_dim": None}, r"config\.json: "),
            ({"hidden_size": "8"}, r"config\.json: "),
            ({"num_hidden_layers": 1.5}, r"config\.json: "),
            ({"intermediate_size": [12]}, r"config\.json: "),
            ({"vocab_size": None}, r"config\.json: "),
        ],
    )
    def test_sizes_that_cannot_be(self, folder: Path, change: dict[str, object], message: str) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(HeteroError, match=message):
            HuggingFaceSource(folder, divisible_by=64)

    def test_a_file_that_is_no_name(self, folder: Path) -> None:
        for file in ([], {"a": 1}, None):
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
            with pytest.raises(CheckpointError, match="is not a file of this folder"):
                HuggingFaceSource(folder, divisible_by=64)

    def test_a_tensor_under_both_of_its_names(self, folder: Path) -> None:
        """One of the two won."""
        path = folder / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {"norm.weight": torch.zeros(8)}, path)
        with pytest.raises(CheckpointError, match=r"tensor norm\.weight is here beside model\.norm\.weight"):
            HuggingFaceSource(folder, divisible_by=64)

    @pytest.mark.parametrize("divisor", ["0", "-1", "1000000000000", "x"])
    def test_padding_is_allocated_so_it_has_a_limit(self, divisor: str, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--from", "hf", "--to", "hetero", "--input", "a", "--output", "b"]
        assert main([*flags, f"--make-vocab-size-divisible-by={divisor}"]) == 2
        assert "is not a whole number from 1 to 65536" in capsys.readouterr().err


class TestTorchDist:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_torch_dist(Weights(), tmp_path / "mcore", dtype=torch.float32)
        return tmp_path / "mcore"

    def wide(self) -> ModelSpec:
        return ModelSpec(**{**{f: getattr(MODEL, f) for f in MODEL.__slots__}, "padded_vocab_size": 10**9})

    def test_a_huge_shape(self, folder: Path) -> None:
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        for name in (FIRST, "output_layer.weight"):
            stored = metadata.state_dict_metadata[name]
            stored.size = stored.chunks[0].sizes = torch.Size((10**9, 8))
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=r"distcp: it has [\d,]+ bytes, and should have 32,000,000,000 of"):
            TorchDistSource(folder, model=self.wide())

    def test_parts_that_are_said_twice(self, folder: Path) -> None:
        """The same bytes for every part: each would fit into the file, and all together into no memory."""
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        metadata.state_dict_metadata[FIRST].chunks *= 3
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=f"{FIRST} has 1536 of 512 elements"):
            TorchDistSource(folder, model=MODEL)

    def test_a_part_that_is_compressed(self, folder: Path) -> None:
        """torch would inflate it: a file of 10 MB holds 10 GB of zeros."""
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        [data] = folder.glob("*.distcp")
        content = data.read_bytes()
        for index, info in metadata.storage_data.items():
            if index.fqn == FIRST:
                archive = io.BytesIO()
                with zipfile.ZipFile(io.BytesIO(content[info.offset : info.offset + info.length])) as stored:
                    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
                        for entry in stored.namelist():
                            packed.writestr(entry, stored.read(entry))
                    archive.write(bytes(info.length))
                (folder / "packed.distcp").write_bytes(archive.getvalue())
                info.relative_path, info.offset, info.length = "packed.distcp", 0, len(archive.getvalue())
        path.write_bytes(pickle.dumps(metadata))
        source = TorchDistSource(folder, model=MODEL)
        with pytest.raises(CheckpointError, match=r"packed\.distcp: .* cannot be read: "):
            source.tensor(parameters(MODEL)[0], torch.float32)

    def test_a_pickle_that_keeps_a_value_under_a_huge_number(self, tmp_path: Path) -> None:
        """An unpickler that knew the instruction would fill a table up to it: 64 GB for a file of seven bytes."""
        (tmp_path / "m").write_bytes(pickle.PROTO + b"\x02" + b"Nr\xf0\xff\xff\xff.")
        with pytest.raises(CheckpointError, match="m: refused: it has the instruction 0x72"):
            read_metadata(tmp_path / "m")

    def test_a_tracker_of_5000_digits(self, folder: Path) -> None:
        (folder / "latest_checkpointed_iteration.txt").write_text("9" * 5000)
        with pytest.raises(CheckpointError, match="must be a number or release"):
            TorchDistSource(folder, model=MODEL)
