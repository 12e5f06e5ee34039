"""Knows the job of Slurm that a process runs in, and asks Slurm's controller about it."""
