"""Describes what the host of a node can do for its devices: memory, rate of updates, copies to and from them.

Every figure is of one node. ``hetero profile host`` measures them and writes them as JSON; a cluster file has them, in
JSON as they are or in YAML, under ``host`` of a node type:

    host:
      source: hetero profile host, 2026-11-22
      memory_gib: 1007.6
      updates: [{threads: 1, elements_per_s: 2.1e+8}, {threads: 32, elements_per_s: 3.9e+9}]
      to_device: {bandwidth_gb_per_s: 25, latency_us: 10}
      to_host: {bandwidth_gb_per_s: 26, latency_us: 10}
      gpus_per_switch: 2
      numa_nodes: 2
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT
from hetero.spec.link import LEAST_GB_PER_S, MOST_GB_PER_S, Link

MAX_MEMORY_GIB = 1_000_000
"""Limit of the memory of a device or of a host, thousands of times what one has today."""

LEAST_ELEMENTS_PER_S, MOST_ELEMENTS_PER_S = 1.0, 1e15
"""Limits of the rate of updates of a host: far below and far above what any measures, and all seconds stay finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRate:
    """The measured rate of AdamW on a host, of all threads together.

    threads: that update at the same time, on as many cores.
    elements_per_s: parameters whose master weight and moments, in fp32, are updated, and whose weight is written in
        bf16.
    spread: between the first and the third quartile of the repetitions, as a part of their median;
        ``None`` of a rate that is stated.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    threads: int
    elements_per_s: float
    spread: float | None = None

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"host: updates has {self.threads} threads, must be at least 1")
        where = f"of the update with {self.threads} threads"
        if not LEAST_ELEMENTS_PER_S <= self.elements_per_s <= MOST_ELEMENTS_PER_S:
            raise ConfigError(
                f"host: elements_per_s {where} is {self.elements_per_s:g}, must be at least {LEAST_ELEMENTS_PER_S:g} "
                f"and at most {MOST_ELEMENTS_PER_S:g}"
            )
        if self.spread is not None and self.spread < 0:
            raise ConfigError(f"host: spread {where} is {self.spread}, must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProfile:
    """Measured or stated figures of the host of one node.

    source: who says so, and when.
    memory_gib: that a training may use: what the host has, or the limit that its processes are under.
    updates: rates of AdamW, by ascending number of threads; none where nobody measured.
    memory_copy_gb_per_s: 10^9 bytes per second that all threads together copy inside the host's memory, where each
        byte is read once and written once; ``None`` where nobody measured.
    to_device, to_host: copies between pinned memory of the host and one device, while the others are at rest;
        ``None`` where nobody measured, as on a host without devices.
    gpus_per_switch: devices that reach the host through one switch or root port, whose link they share.
    numa_nodes: parts of the host's memory that are each near some of its cores.
    processor, device: names of the processor and of the device that were measured.
    versions: of the software that was measured with, by name.
    notes: what a reader must know before using the figures.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    format_version: Literal[1] = 1
    source: AnyText
    memory_gib: float
    updates: tuple[UpdateRate, ...] = ()
    memory_copy_gb_per_s: float | None = None
    to_device: Link | None = None
    to_host: Link | None = None
    gpus_per_switch: int = 1
    numa_nodes: int = 1
    processor: str | None = None
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[AnyText, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.memory_gib <= MAX_MEMORY_GIB:
            raise ConfigError(
                f"host: memory_gib is {self.memory_gib:g}, must be above 0 and at most {MAX_MEMORY_GIB:,}; is it in "
                "another unit?"
            )
        copied = self.memory_copy_gb_per_s
        if copied is not None and not LEAST_GB_PER_S <= copied <= MOST_GB_PER_S:
            raise ConfigError(
                f"host: memory_copy_gb_per_s is {copied:g}, must be at least {LEAST_GB_PER_S:g} and at most "
                f"{MOST_GB_PER_S:g}"
            )
        for name in ("gpus_per_switch", "numa_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"host: {name} is {getattr(self, name)}, must be at least 1")
        threads = [rate.threads for rate in self.updates]
        if threads != sorted(set(threads)):
            raise ConfigError(f"host: updates has threads {threads}; list each number once, ascending")
        if (self.to_device is None) != (self.to_host is None):
            given, other = ("to_host", "to_device") if self.to_device is None else ("to_device", "to_host")
            raise ConfigError(f"host: it has {given} and no {other}; give both directions, or neither")

    def elements_per_s(self, *, threads: int, ranks: int = 1) -> float:
        """What AdamW updates for one of ``ranks`` ranks of the node, each with ``threads`` threads, all at once.

        Heuristic: ranks share what as many threads of one process reach; between two measured numbers of threads the
        rate is on a straight line, below the smallest one in proportion, beyond the largest one as it is there.

        Raises:
            ConfigError: nobody measured updates on this host, or there are no threads or ranks.
        """
        if threads < 1 or ranks < 1:
            raise ConfigError(f"host: an update by {ranks} ranks with {threads} threads; there is at least 1 of each")
        if not self.updates:
            raise ConfigError("host: it has no updates; measure them with `hetero profile host`")
        wanted = threads * ranks
        points = [(0, 0.0), *((rate.threads, rate.elements_per_s) for rate in self.updates)]
        for (fewer, slower), (more, faster) in pairwise(points):
            if wanted <= more:
                return (slower + (faster - slower) * (wanted - fewer) / (more - fewer)) / ranks
        return points[-1][1] / ranks
