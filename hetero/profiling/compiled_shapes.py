"""Has torch.compile treat every size that a profiler measures as a training treats its only one.

From the second shape of a function on, torch.compile makes one kernel for all shapes, and from the ninth on it makes
none: the function runs unfused. A training has one shape, and a kernel that is made for it.
"""

import contextlib
from collections.abc import Iterator

import torch._dynamo
from torch._dynamo.utils import counters

MOST_COMPILED = 4096
"""Kernels of one function: far more than there are shapes, precisions and ways to call it."""


@contextlib.contextmanager
def compile_for_each_shape() -> Iterator[None]:
    """Let torch.compile make a kernel for each shape of a function, unless the function itself asks for one of all."""
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, recompile_limit=MOST_COMPILED, accumulated_recompile_limit=MOST_COMPILED
    ):
        yield


def num_compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])
