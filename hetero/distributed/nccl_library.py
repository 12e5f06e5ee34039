"""Asks the NCCL library that torch has loaded for its version."""

import ctypes

_NAME = "libnccl.so.2"


def loaded_nccl_version() -> str | None:
    """The version of the loaded library, such as ``2.29.7``; ``None`` where none can be loaded.

    ``torch.cuda.nccl.version()`` tells the one that torch was compiled with (torch/csrc/cuda/nccl.cpp), while its
    wheels load what the package nvidia-nccl-cu12 or nvidia-nccl-cu13 has installed. To be called after the import of
    torch: its library is found by its name then.
    """
    try:
        library = ctypes.CDLL(_NAME)
    except OSError:
        return None
    code = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(code)) != 0:
        return None
    return version_of_code(code.value)


def version_of_code(code: int) -> str:
    """The version that ``ncclGetVersion`` tells as a number: 22907 is 2.29.7, and before 2.9 it was 2804 for 2.8.4."""
    thousands = 10_000 if code >= 10_000 else 1_000
    return f"{code // thousands}.{code % thousands // 100}.{code % 100}"
