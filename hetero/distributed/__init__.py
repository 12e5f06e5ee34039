"""Who talks to whom: process groups, and what crosses the boundary between two stages."""
