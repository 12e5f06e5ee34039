"""Training state of about 1 GiB and where its parts lie, for the bench of recovery: made up, checked after a load."""

import dataclasses
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hetero.checkpoint.shards import tensor_infos, write_shard
from hetero.checkpoint.state import CheckpointState
from hetero.elastic.copy_folder import shard_path, slot_folder, write_copy, write_placement
from hetero.elastic.placement import OwnedBlock, place
from hetero.elastic.records import Copy, CopyPlacement
from hetero.plan.gradient_groups import gradient_buckets
from hetero.plan.ir import Plan, Replica
from hetero.plan.sub_blocks import sub_blocks_of
from hetero.runtime.sharded_state import TensorSlice
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import parameters
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage

EPOCH, STEP = 1, 100
KINDS = ("weights", "exp_avg", "exp_avg_sq")


def model(num_layers: int) -> ModelSpec:
    """Twelve layers have 1 GiB of weights and moments in fp32."""
    return llama_model(
        num_layers=num_layers,
        hidden_size=768,
        num_attention_heads=12,
        num_query_groups=12,
        kv_channels=64,
        ffn_hidden_size=2048,
        vocab_size=3072,
        padded_vocab_size=3072,
    )


def before(num_layers: int, *, sharded: bool) -> Plan:
    """Two pipelines of two stages, on four nodes."""
    half = num_layers / 2
    pipelines = [
        replica(stage(layers=(0, half), ranks=[first]), stage(layers=(half, num_layers), ranks=[first + 1]))
        for first in (0, 2)
    ]
    return _plan_of(num_layers, pipelines, sharded=sharded)


def after(num_layers: int, *, sharded: bool) -> Plan:
    """On three nodes: a pipeline of two stages, and one that has all layers."""
    half = num_layers / 2
    pipelines = [
        replica(stage(layers=(0, half), ranks=[0]), stage(layers=(half, num_layers), ranks=[1])),
        replica(stage(layers=(0, num_layers), ranks=[2])),
    ]
    return _plan_of(num_layers, pipelines, sharded=sharded)


def _plan_of(num_layers: int, pipelines: Sequence[Replica], *, sharded: bool) -> Plan:
    return dataclasses.replace(plan(model(num_layers), list(pipelines)), distributed_optimizer=sharded)


def slices_of(whole: Plan, rank: int, *, owned: bool) -> list[TensorSlice]:
    """What a rank owns, or all that it loads; zeros."""
    slices = []
    for bucket in gradient_buckets(whole, bucket_numel=40_000_000):
        if rank not in bucket.ranks:
            continue
        every, shard = slice(0, bucket.length), bucket.shard_of(rank)
        for kind in KINDS:
            is_shared = whole.distributed_optimizer and kind != "weights"
            within = shard if owned or is_shared else every
            buffer = torch.zeros(within.stop - within.start)
            for segment, offset in zip(bucket.segments, bucket.offsets, strict=False):
                start, end = max(within.start - offset, 0), min(within.stop - offset, segment.numel)
                for block in sub_blocks_of(segment, start=start, end=end):
                    at = offset + block.start - within.start
                    slices.append(
                        TensorSlice(
                            name=f"{kind}/{segment.parameter.name}",
                            shape=segment.parameter.shape,
                            offsets=block.offsets,
                            tensor=buffer[at : at + block.numel].view(block.shape),
                        )
                    )
    return slices


def expected(name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """What a block of a tensor holds: each element tells where it is."""
    values = torch.full((1,) * len(shape), float(zlib.crc32(name.encode()) % 997))
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        sizes = [size if d == dim else 1 for d in range(len(shape))]
        values = values + (torch.arange(offset, offset + size) * (1.0 if dim else 0.25)).view(sizes)
    return values.expand(*shape)


def check(slices: Sequence[TensorSlice]) -> None:
    """Raise unless all that was loaded is what was saved."""
    for each in slices:
        wanted = expected(each.name, each.offsets, each.tensor.shape)
        assert torch.equal(each.tensor, wanted), f"{each.name} at {each.offsets} is wrong"


def whole_tensors(whole: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the state by name, with its shape."""
    for parameter in parameters(whole):
        for kind in KINDS:
            yield f"{kind}/{parameter.name}", parameter.shape


def write_copies(whole: Plan, folders: Sequence[Path]) -> tuple[CopyPlacement, dict[str, tuple[Copy, Path]]]:
    """Write the copies of a step as its ranks would, one rank on each node, owner's and keeper's."""
    owned = [slices_of(whole, rank, owned=True) for rank in range(len(folders))]
    held = [slices_of(whole, rank, owned=False) for rank in range(len(folders))]
    names = [folder.name for folder in folders]
    placement = place(
        [[_block(each) for each in slices] for slices in owned],
        [[_block(each) for each in slices] for slices in held],
        domain_of_rank=names,
        node_of_rank=names,
    )
    del held
    for folder in folders:
        folder.mkdir(parents=True)
        write_placement(folder, EPOCH, placement, epoch_id="id")
    state = CheckpointState(step=STEP, model=whole.model, plan=whole, precision="fp32")
    written = {}
    for unit in placement.units:
        by_key = {_block(each).key: each for each in owned[unit.owner]}
        slices = [by_key[key] for key in unit.blocks]
        for each in slices:
            each.tensor.copy_(expected(each.name, each.offsets, each.tensor.shape))
        slots = [slot_folder(folders[rank], EPOCH, 0) for rank in (unit.owner, unit.keeper) if rank is not None]
        path = shard_path(slots[0], unit.name)
        shard = write_shard(path, slices, rank=unit.owner)
        copy = Copy(epoch=EPOCH, step=STEP, unit=unit.name, shard=shard, tensors=tensor_infos(slices), state=state)
        for slot in slots[1:]:
            os.link(path, shard_path(slot, unit.name))
        for slot in slots:
            write_copy(slot, copy)
        written[unit.name] = copy, path
    return placement, written


def _block(each: TensorSlice) -> OwnedBlock:
    return OwnedBlock(
        name=each.name, offsets=each.offsets, shape=tuple(each.tensor.shape), num_bytes=each.tensor.nbytes
    )
