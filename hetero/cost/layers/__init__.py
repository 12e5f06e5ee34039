"""What a layer costs on a device: seconds, work and numbers of parameters."""
