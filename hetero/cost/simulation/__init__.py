"""Replays a step of a plan with predicted durations."""
