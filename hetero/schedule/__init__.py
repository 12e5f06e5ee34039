"""Order of work: no time, no tensors."""
