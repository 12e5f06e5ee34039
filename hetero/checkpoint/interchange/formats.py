"""Names the formats and model families that weights are converted between, for flags, without torch."""

from typing import Literal

WeightFormat = Literal["hf", "hetero", "megatron"]

ModelType = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "gpt2"]
