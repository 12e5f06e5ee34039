"""Constants to convert units.

A number has its unit in its name: ``_s``, ``_us``, ``_bytes``, ``_mib``, ``_bytes_per_s``.
"""

MIB = 2**20
GIB = 2**30

GB = 10**9
"""Links are sold in decimal gigabytes per second, memory in binary gibibytes."""

TERA = 10**12

US_PER_S = 10**6

BYTES_OF_PRECISION = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one weight or activation element."""
