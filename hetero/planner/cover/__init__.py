"""Which copies of which templates cover the cluster: the CP-SAT model, the search with its proof, and the plan of a cover."""
