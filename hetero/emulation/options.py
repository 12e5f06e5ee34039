"""What a user chooses about an emulation."""

from dataclasses import dataclass

from hetero.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulationOptions:
    """How fast to emulate, and with how much real work.

    time_scale: wall seconds per emulated second; ``None`` for 1, or more where this machine is too slow for that.
    seq_length: of the small model that really computes.
    """

    time_scale: float | None = None
    seq_length: int = 32

    def __post_init__(self) -> None:
        if self.time_scale is not None and self.time_scale <= 0:
            raise ConfigError(f"emulation: time_scale is {self.time_scale}, must be above 0")
        if self.seq_length < 1:
            raise ConfigError(f"emulation: seq_length is {self.seq_length}, must be at least 1")
