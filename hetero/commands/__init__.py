"""The commands of ``hetero``: each module adds the parser of its command, whose default ``run`` executes it."""
