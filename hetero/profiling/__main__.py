"""Measures the host that it runs on, prints what it finds, and writes it; ``hetero profile host`` calls it.

A process of its own: it imports torch, which ``hetero`` itself never does.
"""

import argparse
import datetime
import os
import sys
from collections.abc import Sequence

from hetero.doctor.facts import HostFacts
from hetero.doctor.host_facts import host_facts
from hetero.errors import ConfigError, HeteroError
from hetero.profiling.figures import rounded
from hetero.profiling.host_hardware import gpus_per_switch, memory_bytes, processor_name, usable_cores
from hetero.profiling.options import add_options, check_options
from hetero.serialization import to_json
from hetero.spec.host import HostProfile, UpdateRate
from hetero.standard_output import add_output_options, answer, directed_output, tell_error, write_output
from hetero.units import GB, GIB

BUSY = 0.2
"""Runnable threads per core, over the last minute, from which on a host is too busy to be measured well."""

LEAST_GIB = 1.5
"""Of memory, to measure in: tensors of 0.8 GiB, and torch."""


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 2 after a mistake of the user's, which stderr tells."""
    parser = argparse.ArgumentParser(prog="python -m hetero.profiling", description=__doc__)
    add_options(parser)
    add_output_options(parser)
    args = parser.parse_args(argv)
    try:
        with directed_output(parser, args):
            check_options(args)
            profile = _measured(args.seconds)
            if args.out is not None:
                where = write_output(args.out, to_json(profile).encode())
                _say(f"{where}: put it under host of the node type in the cluster file")
            answer(args, lambda: profile)
    except HeteroError as error:
        tell_error(error)
        return 2
    return 0


def _measured(seconds: float) -> HostProfile:
    """What this host has and does; each figure is said as soon as it is known."""
    gib = memory_bytes() / GIB
    cores = usable_cores()
    if gib < LEAST_GIB:
        raise ConfigError(f"this host has {gib:.2f} GiB of memory, measuring takes {LEAST_GIB}; use a larger one")
    notes = _notes(os.getloadavg()[0], os.cpu_count() or 1)
    for note in notes:
        _say(f"WARNING: {note}")
    # Torch takes seconds to load.
    import torch

    from hetero.doctor.torch_facts import torch_facts
    from hetero.profiling import host_rates as rates
    from hetero.profiling.repetitions import TimeBudget

    facts = host_facts({}, torch_facts())
    _say(f"memory: {gib:.1f} GiB, {_counted(facts.numa_nodes, 'NUMA node')}; {_counted(len(cores), 'usable core')}")
    num_calls = len(rates.thread_counts(len(cores))) + 1 + (rates.NUM_COPIES_OF_A_DEVICE if facts.gpus else 0)
    budget = TimeBudget(seconds, num_calls=num_calls)
    updates = []
    for each in rates.measure_updates(cores, budget):
        found = UpdateRate(
            threads=each.threads,
            elements_per_s=rounded(each.elements_per_s),
            spread=rounded(each.repetitions.spread),
        )
        rate = f"{found.elements_per_s / 1e6:.0f}e6 parameters/s"
        repeated = f"{each.repetitions.count} repetitions, spread {found.spread:z.1%}"
        _say(f"AdamW, {_counted(found.threads, 'thread')}: {rate} ({repeated})")
        updates.append(found)
    copy = rates.measure_memory_copy(cores, budget)
    copy_gb_per_s = rates.COPY_BYTES / copy.median_s / GB
    _say(f"copies in memory, {_counted(len(cores), 'thread')}: {copy_gb_per_s:.1f} GB/s (spread {copy.spread:z.1%})")
    to_device, to_host = None, None
    if facts.gpus:
        to_device, to_host = rates.measure_device_copies(torch.device("cuda", 0), budget)
        for name, link in (("to", to_device), ("from", to_host)):
            bandwidth = link.bytes_per_s(max(rates.LINK_BYTES)) / GB
            _say(f"copies {name} {facts.gpus[0].name}: {bandwidth:.1f} GB/s, latency {link.latency_us:g} us")
    else:
        _say("no CUDA device: copies to and from one are not measured")
    return HostProfile(
        source=f"hetero profile host, {datetime.date.today().isoformat()}, on {facts.host}",
        memory_gib=rounded(gib),
        updates=tuple(updates),
        memory_copy_gb_per_s=rounded(copy_gb_per_s),
        to_device=to_device,
        to_host=to_host,
        gpus_per_switch=gpus_per_switch(),
        numa_nodes=facts.numa_nodes,
        processor=processor_name(),
        device=facts.gpus[0].name if facts.gpus else None,
        versions=_versions(facts),
        notes=notes,
    )


def _notes(load: float, num_cores: int) -> tuple[str, ...]:
    if load < BUSY * num_cores:
        return ()
    return (f"the host was busy when it was measured (load {load:.1f}, {num_cores} cores): rates may be far too low",)


def _versions(facts: HostFacts) -> dict[str, str]:
    """Of what the figures may depend on."""
    found = {name: facts.packages[name] for name in ("megatron-hetero", "torch") if name in facts.packages}
    cuda = facts.torch.cuda if facts.torch is not None else None
    others = {"python": facts.python, "os": facts.os, "cuda": cuda, "driver": facts.driver}
    return found | {name: version for name, version in others.items() if version}


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
