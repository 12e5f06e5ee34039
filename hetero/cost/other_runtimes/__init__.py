"""Runtimes of others, described so that the cost model can be held against measurements of them."""
