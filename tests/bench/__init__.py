"""Measurements, which no test runs; each says how to start it."""

from hetero.runtime.version_differences import define_kernels_without_triton

# Before megatron.core is imported by anyone.
define_kernels_without_triton()
