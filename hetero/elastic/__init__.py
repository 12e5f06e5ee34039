"""Goes on training when GPUs come and go: copies of the state on other nodes, new plans, and who agrees on them how."""
