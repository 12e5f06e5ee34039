"""Reads and writes this project's own checkpoints for a converter."""

import shutil
from pathlib import Path
from types import MappingProxyType

import torch

from hetero.checkpoint.folder import find_checkpoint, partial_folder, prepare, publish, published_steps, read_state
from hetero.checkpoint.interchange.weights import WeightSource, in_groups
from hetero.checkpoint.manifest import merge
from hetero.checkpoint.reader import SavedTensors
from hetero.checkpoint.shards import tensor_infos, write_shard
from hetero.checkpoint.state import CheckpointState
from hetero.checkpoint.write_errors import write_error
from hetero.errors import CheckpointError
from hetero.runtime.dtypes import PRECISIONS
from hetero.runtime.sharded_state import TensorSlice
from hetero.spec.hugging_face.generation import GenerationConfig
from hetero.spec.parameters import Parameter, parameters


class NativeSource:
    """The weights of a checkpoint of ours; the newest step for ``None``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """

    def __init__(self, folder: Path, *, step: int | None) -> None:
        path = find_checkpoint(folder, step)
        state = read_state(path)
        self.model = state.model
        self.step = state.step
        self.generation_config: GenerationConfig = state.generation_config or {}
        self._saved = SavedTensors(path)
        every = parameters(self.model)
        self.dtype = self._saved.dtype(f"weights/{every[0].name}")
        self._saved.check_weights({each.name: each.shape for each in every})

    def tensor(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor of a parameter: from the master weights where ``dtype`` is not that of the weights."""
        whole = TensorSlice(
            name=f"weights/{parameter.name}",
            shape=parameter.shape,
            offsets=(0,) * len(parameter.shape),
            tensor=torch.empty(parameter.shape, dtype=dtype),
        )
        self._saved.fill([whole])
        return whole.tensor


def write_native(
    source: WeightSource,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    generation_config: GenerationConfig = MappingProxyType({}),
) -> Path:
    """Publish the weights as a checkpoint of step 0, or of the step that the source knows. Returns its folder.

    Holds one shard's tensors in memory at a time.

    Raises:
        CheckpointError: the folder has checkpoints, or cannot be written.
    """
    if published_steps(folder):
        raise CheckpointError(f"{folder}: it has checkpoints already; name a new folder")
    prepare(folder, start_step=source.step)
    partial = partial_folder(folder, source.step)
    groups = in_groups(
        parameters(source.model),
        size_bytes=lambda parameter: parameter.numel * dtype.itemsize,
        limit_bytes=max_shard_bytes,
    )
    written = []
    try:
        partial.mkdir()
        for number, group in enumerate(groups):
            slices = [
                TensorSlice(
                    name=f"weights/{parameter.name}",
                    shape=parameter.shape,
                    offsets=(0,) * len(parameter.shape),
                    tensor=source.tensor(parameter, dtype),
                )
                for parameter in group
            ]
            shard = write_shard(partial / f"part_{number:05d}.safetensors", slices, rank=None)
            written.append((shard, tensor_infos(slices)))
            del slices
        state = CheckpointState(
            step=source.step,
            model=source.model,
            precision=PRECISIONS[dtype],
            generation_config=dict(generation_config) or None,
        )
        return publish(folder, step=source.step, state=state, manifest=merge(written, source.model))
    except OSError as error:
        raise write_error(partial, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
