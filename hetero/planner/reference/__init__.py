"""What the planner is held against: other planners, and every plan of a small problem."""
