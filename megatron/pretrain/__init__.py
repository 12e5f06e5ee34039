"""Pretrains a GPT as Megatron-LM's users know it: flags, tokenizer, data, training loop, checkpoints and logging."""
