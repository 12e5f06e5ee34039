"""Pretrains a GPT as Megatron-LM's users know it: flags, tokenizer, data, training loop, checkpoints and logging."""

# Its __init__ lets megatron-core be imported without Triton, which some modules here do first of all.
import hetero.runtime  # noqa: F401
