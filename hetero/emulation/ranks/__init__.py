"""Runs the processes that compute, one per rank of the emulated cluster, with torch."""
