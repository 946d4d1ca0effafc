"""What is done to weights that are used by hand, and to their axes."""
