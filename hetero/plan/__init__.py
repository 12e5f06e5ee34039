"""The contract between planner and runtime: who holds which layers, and who must agree on which gradient."""
