"""Kinds of file that a user names: a sound one of each, and a reader that holds what it read against the file."""

import dataclasses
import json
import random
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from safetensors.torch import load as load_safetensors
from tokenizers import decoders, models, pre_tokenizers, trainers

from hetero.checkpoint.interchange.families import join, rows
from hetero.checkpoint.interchange.huggingface import HuggingFaceSource, write_hugging_face
from hetero.checkpoint.interchange.native import NativeSource
from hetero.checkpoint.interchange.torch_dist import TorchDistSource, write_torch_dist
from hetero.checkpoint.interchange.weights import WeightSource
from hetero.checkpoint.reader import load_checkpoint
from hetero.commands.show import legal_plan
from hetero.data import shipped_profiles
from hetero.errors import HeteroError
from hetero.report.tables.plan import plan_picture, plan_table
from hetero.serialization import load, to_json
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from hetero.spec.model_import import from_hugging_face, load_model
from hetero.spec.parameters import Parameter, parameters
from hetero.spec.profile import Profile, ProfileStore
from megatron.pretrain.cli.training_config import DataConfig
from megatron.pretrain.data import build_dataset
from megatron.pretrain.tokenizer import ByteLevelTokenizer, HuggingFaceTokenizer
from tests.fuzz.said import assert_says
from tests.helpers.checkpoints import full_tensor, make_slices, plan_of, save_alone, sign, state_of
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, stage

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

ROOT = Path(__file__).parents[2]
MODEL = llama_model(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24)
STEP = 5
SEQ = 8


