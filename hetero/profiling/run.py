"""Measures a model's layers on this device, or on each kind of device of a launch; ``hetero profile run`` calls it.

A process of its own: it imports torch, which ``hetero`` itself never does.
"""

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.distributed.compiler_cache import use_own_compiler_cache
from hetero.distributed.environment import set_cuda_environment
from hetero.distributed.process_exit import freeze_objects
from hetero.distributed.shared_devices import index_of_device
from hetero.doctor.host_facts import host_facts
from hetero.errors import ConfigError, HeteroError
from hetero.launch.launched_by import launch_variables, local_rank
from hetero.output_files import make_folder
from hetero.profiling.host_hardware import processor_name
from hetero.profiling.run_options import add_run_options, check_run_options, words_of_run
from hetero.serialization import load
from hetero.shown_secrets import shown_command
from hetero.slurm.job import node_name
from hetero.spec.cluster import ClusterSpec
from hetero.spec.devices import DeviceCatalogue
from hetero.spec.found_device import FoundDevice
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from hetero.standard_output import add_output_options, answer, directed_output, tell_error

if TYPE_CHECKING:
    from hetero.profiling.requested_profiles import ProfiledDevice


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 2 after a mistake of the user's, which stderr tells."""
    parser = argparse.ArgumentParser(prog="python -m hetero.profiling.run", description=__doc__)
    add_run_options(parser)
    add_output_options(parser)
    args = parser.parse_args(argv)
    args.command_line = shown_command(["hetero", "profile", "run", *words_of_run(args)])
    # Before torch is imported by anyone.
    set_cuda_environment(os.environ, shares_devices=args.share_devices)
    try:
        check_run_options(args)
        launch = launch_variables(os.environ, command="hetero profile run ...")
        if args.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.update(launch or {})
        with directed_output(parser, args):
            _run(args, is_launched=launch is not None)
    except HeteroError as error:
        tell_error(error)
        return 2
    return 0


def _run(args: argparse.Namespace, *, is_launched: bool) -> None:
    from hetero.runtime import cpu_backend

    # Before megatron.core is imported by anyone.
    cpu_backend.install()

    from hetero.profiling.device_run import measure_device

    # What libraries have made stays, and need not be looked through after every point.
    freeze_objects()
    make_folder(args.out, asked_by="--out")
    use_own_compiler_cache(os.environ)
    on, date = _profiled_device(args, *_name_and_known_types(args)), datetime.date.today().isoformat()
    if is_launched:
        from hetero.profiling.together import measure_together

        found = measure_together(args, on, date=date, say=_say)
        if found is not None:
            answer(args, lambda: found)
        return
    if on.type.name not in SHIPPED_DEVICES and args.cluster is None:
        _say(f"{on.type.name} does not ship; the cluster file is to describe it: devices: [{{name: {on.type.name}}}]")
    profiles = measure_device(args, on, date=date, say=_say)
    answer(args, lambda: {"profiles": profiles, "links": None})


def _name_and_known_types(args: argparse.Namespace) -> tuple[str | None, DeviceCatalogue]:
    """What the device of this rank is called, ``None`` if by itself, and the types that are known."""
    if args.cluster is None:
        return args.device_type, SHIPPED_DEVICES
    cluster = load(ClusterSpec, args.cluster)
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    node = node_name(os.environ)
    return (
        device_in_cluster(cluster, node=node, rank=rank, world_size=world_size, source=args.cluster),
        cluster.device_types,
    )


def device_in_cluster(cluster: ClusterSpec, *, node: str, rank: int, world_size: int, source: Path) -> str:
    """Return the name of a rank's device: that of the node type that names its node, in whatever order ranks are.

    If the file does not name the node, the launch is to have a rank for each device of ``cluster``, for each node, for
    each node type, or for all of it where there is one type; always in the order of the file.

    Args:
        node: what the node of the rank is called.
        source: the file, for messages.

    Raises:
        ConfigError: the launch has another number of ranks.
    """
    for node_type in cluster.node_types:
        if node in node_type.nodes:
            return node_type.device
    names = [node_type.device for node_type in cluster.node_types]
    counts = [node_type.count for node_type in cluster.node_types]
    devices = [node_type.count * node_type.gpus_per_node for node_type in cluster.node_types]
    one = names[:1] if len(set(names)) == 1 else []
    ways = ([name for name, n in zip(names, many, strict=True) for _ in range(n)] for many in (devices, counts))
    for way in (*ways, names, one):
        if len(way) == world_size:
            return way[rank]
    raise ConfigError(
        f"--cluster {source}: it has {sum(devices)} devices on {sum(counts)} nodes of {len(names)} node types, the "
        f"launch has {world_size} rank{'s' * (world_size > 1)}; start a rank for each device, for each node, or for "
        "each node type, in the order of the file, or give each its own --device-type"
    )


def _profiled_device(args: argparse.Namespace, name: str | None, known: DeviceCatalogue) -> "ProfiledDevice":
    """The device of this rank, or of this process, called ``name``.

    Raises:
        ConfigError: it is not of the type that the flags say, or is not there.
    """
    import torch

    from hetero.distributed.runtime_versions import cudnn_note
    from hetero.doctor.torch_facts import torch_facts
    from hetero.profiling.requested_profiles import ProfiledDevice

    facts = host_facts(dict(os.environ), torch_facts())
    if facts.torch is not None and (note := cudnn_note(facts.torch.cudnn)):
        _say(f"warning: {note}")
    if args.device == "cuda" and not facts.gpus:
        raise ConfigError("--device cuda: torch sees no GPU here; run `hetero doctor`, or give --device cpu")
    if facts.gpus and args.device != "cpu":
        # Slurm may show each task its own device alone; measure_together notices those that are one device.
        index = index_of_device(local_rank(os.environ), len(facts.gpus), shares_devices=True)
        assert index is not None, "there is a device"
        gpu = facts.gpus[index]
        device, hardware = torch.device("cuda", index), gpu.name
        torch.cuda.set_device(device)
        has_cuda = facts.torch is not None and facts.torch.cuda is not None
        found = FoundDevice(
            cuda_name=gpu.name,
            compute_capability=gpu.compute_capability if has_cuda else None,
            memory_bytes=gpu.memory_bytes,
        )
    else:
        device, found = torch.device("cpu"), FoundDevice()
        num_threads = torch.get_num_threads()
        hardware = f"{processor_name() or 'processor'}, {num_threads} thread{'' if num_threads == 1 else 's'}"
    return ProfiledDevice(
        device=device,
        type=found.type_called(name, known),
        hardware=hardware,
        node=node_name(os.environ),
        facts=facts,
    )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
