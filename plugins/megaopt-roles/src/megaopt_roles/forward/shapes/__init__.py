"""What functions that change shapes, and indices, do to activations and weights."""
