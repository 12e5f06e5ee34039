"""Passes over finished plans: each takes scored plans and returns one that is not worse."""