@dataclass(frozen=True)
class Subject:
    """
    make: writes a sound one into an empty folder.
    read: reads it as the project does; raises HeteroError, or AssertionError if what it read is not what is there.
    files: glob patterns of the files that are damaged.
    trusts: what a forger does after, so that checksums do not tell.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], None]
    files: tuple[str, ...]
    trusts: Callable[[Path], None] | None = None
    is_binary: bool = False


def _make_native(folder: Path) -> None:
    training_plan = plan_of(MODEL, world_size=2)
    ranks = [make_slices(step=STEP, rank=r, num_ranks=2, cut=1, model=MODEL) for r in range(2)]
    save_alone(folder, ranks, state_of(training_plan, step=STEP), rank_state={"cpu": torch.arange(7)})


def _read_native(folder: Path) -> None:
    [checkpoint] = folder.glob("step_*")
    slices = make_slices(step=None, cut=9, model=MODEL)
    training_plan = plan_of(MODEL, world_size=2)
    refusals = []
    try:
        loaded = load_checkpoint(folder, step=None, slices=slices, plan=training_plan, rank=1)
        assert_says(checkpoint / "state.json", loaded.state)
        if loaded.rank_state is not None:
            assert torch.equal(loaded.rank_state["cpu"], torch.arange(7))
        for each in slices:
            whole = full_tensor(each.name, each.shape, step=STEP)
            box = tuple(slice(o, o + n) for o, n in zip(each.offsets, each.tensor.shape, strict=True))
            assert torch.equal(each.tensor, whole[box]), each.name
    except HeteroError as error:
        refusals.append(error)
    try:
        source = NativeSource(folder, step=None)
        _assert_weights(source, lambda each: full_tensor(f"weights/{each.name}", each.shape, step=STEP))
    except HeteroError as error:
        refusals.append(error)
    for error in refusals:
        assert str(folder) in str(error), f"names no file: {error}"
    if refusals:
        raise refusals[0]


def _trust_native(folder: Path) -> None:
    [checkpoint] = folder.glob("step_*")
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        for shard in manifest["shards"]:
            content = (checkpoint / shard["file"]).read_bytes()
            header = content[: 8 + min(int.from_bytes(content[:8], "little"), len(content))]
            shard.update(size_bytes=len(content), header_crc32=zlib.crc32(header))
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    except (ValueError, LookupError, TypeError, OSError, AttributeError, RecursionError):
        pass  # the manifest is what is damaged
    sign(checkpoint)


def _assert_weights(source: WeightSource, expected: Callable[[Parameter], torch.Tensor]) -> None:
    for each in parameters(source.model):
        assert torch.equal(source.tensor(each, torch.float32), expected(each)), each.name


class _Weights:
    """Weights that depend on their names alone."""

    model = MODEL
    step = STEP
    dtype = torch.float32

    def tensor(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        return full_tensor(parameter.name, parameter.shape, step=STEP, dtype=dtype)


def _make_hugging_face(folder: Path) -> None:
    write_hugging_face(_Weights(), folder / "hf", dtype=torch.float32, model_type=None, max_shard_bytes=8_000)


def _read_hugging_face(folder: Path) -> None:
    source = HuggingFaceSource(folder / "hf", divisible_by=8)
    config = json.loads((folder / "hf" / "config.json").read_text())
    _assert_config(source.model, config)
    # This format has no checksums: what is there is what is read, found by another reader.
    theirs: dict[str, torch.Tensor] = {}
    for file in (folder / "hf").glob("*.safetensors"):
        theirs |= load_safetensors(file.read_bytes())
    by_name = {row.ours: row for row in rows(source.model)}

    def expected(each: Parameter) -> torch.Tensor:
        row = by_name[each.name]
        return join(source.model, row.layout, [theirs[name].float() for name in row.theirs])

    for each in parameters(source.model):
        found = source.tensor(each, torch.float32)
        assert torch.equal(found.view(torch.int32), expected(each).contiguous().view(torch.int32)), each.name


def _assert_config(model: ModelSpec, config: dict[str, object]) -> None:
    expected = dataclasses.replace(
        from_hugging_face(config, source="config"), padded_vocab_size=model.padded_vocab_size
    )
    floats = {
        field.name: float(getattr(expected, field.name))
        for field in dataclasses.fields(model)
        if isinstance(getattr(model, field.name), float)
    }
    expected = dataclasses.replace(expected, **floats)
    assert model == expected, (model, expected)
    for theirs, ours in (("num_hidden_layers", "num_layers"), ("hidden_size", "hidden_size")):
        assert type(config[theirs]) is int, config[theirs]
        assert config[theirs] == getattr(model, ours), (theirs, config[theirs])


def _make_torch_dist(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_torch_dist(_Weights(), folder / "mcore", dtype=torch.float32)


def _read_torch_dist(folder: Path) -> None:
    source = TorchDistSource(folder / "mcore", model=MODEL)
    _assert_weights(source, lambda each: _Weights().tensor(each, torch.float32))


def _make_plan(folder: Path) -> None:
    stages = (stage(layers=(0, 2.5), ranks=(0, 1), tp=2), stage(layers=(2.5, 6), ranks=(2,), delay=1))
    replicas = [replica(*stages), replica(stage(layers=(0, 6), ranks=(3, 4), dp=2))]
    (folder / "plan.json").write_text(to_json(plan(gpt2_model(), replicas)))


def _read_plan(folder: Path) -> None:
    read = legal_plan(folder / "plan.json")
    assert_says(folder / "plan.json", read)
    plan_table(read)
    plan_picture(read)


def _make_cluster(folder: Path) -> None:
    (folder / "cluster.yaml").write_text((ROOT / "scripts/presets/clusters/two_zones.yaml").read_text())


DESCRIBED = """
devices:
  - name: mine
    memory_gib: 16
    compute_capability: [8, 6]
    cuda_name: "NVIDIA RTX A*"
    data_sheet: {memory_gb_per_s: 448, fp32_tflops: 19.2, tf32_tflops: 38.4, bf16_tflops: 76.7, fp16_tflops: 76.7,
                 source: its vendor}
node_types:
  - {name: box, device: mine, gpus_per_node: 2, inside_node: {bandwidth_gb_per_s: 12, latency_us: 20}}
