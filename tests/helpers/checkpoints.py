"""Hand-made training state: global tensors of known values, cut at random over any number of ranks."""

import hashlib
import math
import random
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint import folder as folders
from hetero.checkpoint.manifest import merge
from hetero.checkpoint.shards import tensor_infos, write_shard
from hetero.checkpoint.state import CheckpointState
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.runtime.sharded_state import TensorSlice
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import parameters
from tests.helpers.models import llama_model

ADAM = ("weights", "exp_avg", "exp_avg_sq")
MODEL = llama_model(num_layers=1, hidden_size=8, num_attention_heads=2, num_query_groups=2, ffn_hidden_size=12)

Offsets = tuple[int, ...]


def plan_of(model: ModelSpec = MODEL, *, world_size: int = 1) -> Plan:
    """A data-parallel plan."""
    return uniform_plan(
        UniformLayout(
            model=model,
            world_size=world_size,
            micro_batch_size=1,
            global_batch_size=world_size,
            seq_length=8,
            device="cpu",
        )
    )


def state_of(plan: Plan, *, step: int) -> CheckpointState:
    """Scalars of a run at ``step``."""
    return CheckpointState(
        step=step, model=plan.model, plan=plan, precision=plan.precision, consumed_samples=10 * step, adam_step=step
    )


def full_tensor(name: str, shape: Sequence[int], *, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the global tensor ``name`` holds after ``step``."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step}:{name}".encode()))
    return torch.randn(*shape, generator=generator).to(dtype)


def make_slices(
    *,
    step: int | None,
    rank: int = 0,
    num_ranks: int = 1,
    cut: int = 0,
    model: ModelSpec = MODEL,
    kinds: Iterable[str] = ADAM,
    dtypes: dict[str, torch.dtype] | None = None,
) -> list[TensorSlice]:
    """This rank's boxes of every tensor, views of one buffer, under the random cut of that number.

    Zeros for ``step`` None, to be filled.
    """
    slices = []
    for kind in kinds:
        dtype = (dtypes or {}).get(kind, torch.float32)
        for parameter in parameters(model):
            name = f"{kind}/{parameter.name}"
            boxes = random_boxes(parameter.shape, seed=f"{cut}:{name}", num_ranks=num_ranks)[rank]
            flat = torch.zeros(sum(math.prod(shape) for _, shape in boxes), dtype=dtype)
            views = flat.split([math.prod(shape) for _, shape in boxes])
            for view, (offsets, shape) in zip(views, boxes, strict=True):
                box = TensorSlice(name=name, shape=parameter.shape, offsets=offsets, tensor=view.view(shape))
                if step is not None:
                    box.tensor.copy_(expected(box, step=step))
                slices.append(box)
    return slices


def expected(box: TensorSlice, *, step: int, name: str | None = None) -> torch.Tensor:
    """What ``box``, or the same box of ``name``, holds after ``step``, in float32."""
    full = full_tensor(name or box.name, box.shape, step=step)
    return full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.tensor.shape, strict=True))]


def random_boxes(shape: Sequence[int], *, seed: str, num_ranks: int) -> list[list[tuple[Offsets, Offsets]]]:
    """Boxes (offsets, shape) that tile ``shape``, cut again and again at random and dealt out to the ranks."""
    draw = random.Random(seed)
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw.randrange(2 * num_ranks)):
        offsets, sizes = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(sizes))
        if sizes[dim] < 2:
            boxes.append((offsets, sizes))
            continue
        at = draw.randrange(1, sizes[dim])
        boxes.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        later = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes.append((later, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    dealt: list[list[tuple[Offsets, Offsets]]] = [[] for _ in range(num_ranks)]
    for box in boxes:
        dealt[draw.randrange(num_ranks)].append(box)
    return dealt


def save_alone(
    folder: Path,
    slices_of_ranks: Sequence[Sequence[TensorSlice]],
    state: CheckpointState,
    *,
    rank_state: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Publish a checkpoint of several ranks from one process. Every rank saves the same ``rank_state``."""
    partial = folders.partial_folder(folder, state.step)
    partial.mkdir(parents=True)
    written = []
    for rank, slices in enumerate(slices_of_ranks):
        path = partial / f"rank_{rank:05d}.safetensors"
        written.append((write_shard(path, slices, rank=rank, rank_state=rank_state), tensor_infos(slices)))
    return folders.publish(folder, step=state.step, state=state, manifest=merge(written, state.model))


def sign(checkpoint: Path) -> None:
    """Make the checksums of the JSON files right, as a forger would."""
    names = ("state.json", "manifest.json")
    sums = [f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (checkpoint / "SHA256SUMS").write_text("".join(sums))


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def assert_filled(slices: Iterable[TensorSlice], *, step: int) -> None:
    """Every slice holds exactly what was saved at ``step``."""
    for box in slices:
        wanted = expected(box, step=step).to(box.tensor.dtype)
        assert torch.equal(box.tensor, wanted), f"{box.name} at {box.offsets}"
