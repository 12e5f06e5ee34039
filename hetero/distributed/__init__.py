"""Lets ranks talk: process groups, messages between stages, consensus at start-up, and who is lost."""
