"""Weights from and to other programs' formats, tensor by tensor, so that a model larger than memory passes."""
