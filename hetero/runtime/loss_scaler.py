"""Scales the loss in fp16 (arXiv 1710.03740), so that half precision does not round small gradients to 0."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleOptions:
    """Megatron-LM's rule: after ``window`` steps without an overflow the scale doubles, and from the
    ``hysteresis``-th overflow on it halves, down to ``minimum``.

    constant: this scale for ever, whatever happens.
    """

    constant: float | None = None
    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2


@dataclass(slots=True)
class LossScaler:
    """Keeps the scale of the loss and what its next change depends on. Every rank has one, and all move alike.

    clean_steps: steps without an overflow since the last change.
    overflows_left: before the scale shrinks.
    """

    options: LossScaleOptions
    scale: float
    clean_steps: int
    overflows_left: int

    @classmethod
    def start(cls, options: LossScaleOptions) -> "LossScaler":
        scale = options.initial if options.constant is None else options.constant
        return cls(options, scale=scale, clean_steps=0, overflows_left=options.hysteresis)

    def update(self, *, overflow: bool) -> None:
        """Move on by one step, of which all ranks have agreed whether it overflowed."""
        if self.options.constant is not None:
            return
        if overflow:
            self.clean_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale / 2, self.options.minimum)
            return
        self.clean_steps += 1
        if self.clean_steps == self.options.window:
            self.clean_steps = 0
            self.overflows_left = self.options.hysteresis
            self.scale *= 2
