"""What the planner is held against: other planners as yardsticks, and every plan of a small problem."""
