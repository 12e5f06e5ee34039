"""Asks all hosts, before anything starts, whether they have what a launch needs."""

import hashlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError
from hetero.launch.hosts import NodeHost
from hetero.launch.ssh import command_on, probe
from hetero.launch.torchrun import TorchrunOptions
from hetero.serialization import read_bytes
from hetero.spec.devices import DeviceCatalogue

PROBE_S = 60.0
"""For one host to answer."""

MOST_AT_ONCE = 32
"""Hosts that are asked at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAnswer:
    """What a host has said.

    facts: by key, as :func:`hetero.launch.ssh.probe` writes them.
    error: why there are none.
    """

    facts: Mapping[str, str]
    error: str = ""


def check_hosts(
    hosts: Sequence[NodeHost],
    options: TorchrunOptions,
    *,
    plan: Path,
    folder: str,
    ssh: Sequence[str],
    devices: DeviceCatalogue,
) -> None:
    """Asks every host, and says of all of them together what is missing.

    Args:
        devices: of the cluster. Those that CUDA knows are counted.

    Raises:
        ConfigError: a host cannot be reached, or has no such folder, program or torchrun, another plan in its file, or
            too few GPUs.
    """
    text = probe(folder=folder, torchrun=options.torchrun, program=options.program, plan=str(plan))
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        answers = list(pool.map(lambda host: _asked(command_on(host.name, text, ssh=ssh)), hosts))
    digest = hashlib.sha256(read_bytes(plan)).hexdigest()
    wanted = {"folder": folder, "torchrun": options.torchrun, "program": options.program}
    problems = [
        f"host {host.title}: {problem}"
        for host, answer in zip(hosts, answers, strict=True)
        for problem in _problems(host, answer, wanted=wanted, plan=plan, digest=digest, devices=devices)
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _asked(words: Sequence[str]) -> HostAnswer:
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return HostAnswer(facts={}, error=f"no answer within {PROBE_S:g} s")
    except OSError as error:
        return HostAnswer(facts={}, error=f"{words[0]}: {error.strerror}")
    facts = {key: value.strip() for key, _, value in (line.partition(" ") for line in done.stdout.splitlines())}
    if not facts and done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return HostAnswer(facts={}, error=f"{words[0]}: {said[-1]}")
    return HostAnswer(facts=facts)


def _problems(
    host: NodeHost,
    answer: HostAnswer,
    *,
    wanted: Mapping[str, str],
    plan: Path,
    digest: str,
    devices: DeviceCatalogue,
) -> Iterator[str]:
    if answer.error:
        yield f"{answer.error}; try 'ssh {host.name} true'"
        return
    missing = next((key for key in wanted if key not in answer.facts), None)
    if missing is not None:
        yield f"there is no {missing} {wanted[missing]}; hosts need what this one has, in the same place"
        return
    if answer.facts.get("plan", "").partition(" ")[0] != digest:
        yield f"{plan} is another plan there, or missing; copy it, or use a file system that all hosts see"
    if devices.of(host.node_type.device).compute_capability is None:
        return
    found = int(answer.facts.get("gpus", "0"))
    if found < len(host.ranks):
        yield (
            f"it shows {found} GPUs (nvidia-smi --list-gpus), the plan has {len(host.ranks)} x "
            f"{host.node_type.device} there; give another host, or correct gpus_per_node and plan again"
        )
