"""What one pipeline may be: stage options, layers and depths of a pipeline, and the template space."""
