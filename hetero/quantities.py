"""Reads quantities as people write them, a number with its unit: ``200Gbps``, ``25 GB/s``, ``50us``.

Upper and lower case count, as a bit is an eighth of a byte: ``Gb/s`` and ``Gbps`` are bits, ``GB/s`` bytes.
"""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from hetero.errors import ConfigError
from hetero.units import GB, US_PER_S

_DECIMAL_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_PREFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

BANDWIDTHS: Mapping[str, Fraction] = MappingProxyType(
    {
        f"{prefix}{bits}": Fraction(factor, 8 * GB)
        for prefix, factor in _DECIMAL_PREFIXES.items()
        for bits in ("bps", "b/s", "bit/s")
    }
    | {f"{prefix}B/s": Fraction(factor, GB) for prefix, factor in (_DECIMAL_PREFIXES | _BINARY_PREFIXES).items()}
)
"""Units of bandwidth, in 10^9 bytes per second; ``kB`` is 1000 bytes, ``KiB`` 1024."""

LATENCIES: Mapping[str, Fraction] = MappingProxyType(
    {
        "ns": Fraction(US_PER_S, 10**9),
        **dict.fromkeys(("us", "\u00b5s", "\u03bcs"), Fraction(1)),
        "ms": Fraction(US_PER_S, 10**3),
        "s": Fraction(US_PER_S),
    }
)
"""Units of time, in microseconds; both signs for micro that keyboards and documents have."""

_NUMBER_AND_UNIT = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*(.*)", re.DOTALL)

_MAX_SHOWN = 40
"""Characters of a wrong text that a message repeats."""


def bandwidth_gb_per_s(text: str) -> float:
    """The bandwidth that ``text`` says, in 10^9 bytes per second: 25 for ``200Gbps``, ``200 Gbit/s`` or ``25 GB/s``.

    Raises:
        ConfigError: no number with a unit of :data:`BANDWIDTHS`.
    """
    return _quantity(text, BANDWIDTHS, "bandwidth", "25 GB/s, 25 GiB/s, 200Gbps or 200 Gbit/s, or 25 alone for 25 GB/s")


def latency_us(text: str) -> float:
    """The time that ``text`` says, in microseconds: 50 for ``50us`` or ``0.05 ms``.

    Raises:
        ConfigError: no number with a unit of :data:`LATENCIES`.
    """
    return _quantity(text, LATENCIES, "time", "50us, 0.05 ms or 50000 ns, or 50 alone for 50 us")


def _quantity(text: str, units: Mapping[str, Fraction], what: str, examples: str) -> float:
    shown = repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
    found = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{shown} is no number with a unit; write {examples}")
    number, unit = found.groups()
    if unit not in units:
        said = f"{shown}: {unit[:_MAX_SHOWN]!r} is no unit of {what}" if unit else f"{shown} is a text without a unit"
        raise ConfigError(f"{said}{_other_case(unit, units)}; write {examples}")
    # As a float, which has bounds, however long its exponent is.
    value = float(number) * units[unit].numerator / units[unit].denominator
    if not math.isfinite(value):
        raise ConfigError(f"{shown} is too large for a {what}; write {examples}")
    return value


def _other_case(unit: str, units: Mapping[str, Fraction]) -> str:
    """A hint for a unit in other letters, which may be two: ``gb/s`` is ``Gb/s`` or ``GB/s``."""
    alike = [each for each in units if unit and each.lower() == unit.lower()]
    return f" (did you mean {' or '.join(map(repr, alike))}?)" if alike else ""
