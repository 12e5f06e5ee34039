"""What the installed torch tells of this process, where there is one that can be imported."""

from __future__ import annotations

from hetero.doctor.facts import TorchFacts
from hetero.extras import missing_modules


def torch_facts_or_error() -> tuple[TorchFacts | None, str | None]:
    """What torch tells, and why it cannot be imported where it is installed."""
    if "torch" in missing_modules("train"):
        return None, None
    try:
        from hetero.doctor.torch_facts import torch_facts
    except (ImportError, OSError) as error:
        # A library of CUDA that is not there, or one of another version.
        return None, str(error).splitlines()[0]
    return torch_facts(), None
