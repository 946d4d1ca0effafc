"""What functions and methods of torch do to activations."""
