"""Converts a Hugging Face ``config.json`` to a model, and refuses every key that it cannot account for."""
