"""What one layer costs on a device: seconds, bytes that it keeps, work, and numbers of parameters."""
