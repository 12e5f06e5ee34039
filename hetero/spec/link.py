"""Describes a link between two devices, and what devices of one node reach together, by message size.

In files, bandwidths and latencies are numbers in the unit of their key, or text with a unit (:mod:`hetero.quantities`).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict

from hetero import quantities
from hetero.errors import ConfigError
from hetero.serialization import STRICT
from hetero.units import GB


def _bandwidth(value: Any) -> Any:
    """The number that a text with a unit stands for, also in pairs with sizes of messages; all else as it is."""
    if isinstance(value, str):
        return quantities.bandwidth_gb_per_s(value)
    if isinstance(value, list):
        pairs = [tuple(each) if isinstance(each, list) else each for each in value]
        return tuple((p[0], _bandwidth(p[1])) if isinstance(p, tuple) and len(p) == 2 else p for p in pairs)
    return value


def _latency(value: Any) -> Any:
    """The number that a text with a unit stands for; all else as it is."""
    return quantities.latency_us(value) if isinstance(value, str) else value


LEAST_GB_PER_S, MOST_GB_PER_S = 1e-9, 1e9
"""Limits of a bandwidth: a byte per second, which tables have for messages of a byte, and far beyond any memory's.
Seconds that are computed from what lies between stay finite."""

MOST_LATENCY_US = 60e6
"""Limit of a latency: a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A full-duplex link between two devices, with the same figures in both directions.

    bandwidth_gb_per_s: 10^9 bytes per second; one number, or what was measured as pairs of message size in bytes
        and bandwidth, in ascending size. A file may say ``200Gbps``.
    latency_us: time before the first byte arrives, added to every message. A file may say ``50us``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    bandwidth_gb_per_s: Annotated[float | tuple[tuple[int, float], ...], BeforeValidator(_bandwidth)]
    latency_us: Annotated[float, BeforeValidator(_latency)]

    def __post_init__(self) -> None:
        if not 0 <= self.latency_us <= MOST_LATENCY_US:
            raise ConfigError(
                f"link: latency_us is {self.latency_us}, must be at least 0 and at most {MOST_LATENCY_US:g}, a minute; "
                "is it in another unit?"
            )
        if not self._table:
            raise ConfigError("link: bandwidth_gb_per_s is an empty table, give it a number or one pair at least")
        for num_bytes, bandwidth in self._table:
            if num_bytes < 1:
                raise ConfigError(f"link: bandwidth_gb_per_s has a message of {num_bytes} bytes, must be at least 1")
            if bandwidth <= 0:
                raise ConfigError(f"link: bandwidth_gb_per_s is {bandwidth}, must be above 0")
            if not LEAST_GB_PER_S <= bandwidth <= MOST_GB_PER_S:
                raise ConfigError(
                    f"link: bandwidth_gb_per_s is {bandwidth:g}, must be at least {LEAST_GB_PER_S:g} and at most "
                    f"{MOST_GB_PER_S:g}; is it in another unit?"
                )
        for (small, _), (large, _) in pairwise(self._table):
            if large <= small:
                raise ConfigError(
                    f"link: bandwidth_gb_per_s lists {large} bytes after {small}; sort the pairs by ascending size"
                )

    @property
    def _table(self) -> tuple[tuple[int, float], ...]:
        if isinstance(self.bandwidth_gb_per_s, tuple):
            return self.bandwidth_gb_per_s
        return ((1, self.bandwidth_gb_per_s),)

    @property
    def most_gb_per_s(self) -> float:
        """The most bandwidth that a message of any size gets."""
        return max(bandwidth for _, bandwidth in self._table)

    def bytes_per_s(self, num_bytes: int) -> float:
        """The bandwidth that one message of ``num_bytes`` gets, in bytes per second.

        Heuristic: between two measured sizes it is a power of the size, a straight line on logarithmic axes, as with
        a bandwidth that is linear in the logarithm of the size a larger message could arrive sooner. Beyond the
        smallest and the largest measured size it stays as it is there.
        """
        table = self._table
        if num_bytes <= table[0][0]:
            return table[0][1] * GB
        if num_bytes > table[-1][0]:
            return table[-1][1] * GB
        for (small, slower), (large, faster) in pairwise(table):
            if num_bytes <= large:
                share = math.log(num_bytes / small) / math.log(large / small)
                return slower * math.pow(faster / slower, share) * GB
        return table[-1][1] * GB


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLink:
    """The measured bandwidth of an all-reduce among ``size`` devices of one node.

    bus: bus bandwidth as nccl-tests define it, 2 (n - 1) / n x bytes / seconds with the bytes that each device reduces.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    size: int
    bus: Link

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ConfigError(f"group link: size is {self.size}, must be at least 2")
