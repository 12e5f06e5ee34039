"""Hugging Face's ``config.json``: which keys the supported families have, and the model that they make."""
