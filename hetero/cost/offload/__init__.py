"""What it costs to keep parts of a stage in the host's memory: bytes, copies, and the seconds of a step."""
