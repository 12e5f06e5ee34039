"""Imports megatron-core as a training on CPUs does: without ``torch.compile``, which takes longer than all else."""

from hetero.runtime import cpu_backend

cpu_backend.install()
