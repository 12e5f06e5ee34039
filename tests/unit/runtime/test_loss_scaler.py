"""The loss scale follows Megatron-LM's rule."""

from hetero.runtime.loss_scaler import LossScaleOptions, LossScaler


def scales(options: LossScaleOptions, overflows: str) -> list[float]:
    """The scale before each step; ``x`` in ``overflows`` is a step that overflows."""
    scaler = LossScaler.start(options)
    seen = []
    for each in overflows:
        seen.append(scaler.scale)
        scaler.update(overflow=each == "x")
    return seen


def test_doubles_after_a_window_without_overflow() -> None:
    assert scales(LossScaleOptions(initial=4, window=3), "........") == [4, 4, 4, 8, 8, 8, 16, 16]


def test_an_overflow_begins_the_window_anew() -> None:
    assert scales(LossScaleOptions(initial=4, window=3, hysteresis=9), "..x....") == [4, 4, 4, 4, 4, 4, 8]


def test_halves_from_the_hysteresis_th_overflow_on() -> None:
    assert scales(LossScaleOptions(initial=64, window=2, hysteresis=2), "xxxx") == [64, 64, 32, 16]


def test_overflows_far_apart_add_up_until_the_scale_grows() -> None:
    options = LossScaleOptions(initial=64, window=2, hysteresis=2)
    assert scales(options, "x.x.") == [64, 64, 64, 32]
    assert scales(options, "x..x.") == [64, 64, 64, 128, 128], "growth forgives"


def test_never_below_the_minimum() -> None:
    assert scales(LossScaleOptions(initial=4, minimum=2, hysteresis=1), "xxx") == [4, 2, 2]


def test_a_constant_scale_stays() -> None:
    assert scales(LossScaleOptions(constant=8, window=1, hysteresis=1), "..x.") == [8, 8, 8, 8]
