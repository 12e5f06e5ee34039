"""What ``hetero doctor`` looks at on a host, what is wrong with it, and what to do."""
