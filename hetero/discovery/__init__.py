"""Finds out what a cluster has, from inside of an allocation, and writes it as a cluster file."""
