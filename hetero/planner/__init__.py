"""Chooses plans: which nodes form a replica, who holds which layers, and how many samples each replica takes."""
