"""``pretrain_gpt.py`` under agents in tests: its flags, what one process would have computed, and what it saved."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from hetero.checkpoint.folder import find_checkpoint, read_manifest
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.serialization import save
from tests.helpers.commands import MODEL, Finished, command_line
from tests.helpers.forked_launch import forked
from tests.helpers.synthetic_profiles import profile

PROGRAM = "tests/helpers/fp64_program.py"

_CLUSTER = """\
node_types:
  - {name: box, device: cpu, gpus_per_node: 1, count: 4, memory_gib: 4,
     inside_node: {bandwidth_gb_per_s: 1, latency_us: 10}}
  - {name: twin, device: cpu, gpus_per_node: 2, count: 2, memory_gib: 4,
     inside_node: {bandwidth_gb_per_s: 1, latency_us: 10}}
links: {between_nodes: {bandwidth_gb_per_s: 1, latency_us: 10}}
"""

_UNLIKE = """\
devices:
  - {name: slow-cpu}
node_types:
  - {name: twin, device: cpu, gpus_per_node: 2, count: 1, memory_gib: 4,
     inside_node: {bandwidth_gb_per_s: 0.000002, latency_us: 10}}
  - {name: slow, device: slow-cpu, gpus_per_node: 1, count: 2, memory_gib: 4,
     inside_node: {bandwidth_gb_per_s: 1, latency_us: 10}}
links: {between_nodes: {bandwidth_gb_per_s: 0.00003, latency_us: 10}}
"""


def saving_flags(folder: Path, *, steps: int, **changes: str | None) -> list[str]:
    """Of a training that saves its last step in ``folder``."""
    flags = {
        "global_batch_size": "12",
        "train_iters": str(steps),
        "init_method_std": "0.1",
        "lr_decay_style": "linear",
        "save": str(folder),
        "save_interval": "1000",
    }
    return command_line(**{**flags, **changes})


def elastic_words(folder: Path, *, steps: int, switches: tuple[str, ...] = (), **changes: str | None) -> list[str]:
    """Program and flags of agents, whose nodes are ``box`` of one rank and ``twin`` of two; copies after every step."""
    (folder / "cluster.yaml").write_text(_CLUSTER)
    save(profile(MODEL, device="cpu"), folder / "cpu.json")
    given: dict[str, str | None] = {
        "hetero_cluster": str(folder / "cluster.yaml"),
        "hetero_profile": str(folder / "cpu.json"),
        "hetero_elastic_copy_every": "1",
    }
    flags = saving_flags(folder / "saved", steps=steps, **{**given, **changes})
    return [PROGRAM, *flags, *switches]


def unlike_words(folder: Path, *, steps: int, switches: tuple[str, ...] = (), **changes: str | None) -> list[str]:
    """As :func:`elastic_words`, where nodes are ``twin``, of two fast ranks, and ``slow``, of one.

    On one twin and two slow nodes a plan has stages of unlike lengths in one pipeline, since between nodes whole
    replicas would have too much to sum; and microbatches of two samples and of one, as fast ranks were measured with
    two alone.
    """
    words = elastic_words(folder, steps=steps, switches=switches, hetero_profile=None, **changes)
    (folder / "cluster.yaml").write_text(_UNLIKE)
    paths = [folder / "fast.json", folder / "slow.json"]
    head_s = (0.0, 3.0)
    save(profile(MODEL, device="cpu", micro_batch_sizes=(2,), ends_s=head_s), paths[0])
    save(profile(MODEL, device="slow-cpu", micro_batch_sizes=(1,), block_s=(2.0, 4.0), ends_s=head_s), paths[1])
    return [*words, "--hetero-profile", *map(str, paths)]


@functools.cache
def uninterrupted(
    folder: Path, *, steps: int, save_interval: int = 1000, launch: Callable[..., Finished] = forked
) -> tuple[dict[int, str], dict[str, np.ndarray]]:
    """Losses and state of one process.

    launch: how it starts: as the ranks do whose losses are compared, since forks have fewer mock documents
        (:mod:`tests.helpers.preload`) than ranks of torchrun.
    """
    layout = UniformLayout(
        model=MODEL,
        world_size=1,
        micro_batch_size=1,
        global_batch_size=12,
        seq_length=16,
        device="cpu",
        precision="fp64",
    )
    save(uniform_plan(layout), folder / "one.json")
    changes = {"hetero_plan": str(folder / "one.json"), "save_interval": str(save_interval)}
    run = launch(1, saving_flags(folder / "saved", steps=steps, **changes), script=PROGRAM)
    assert run.returncode == 0, run.stderr
    losses = re.findall(r"step +(\d+)/\d+ \| loss (\d+\.\d+)", run.stdout)
    return {int(step): loss for step, loss in losses}, saved_state(folder / "saved", step=steps)


def saved_state(folder: Path, *, step: int) -> dict[str, np.ndarray]:
    """The whole tensors of a saved step: weights and moments."""
    checkpoint = find_checkpoint(folder, step)
    manifest = read_manifest(checkpoint)
    whole = {name: np.full(info.shape, np.nan) for name, info in manifest.tensors.items()}
    for shard in manifest.shards:
        tensors = load_file(checkpoint / shard.file)
        for box in shard.boxes:
            place = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.shape, strict=True))
            whole[box.name][place] = tensors[box.key]
    assert not any(np.isnan(tensor).any() for tensor in whole.values())
    return whole
