"""From a plan to running processes: flags, hosts, the line of each host, ssh and Slurm."""
