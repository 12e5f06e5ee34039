"""The commands of ``hetero``: each module adds its own parser and runs it."""
