"""Finds the pace at which this machine can emulate, after one step whose real work it has measured."""

from collections.abc import Sequence

from hetero.errors import ConfigError

MOST_BUSY = 0.5
"""Share of this machine's cores, and of a rank's emulated seconds, that real work may take. The rest is sleep, and
what makes a process wake up in time."""


def kept_time_scale(ranks: Sequence[tuple[float, float]], *, num_cores: int, asked: float | None) -> float:
    """Wall seconds per emulated second at which the described cluster is measured, and not this machine.

    Args:
        ranks: by rank, processor seconds of its real work in one step, and its emulated seconds of computing.
        num_cores: that this machine has for all ranks.
        asked: wall seconds per emulated second that have to do; ``None`` for 1, or more if it takes more.

    Raises:
        ConfigError: at what was asked, real work takes more than ``MOST_BUSY`` of the time that there is for it.
    """
    # A step is at least as long as the rank with the most to compute needs.
    step_s = max(emulated_s for _, emulated_s in ranks)
    needed = sum(real_s for real_s, _ in ranks) / num_cores / step_s
    for real_s, emulated_s in ranks:
        if emulated_s > 0:
            needed = max(needed, real_s / emulated_s)
    enough = _rounded_up(needed / MOST_BUSY)
    if asked is None:
        return max(1.0, enough)
    if needed > asked * MOST_BUSY:
        raise ConfigError(
            f"emulation: the real work of a step takes {sum(real_s for real_s, _ in ranks):.3g} processor seconds on "
            f"{num_cores} cores, too much beside {step_s * asked:.3g} s of emulated time (at most {MOST_BUSY:z.0%}); "
            f"give --hetero-emulate-time-scale {enough} or more, or a shorter --hetero-emulate-seq-length"
        )
    return asked


def _rounded_up(value: float) -> float:
    """Two digits, not below ``value`` by much more than a rounding error."""
    return float(f"{value * 1.05:.2g}")
