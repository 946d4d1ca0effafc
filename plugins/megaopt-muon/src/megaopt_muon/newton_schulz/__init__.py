"""Newton-Schulz orthogonalization: its steps, and runs of them on the Gram matrix."""
