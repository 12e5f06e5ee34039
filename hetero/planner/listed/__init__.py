"""Plans that others would make, listed one by one: initial plans of the planner, and its yardsticks."""
