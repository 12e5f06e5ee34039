"""Executes a plan with torch and megatron-core."""

from hetero.runtime.version_differences import define_kernels_without_triton

# Whichever module of the package is imported first, megatron-core can be imported.
define_kernels_without_triton()
