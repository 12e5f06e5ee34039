"""Registers the rendezvous ``hetero-static`` with torchrun, which asks for it by the entry points of packages.

torch loads this module wherever it loads ``torch.distributed.elastic``, hence what the handler needs is imported when
torchrun wants one.
"""

from collections.abc import Callable
from typing import Any


def handler_creator() -> Callable[[Any], Any]:
    """Return what makes a handler of a torchrun's parameters; the group of entry points is ``torchrun.handlers``."""
    return _handler


def _handler(parameters: Any) -> Any:
    from hetero.distributed.torchrun_rendezvous import create_handler

    return create_handler(parameters)
