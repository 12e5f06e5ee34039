"""Reads what NVIDIA's driver says of the topology of a host: which GPUs are connected by what.

By ``nvidia-smi``, which comes with every driver, from text that is there to be read by people.
"""

import re
import subprocess
from collections.abc import Callable, Sequence

from hetero.discovery.facts import GpuTopology

PROGRAM = "nvidia-smi"

_TIMEOUT_S = 30.0
"""It starts the driver where nobody uses the GPUs, which takes some seconds."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
"""The header is underlined, also in a pipe."""

Asked = Callable[[Sequence[str]], str | None]
"""Runs a command, and returns what it prints; ``None`` if it is not there or fails."""


def ask(command: Sequence[str]) -> str | None:
    """What ``command`` prints, ``None`` if it is not there, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def gpu_topology(asked: Asked = ask) -> GpuTopology | None:
    """What the driver knows, ``None`` if it cannot be asked or says what cannot be read."""
    listed = asked([PROGRAM, "--query-gpu=pci.bus_id", "--format=csv,noheader"])
    matrix = asked([PROGRAM, "topo", "-m"])
    if listed is None or matrix is None:
        return None
    addresses = tuple(kernel_address(line) for line in listed.split())
    kinds, nics = parse_matrix(matrix)
    if len(kinds) != len(addresses) or any(len(row) != len(addresses) for row in (*kinds, *nics.values())):
        return None
    rates = parse_nvlink_rates(asked([PROGRAM, "nvlink", "--status"]) or "")
    return GpuTopology(
        pci_addresses=addresses,
        kinds=kinds,
        nics=nics,
        nvlink_gb_per_s=tuple(rates.get(number) for number in range(len(addresses))),
    )


def kernel_address(bus_id: str) -> str:
    """A PCI address as the kernel writes it, ``0000:07:00.0``, of the driver's ``00000000:07:00.0``."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def parse_matrix(text: str) -> tuple[tuple[tuple[str, ...], ...], dict[str, tuple[str, ...]]]:
    """``nvidia-smi topo -m``: the kinds of connection between GPUs, and of every network interface to each GPU.

    Interfaces are called as the kernel has them, where a legend says so, as newer drivers print.
    """
    lines = [line for line in _ANSI.sub("", text).splitlines() if line.strip()]
    header = next((line.split() for line in lines if line.split()[0] == "GPU0"), [])
    # Behind the devices: "CPU Affinity", "NUMA Affinity", "GPU NUMA ID".
    columns = header[: header.index("CPU")] if "CPU" in header else header
    num_gpus = sum(re.fullmatch(r"GPU\d+", column) is not None for column in columns)
    named = {found[1]: found[2] for line in lines if (found := re.fullmatch(r"\s*(NIC\d+)\s*:\s*(\S+)\s*", line))}
    rows = {
        words[0]: tuple(words[1 : num_gpus + 1])
        for line in lines
        if (words := line.split())[0] in columns and len(words) > len(columns)
    }
    gpus = tuple(row for name, row in rows.items() if re.fullmatch(r"GPU\d+", name))
    return gpus, {named.get(name, name): row for name, row in rows.items() if name in columns[num_gpus:]}


def parse_nvlink_rates(text: str) -> dict[int, float]:
    """``nvidia-smi nvlink --status``: by GPU, 10^9 bytes per second of one active link in one direction."""
    rates: dict[int, float] = {}
    gpu = None
    for line in text.splitlines():
        if found := re.match(r"\s*GPU (\d+):", line):
            gpu = int(found[1])
        elif gpu is not None and (found := re.match(r"\s*Link \d+: ([0-9.]+) GB/s", line)):
            rates[gpu] = min(rates.get(gpu, float("inf")), float(found[1]))
    return rates


def num_nvlinks(kind: str) -> int:
    """How many NVLinks connect two GPUs, 0 where PCIe does."""
    found = re.fullmatch(r"NV(\d+)", kind)
    return int(found[1]) if found else 0