"""


def _make_cluster_of_described_devices(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(DESCRIBED)


def _make_json_cluster(folder: Path) -> None:
    (folder / "cluster.json").write_text(to_json(load(ClusterSpec, ROOT / "scripts/presets/clusters/two_zones.yaml")))


def _read_cluster(folder: Path) -> None:
    [path] = folder.glob("cluster.*")
    cluster = load(ClusterSpec, path)
    assert_says(path, cluster)
    assert cluster.device_of_rank(cluster.num_devices - 1).name


def _make_profile(folder: Path) -> None:
    profile = next(iter(shipped_profiles()))
    few = dataclasses.replace(profile, times=profile.times[:4], updates=profile.updates[:2], memory=profile.memory[:2])
    (folder / "profile.json").write_text(to_json(few))


def _read_profile(folder: Path) -> None:
    profile = load(Profile, folder / "profile.json")
    assert_says(folder / "profile.json", profile)
    store = ProfileStore([profile])
    found = store.find(profile.shape, device=profile.device, seq_length=profile.seq_length, precision=profile.precision)
    assert found == profile


def _make_model(folder: Path) -> None:
    (folder / "model.yaml").write_text((ROOT / "scripts/presets/models/opt-350m.yaml").read_text())


def _make_json_model(folder: Path) -> None:
    (folder / "model.json").write_text(to_json(MODEL))


def _read_model(folder: Path) -> None:
    [path] = folder.glob("model.*")
    model = load_model(path)
    assert_says(path, model)
    assert all(each.numel > 0 for each in parameters(model))


def _make_config(folder: Path) -> None:
    _make_hugging_face(folder)
    (folder / "hf" / "config.json").rename(folder / "config.json")


def _read_config(folder: Path) -> None:
    model = load_model(folder / "config.json")
    config = json.loads((folder / "config.json").read_text())
    if "model_type" in config:
        _assert_config(model, config)
    else:
        assert_says(folder / "config.json", model)
    assert all(each.numel > 0 for each in parameters(model))


def _make_dataset(folder: Path) -> None:
    draw = random.Random(0)
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=DType.optimal_dtype(257))
    for length in (9, 3, 30, 1, 12, 17):
        builder.add_document(np.array([draw.randrange(257) for _ in range(length)]), [length])
    builder.finalize(str(folder / "corpus.idx"))


def _read_dataset(folder: Path) -> None:
    config = DataConfig(
        data_path=(),
        train_data_path=(str(folder / "corpus"),),
        valid_data_path=(),
        test_data_path=(),
        split="1",
        data_cache_path=folder / "cache",
        mock_data=False,
        tokenizer_type="ByteLevelTokenizer",
        tokenizer_model=None,
        seq_length=SEQ,
        eod_mask_loss=False,
        num_workers=0,
        seed=1,
    )
    dataset = build_dataset(config, ByteLevelTokenizer(), split="train", num_samples=4)
    assert all(dataset[i]["tokens"].shape == (SEQ,) for i in range(4))
    # Sequences lie end to end, as long as the index says, in the type that it says.
    index = (folder / "corpus.idx").read_bytes()
    dtype = DType.dtype_from_code(index[17])
    lengths = np.frombuffer(index, np.int32, int.from_bytes(index[18:26], "little"), 34)
    stream = np.fromfile(folder / "corpus.bin", dtype)
    assert lengths.sum() == len(stream)
    stored = IndexedDataset(str(folder / "corpus"))
    for i, expected in enumerate(np.split(stream, np.cumsum(lengths)[:-1])):
        assert np.array_equal(stored[i], expected)


def _make_tokenizer(folder: Path) -> None:
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["to be or not to be, that is the question"] * 4, trainer)
    model.save(str(folder / "tokenizer.json"))


def _read_tokenizer(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(folder / "tokenizer.json")
    said = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"] | {token["content"]: token["id"] for token in said.get("added_tokens") or []}
    assert tokenizer.vocab_size == max(vocabulary.values()) + 1
    assert all(0 <= token < tokenizer.vocab_size for token in tokenizer.tokenize("to be or not, é"))


SUBJECTS = {
    "checkpoint, as it is": Subject(_make_native, _read_native, ("step_*/*",)),
    "checkpoint, checksums forged": Subject(
        _make_native, _read_native, ("step_*/*.json", "step_*/*.safetensors"), _trust_native
    ),
    "checkpoint, manifest forged": Subject(_make_native, _read_native, ("step_*/manifest.json",), _trust_native),
    "Hugging Face folder": Subject(_make_hugging_face, _read_hugging_face, ("hf/*",)),
    "torch_dist folder": Subject(
        _make_torch_dist, _read_torch_dist, ("mcore/*.distcp", "mcore/.metadata", "mcore/*.json")
    ),
    "plan": Subject(_make_plan, _read_plan, ("plan.json",)),
    "cluster": Subject(_make_cluster, _read_cluster, ("cluster.yaml",)),
    "cluster of described devices": Subject(_make_cluster_of_described_devices, _read_cluster, ("cluster.yaml",)),
    "cluster, JSON": Subject(_make_json_cluster, _read_cluster, ("cluster.json",)),
    "profile": Subject(_make_profile, _read_profile, ("profile.json",)),
    "model": Subject(_make_model, _read_model, ("model.yaml",)),
    "model, JSON": Subject(_make_json_model, _read_model, ("model.json",)),
    "model, config.json": Subject(_make_config, _read_config, ("config.json",)),
    "data set index": Subject(_make_dataset, _read_dataset, ("corpus.idx",), is_binary=True),
    "tokenizer": Subject(_make_tokenizer, _read_tokenizer, ("tokenizer.json",)),
}
