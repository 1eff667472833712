"""The families of environments, and the way to make them by name."""
