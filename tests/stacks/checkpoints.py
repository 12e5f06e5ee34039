"""Writes checkpoints with one stack and reads them with others, and prints a digest of everything that was read.

    python -m tests.stacks.checkpoints write FOLDER        write them
    python -m tests.stacks.checkpoints read FOLDER...      read them, and resume the runs that wrote ours

Where two stacks print the same lines of ``read``, what the one reads and how it goes on are the other's, bit for bit.
What cannot be read has the error's first line in place of a digest.
"""

import argparse
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hetero.runtime import cpu_backend

cpu_backend.install()

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402

from hetero.checkpoint.interchange.torch_dist import TorchDistSource, write_torch_dist  # noqa: E402
from hetero.plan.ir import Plan  # noqa: E402
from hetero.spec.parameters import parameters  # noqa: E402
from tests.dist.resumed_runs import END, HALF, run  # noqa: E402
from tests.dist.test_checkpoint_torch_dist import RandomWeights, one_rank, save_with_megatron  # noqa: E402
from tests.helpers.early_fork_server import fork_server_early  # noqa: E402
from tests.helpers.layouts import layout  # noqa: E402
from tests.helpers.models import llama_model  # noqa: E402
from tests.helpers.rank_pool import fork_server  # noqa: E402
from tests.helpers.ranks import POOL, run_ranks  # noqa: E402
from tests.stacks.results import DIGITS, first_line, report_lines  # noqa: E402

MODEL = llama_model(num_layers=2)
"""Of the ``torch_dist`` folders."""

RESUMED: Mapping[str, Plan] = {
    "gpt2 in bf16, three replicas": dataclasses.replace(layout("depths-1+2+3", "gpt2-tied"), precision="bf16"),
    "experts in fp32, six stages": dataclasses.replace(layout("half-cuts", "moe"), precision="fp32"),
}
"""Plans of the runs that are resumed; none has tensor parallelism, which test helpers replace by shared memory."""


def write(folder: Path) -> None:
    """Write a ``torch_dist`` folder by this project, one by megatron-core, and the first halves of some runs."""
    folder.mkdir(parents=True)
    write_torch_dist(RandomWeights(MODEL), folder / "megatron-hetero", dtype=torch.float32)
    (folder / "megatron-core").mkdir()
    run_ranks(save_with_megatron, 1, folder / "megatron-core", one_rank(MODEL))
    for name, plan in RESUMED.items():
        run(plan, sharded=True, end_step=HALF, save=str(folder / name))


def read(folder: Path) -> dict[str, str]:
    """Return the digests of what is read in ``folder``, or first lines of errors, by folder and what was done."""
    found: dict[str, str] = {}
    for writer in ("megatron-hetero", "megatron-core"):
        for reader, function in (("megatron-hetero", _read_with_hetero), ("torch", _read_with_torch)):
            found[f"torch_dist of {writer}, read by {reader}"] = _outcome(function, folder / writer)
    for name, plan in RESUMED.items():
        found[f"resumed {name}"] = _outcome(_resume, folder / name, plan)
    return {f"{folder.name}: {done}": value for done, value in found.items()}


def _outcome(function: Callable[..., str], *args: object) -> str:
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001  (whatever a stack does not read, the others have to be tried)
        return first_line(f"{type(error).__name__}: {error}")


def _read_with_hetero(folder: Path) -> str:
    source = TorchDistSource(folder, model=MODEL)
    return _digest_of_tensors({each.name: source.tensor(each, torch.float32) for each in parameters(MODEL)})


def _read_with_torch(folder: Path) -> str:
    """Read every tensor of the folder as torch.distributed.checkpoint describes it."""
    reader = dcp.FileSystemReader(folder)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return _digest_of_tensors(tensors)


def _digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(name.encode() + tensor.numpy().tobytes())
    return whole.hexdigest()[:DIGITS]


def _resume(folder: Path, plan: Plan) -> str:
    """Return the digest of the second half: losses, weights and optimizer state of every rank."""
    whole = hashlib.sha256()
    for session in run(plan, sharded=True, end_step=END, load=str(folder)):
        assert session.start_step == HALF
        whole.update(repr([loss.hex() for loss in session.losses]).encode())
        for name, values in sorted({**session.weights, **session.state}.items()):
            whole.update(name.encode() + values.tobytes())
    return whole.hexdigest()[:DIGITS]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.stacks.checkpoints", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["write", "read"])
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="folder", help="one stack's checkpoints; write makes it"
    )
    arguments = parser.parse_args(argv)
    fork_server()
    # The ranks' server is a fork of this process, so that torch and megatron-core are imported once.
    fork_server_early()
    try:
        for folder in arguments.folders:
            if arguments.action == "write":
                write(folder)
            else:
                print(report_lines(read(folder)))
    finally:
        POOL.close()


if __name__ == "__main__":
    main()
