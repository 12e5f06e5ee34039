"""What a host has for the stages on it that a question is about: memory, threads for updates, and links."""

from dataclasses import dataclass
from typing import Self

from hetero.cost.offload.host_rates import PREVIEW_FACTOR, HostRates
from hetero.errors import ConfigError
from hetero.spec.link import Link
from hetero.units import US_PER_S


@dataclass(frozen=True, kw_only=True, slots=True)
class HostResources:
    """A host, or the part of one that some of its ranks have while the others use theirs.

    memory_bytes: for what is offloaded, and for checkpoints while they are staged.
    threads: for updates, of all ranks together.
    elements_per_s: that these threads update together, all at once.
    to_device, to_host: copies of one card while the others behind its switch are at rest.
    added_bytes_per_s: what one rank adds to sums of gradients while all ranks of the node do.
    preview_factor: seconds of a preview with its commit over those of a direct update.
    stages_checkpoints: the state on the host is there once more while a checkpoint is written.
    """

    memory_bytes: int
    threads: int
    elements_per_s: float
    to_device: Link
    to_host: Link
    added_bytes_per_s: float
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
    def of_ranks(cls, ranks: int, rates: HostRates, *, memory_bytes: int) -> Self:
        """What so many ranks have together, each of which gets ``rates``.

        Args:
            memory_bytes: that they may use for this, at most what the host has.
        """
        return cls(
            memory_bytes=memory_bytes,
            threads=ranks * rates.threads,
            elements_per_s=ranks * rates.update,
            to_device=rates.copy_in,
            to_host=rates.copy_out,
            added_bytes_per_s=rates.added_bytes_per_s,
        )

    def update_thread_s(self, elements: float) -> float:
        """Seconds of one thread for a direct update of ``elements``, while all threads update."""
        return elements * self.threads / self.elements_per_s

    def copy_s(self, link: Link, num_bytes: float) -> float:
        """Seconds of one copy to or from a card, while the others behind its switch are at rest."""
        if num_bytes <= 0:
            return 0.0
        return link.latency_us / US_PER_S + num_bytes / link.bytes_per_s(max(1, int(num_bytes)))

    def sum_s(self, num_bytes: float) -> float:
        """Seconds to add a gradient of ``num_bytes`` to what one rank sums up in the host's memory."""
        return num_bytes / self.added_bytes_per_s
