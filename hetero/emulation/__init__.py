"""Processes on one machine that behave in time, and in memory, like a cluster that this machine does not have."""
