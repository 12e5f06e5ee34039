"""Replaces the few CUDA calls that megatron-core's layers make, so that they run on machines without CUDA.

Everything that is replaced is listed here, with the places in megatron-core 0.16.1 that need it. With CUDA present
:func:`install` replaces nothing. On every machine it is the first to import ``megatron.core``, whose fused functions
call ``torch.compile`` while they are imported, and which imports packages that no rank needs. Nor may TransformerEngine
have been imported, before which torch's cuDNN is loaded where there is CUDA (:mod:`hetero.distributed.cudnn_library`).
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hetero.distributed.cudnn_library import load_cudnn
from hetero.runtime.muted_lines import ALWAYS, WITHOUT_CUDA, mute_lines

_CPU = torch.device("cpu")


def _seed_default_generator(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


_OF_DEVICES: dict[str, Callable[..., object]] = {
    "current_device": lambda: _CPU,
    "set_device": lambda device: None,
}
_OF_GENERATORS: dict[str, Callable[..., object]] = {
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
    "manual_seed": _seed_default_generator,
}


def install() -> None:
    """Import megatron-core, and make its layers run on the CPU where there is no CUDA. Safe to call again.

    Entry points call it first of all. Public functions of ``torch.cuda`` that are replaced, and who calls them:

    * ``current_device``, ``set_device``: rotary_pos_embedding.py:162, utils.py:631 (GlobalMemoryBuffer),
      tensor_parallel/mappings.py:91-442, tensor_parallel/layers.py:552, moe/router.py:90-198
    * ``get_rng_state``, ``set_rng_state``, ``manual_seed``: tensor_parallel/random.py:55,72,235-240,422, which
      dot_product_attention.py:217 reaches even with dropout 0
    """
    mute_lines(ALWAYS)
    if torch.cuda.is_available():
        # megatron-core imports TransformerEngine, which loads another cuDNN unless torch's is there.
        load_cudnn()
        _import_megatron()
        return
    mute_lines(WITHOUT_CUDA)
    for name, stand_in in {**_OF_DEVICES, **_OF_GENERATORS}.items():
        setattr(torch.cuda, name, stand_in)
    for name, stand_in in _OF_GENERATORS.items():
        setattr(torch.cuda.random, name, stand_in)
    with _without_compiling():
        _import_megatron()

    from megatron.core.tensor_parallel import random as megatron_random

    # random.py:72 calls CUDA's lazy initialisation itself instead of torch.cuda.set_rng_state.
    megatron_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


@contextmanager
def _without_compiling() -> Iterator[None]:
    """Have ``torch.compile`` change nothing.

    core/jit.py:25 decorates with it: on a CPU that costs 13 s at the first fused call.
    """

    def leave_as_it_is(model: object = None, **_: object) -> object:
        return model if model is not None else lambda function: function

    compile_ = torch.compile
    torch.compile = leave_as_it_is  # type: ignore[assignment]  # the same call, but for its overloads
    try:
        yield
    finally:
        torch.compile = compile_


def _import_megatron() -> None:
    with _without(*_FOR_OTHERS), warnings.catch_warnings():
        # Half a dozen modules say that Apex and TransformerEngine are not installed.
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model
        import megatron.core.transformer.moe.moe_layer  # noqa: F401


_FOR_OTHERS = ("wandb", "tensorboard")
"""What megatron-core imports wherever it is found, for its inference engine (inference/contexts/dynamic_context.py) and
its timers (timers.py), which nobody here runs: wandb takes as long as all else of megatron-core, in every process."""


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Let megatron-core take these modules for not installed, unless somebody has imported them.

    Who asks for one imports it later.
    """
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python says that a module cannot be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
