"""Measures what this host can do, in a process of its own that may import torch."""
