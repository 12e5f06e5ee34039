"""Pipeline schedules: the actions of a training step and their order, without time or tensors."""
