"""Executes a plan with torch and megatron-core."""
