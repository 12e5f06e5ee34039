"""Says on which GPUs the kernels of a build run, from the architectures that it was compiled for. Knows no torch."""

import re
from collections.abc import Sequence


def has_kernels(built_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code built for these architectures, such as ``sm_90`` or ``compute_120``, runs on a device.

    Binary code (``sm``) runs on later devices of its own generation, intermediate code (``compute``) on all later ones;
    with the suffix ``a`` both run on this very architecture only, with ``f`` in its generation. Without any
    architectures nothing is known, and nothing refused.
    """
    for each in built_for:
        if (found := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", each)) is None:
            continue
        kind, major, minor, suffix = found.groups()
        built = int(major), int(minor)
        if suffix == "a":
            runs = built == capability
        elif kind == "compute" and not suffix:
            runs = built <= capability
        else:
            runs = built[0] == capability[0] and built <= capability
        if runs:
            return True
    return not built_for
