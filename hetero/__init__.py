"""Heterogeneous training: plans, schedules and a runtime for pipelines whose stages are not alike."""
