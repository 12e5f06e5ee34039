"""Models that are small and yet large enough for kernels of a GPU: heads of 32 channels and more."""

import dataclasses
from collections.abc import Callable, Mapping

from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.training import ADAM

_WIDE = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "kv_channels": 32, "ffn_hidden_size": 256}

MODELS: Mapping[str, Callable[[], ModelSpec]] = {
    "gpt2-tied": lambda: gpt2_model(**_WIDE, num_query_groups=4),
    "llama-gqa": lambda: llama_model(**_WIDE, num_query_groups=2),
    "moe": lambda: moe_model(**_WIDE, num_query_groups=2, moe_ffn_hidden_size=128),
}
NUM_LAYERS = _WIDE["num_layers"]

SLOW_ADAM = dataclasses.replace(ADAM, lr=1e-3)
"""Adam's first steps move a weight by the whole learning rate, in the direction of a gradient whose sign rounding may
decide. With the rate of the other tests' smaller models, that is more after two steps than rounding is by itself."""
