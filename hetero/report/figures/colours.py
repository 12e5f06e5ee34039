"""Colours of figures and page: by replica, by device type, by what happens in a step, and for text on any of them."""

import math

from hetero.report.content import MOST_NAMED_REPLICAS, Report

INK, QUIET, FAINT, PAPER = "#1b2430", "#5b6675", "#d7dce3", "#ffffff"
"""Text, lesser text, lines, and what is behind all of it."""

HUES = ("#3565a8", "#c8762b", "#2c8a6d", "#a8447f", "#7a6a1c", "#5a4fa8", "#2f8fb3")
"""Of replicas. Far apart for colour-blind readers too; the labels say the same in words."""

FORWARD, BACKWARD, WEIGHTS, SEND_F, SEND_B, SUM, WAIT, UPDATE = (
    "forward", "backward", "weights' gradients", "activations sent", "gradients sent", "sums and gathers",
    "exposed sync", "update",
)  # fmt: skip

COLOURS = {
    FORWARD: "#4f9bd0",
    BACKWARD: "#e8a33d",
    WEIGHTS: "#f0dc6a",
    SEND_F: "#1f5f99",
    SEND_B: "#c1501f",
    SUM: "#b565a0",
    WAIT: "#e9cfe2",
    UPDATE: "#1f9873",
}
"""Of what happens in a step, after Okabe and Ito: told apart under every common colour blindness."""


def hue_of(report: Report, replica: int) -> int:
    """Which of :data:`HUES` a replica has: its own, or that of its group where there are more replicas than hues."""
    return (replica if report.names_each_replica else report.group_of[replica]) % MOST_NAMED_REPLICAS


def shade(hue: int, step: int, num_steps: int) -> str:
    """A colour of the hue: light for the first of ``num_steps``, full for the last."""
    light = 0.5 * (1 - step / (num_steps - 1)) if num_steps > 1 else 0.0
    channels = [int(HUES[hue][i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c + (255 - c) * light):02x}" for c in channels)


def device_colour(report: Report, device: str) -> str:
    """The colour of a device type: a hue of its own; with more types than hues they come again, lighter."""
    turn, hue = divmod(list(report.devices).index(device), len(HUES))
    return lighter(HUES[hue], turn)


def stage_colour(report: Report, replica: int, place: tuple[int, int], device: str) -> str:
    """The colour of the device group at ``place`` of a replica, by what the report's colours tell."""
    if report.colours == "device":
        return device_colour(report, device)
    return shade(hue_of(report, replica), *place)


def work_colour(report: Report, what: str, device: str) -> str:
    """The colour of something in a step; by device, computes have their device's, forwards the lightest."""
    turn = {BACKWARD: 0, WEIGHTS: 1, FORWARD: 2}.get(what)
    if report.colours == "device" and turn is not None:
        return lighter(device_colour(report, device), turn)
    return COLOURS[what]


def lighter(colour: str, turn: int) -> str:
    """``colour`` for the first of what devices do in turns, and ever more of it white for what follows."""
    part = 1 / (1 + 0.6 * turn)
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part * c + (1 - part) * 255):02x}" for c in channels)


def ink_on(colour: str) -> str:
    """Dark or white, whichever has more contrast to ``colour`` (WCAG 2.2, "contrast ratio")."""
    behind = _luminance(colour)
    with_ink = (behind + 0.05) / (_luminance(INK) + 0.05)
    with_paper = (_luminance(PAPER) + 0.05) / (behind + 0.05)
    return INK if with_ink > with_paper else PAPER


def _luminance(colour: str) -> float:
    linear = [math.pow((int(colour[i : i + 2], 16) / 255 + 0.055) / 1.055, 2.4) for i in (1, 3, 5)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
