"""Refuses emulations that this machine cannot keep up with, after one step whose real work it has measured."""

from collections.abc import Sequence

from hetero.errors import ConfigError

MOST_BUSY = 0.5
"""Share of this machine's cores, and of a rank's emulated seconds, that real work may take. The rest is sleep, and
what makes a process wake up in time."""


def check_keeps_up(ranks: Sequence[tuple[float, float]], *, num_cores: int, scale: float) -> None:
    """Refuse an emulation that would measure this machine instead of the described one.

    Args:
        ranks: by rank, processor seconds of its real work in one step, and its emulated seconds of computing.
        num_cores: that this machine has for all ranks.
        scale: wall seconds per emulated second.

    Raises:
        ConfigError: real work takes more than ``MOST_BUSY`` of the time that there is for it.
    """
    # A step is at least as long as the rank with the most to compute needs.
    step_s = max(emulated_s for _, emulated_s in ranks)
    needed = sum(real_s for real_s, _ in ranks) / num_cores / step_s
    for real_s, emulated_s in ranks:
        if emulated_s > 0:
            needed = max(needed, real_s / emulated_s)
    if needed > scale * MOST_BUSY:
        raise ConfigError(
            f"emulation: the real work of a step takes {sum(real_s for real_s, _ in ranks):.3g} processor seconds on "
            f"{num_cores} cores, too much beside {step_s * scale:.3g} s of emulated time (at most {MOST_BUSY:.0%}); "
            f"give --hetero-emulate-time-scale {_rounded_up(needed / MOST_BUSY)} or more, or a shorter "
            "--hetero-emulate-seq-length"
        )


def _rounded_up(value: float) -> float:
    """Two digits, not below ``value`` by much more than a rounding error."""
    return float(f"{value * 1.05:.2g}")
