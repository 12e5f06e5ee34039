"""Inputs of planning and training as plain data: the model, the devices, the cluster, and measured profiles."""
