"""The command line: every flag as a field of a config dataclass, and the way from words to a configuration."""
