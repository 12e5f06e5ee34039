"""Tables and pictures of plans and their predictions, as text for a terminal."""
