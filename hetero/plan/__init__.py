"""The plan, which planner and runtime share, and all that follows from it alone: buckets, messages, programs."""
