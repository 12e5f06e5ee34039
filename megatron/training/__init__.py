"""The harness around the runtime: Megatron-LM's flags, tokenizer, data, training loop and logging."""
