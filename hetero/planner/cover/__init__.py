"""Covers of a cluster by copies of templates: the CP-SAT model, the search with its proof, the plan of a cover."""
