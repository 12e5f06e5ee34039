"""Sweeps: many combinations of clusters, models, batches, precisions and goals, planned one like the other."""
