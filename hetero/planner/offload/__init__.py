"""Chooses by CP-SAT what of a stage lives in its host's memory, and of stages that share a host together."""
