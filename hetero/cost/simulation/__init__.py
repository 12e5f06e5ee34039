"""Replays one step of a plan with predicted durations: a discrete-event simulation."""
