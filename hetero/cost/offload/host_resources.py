"""What a host has for the stages on it: memory, threads for updates, and links, whole or the share of one card."""

import dataclasses
from dataclasses import dataclass
from typing import Self

from hetero.errors import ConfigError
from hetero.spec.host import HostProfile
from hetero.spec.link import Link
from hetero.units import GB, US_PER_S

PREVIEW_FACTOR = 1.8
"""What a preview and its commit take over a direct update; measured from 1.6 to 1.8 on one host
(docs/offload.md, ``tests/bench/bench_host_adamw.py``)."""

_MEASURED = ", which offload is priced by; measure it with `hetero profile host`, or state it"

LARGE_BYTES = 2**27
"""Of a copy whose latency does not count any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostResources:
    """A host, or the part of one that some of its cards may use.

    memory_bytes: for what is offloaded, and for checkpoints while they are staged.
    threads: for updates, of all ranks together.
    elements_per_s: that these threads update together, all at once.
    to_device, to_host: copies of one card while the others behind its switch are at rest.
    copied_bytes_per_s: from one place of the host's memory to another, each byte read once and written once.
    unknown_cards: others behind the switch of each card, which copy as much at the same times; 0 where the question
        lists all.
    preview_factor: seconds of a preview with its commit over those of a direct update.
    stages_checkpoints: the state on the host is there once more while a checkpoint is written.
    """

    memory_bytes: int
    threads: int
    elements_per_s: float
    to_device: Link
    to_host: Link
    copied_bytes_per_s: float
    unknown_cards: int = 0
    preview_factor: float = PREVIEW_FACTOR
    stages_checkpoints: bool = True

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"host: threads for updates is {self.threads}, must be at least 1")
        if self.preview_factor < 1:
            raise ConfigError(
                f"host: preview_factor is {self.preview_factor}, must be at least 1: a preview updates, too"
            )

    @classmethod
    def of(cls, host: HostProfile, *, memory_bytes: int, threads: int | None = None) -> Self:
        """The whole host.

        Args:
            memory_bytes: that training may use for this, at most what the host has.
            threads: for updates; by default as many as were measured at most.

        Where there are no devices, copies stay inside the host's memory. Where nobody measured these, a sum in it is
        taken to be as fast as a copy from a device, which is a heuristic.

        Raises:
            ConfigError: a figure is missing that offload needs.
        """
        inside = host.memory_copy_gb_per_s
        if host.to_host is not None and host.to_device is not None:
            to_host, to_device = host.to_host, host.to_device
        elif inside is not None:
            to_host = to_device = Link(bandwidth_gb_per_s=inside, latency_us=0.0)
        else:
            raise ConfigError(f"host: it has neither to_host and to_device nor memory_copy_gb_per_s{_MEASURED}")
        if not host.updates:
            raise ConfigError(f"host: it has no updates{_MEASURED}")
        threads = host.updates[-1].threads if threads is None else threads
        return cls(
            memory_bytes=memory_bytes,
            threads=threads,
            elements_per_s=host.elements_per_s(threads=threads),
            to_device=to_device,
            to_host=to_host,
            copied_bytes_per_s=to_host.bytes_per_s(LARGE_BYTES) if inside is None else inside * GB,
        )

    def part(self, ranks: int, *, of: int) -> Self:
        """What ``ranks`` of ``of`` ranks may use together, of threads and of what the host's memory copies, while the
        others use theirs. Its memory is whole, and so are the links, whose ranks a question lists.

        Raises:
            ConfigError: there are fewer threads than ranks.
        """
        if self.threads < of:
            raise ConfigError(f"host: {self.threads} threads for updates of {of} ranks; each needs one at least")
        threads = self.threads * ranks // of
        return dataclasses.replace(
            self,
            threads=threads,
            elements_per_s=self.elements_per_s * threads / self.threads,
            copied_bytes_per_s=self.copied_bytes_per_s * ranks / of,
        )

    def share(self, *, cards: int, cards_per_switch: int) -> Self:
        """What one of ``cards`` cards may count on while all others do as much.

        Raises:
            ConfigError: there are fewer threads than cards.
        """
        return dataclasses.replace(
            self.part(1, of=cards), memory_bytes=self.memory_bytes // cards, unknown_cards=cards_per_switch - 1
        )

    def update_thread_s(self, elements: float) -> float:
        """Seconds of one thread for a direct update of ``elements``, while all threads update."""
        return elements * self.threads / self.elements_per_s

    def copy_s(self, link: Link, num_bytes: float) -> float:
        """Seconds of one copy to or from a card, while unknown ones beside it copy as much."""
        if num_bytes <= 0:
            return 0.0
        shared = (1 + self.unknown_cards) * num_bytes / link.bytes_per_s(max(1, int(num_bytes)))
        return link.latency_us / US_PER_S + shared

    def add_s(self, num_bytes: float) -> float:
        """Seconds to add a gradient of ``num_bytes`` to what is summed up in the host's memory.

        A sum reads two numbers and writes one where a copy reads one and writes one: 3/2 of a copy's bytes, and
        memory is what both wait for. A heuristic.
        """
        return 1.5 * num_bytes / self.copied_bytes_per_s
