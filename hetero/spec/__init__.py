"""Inputs as pure data: the model, the devices, the cluster."""
