"""Optimizers: the one step pipeline, precision policies, chains, gradient scaling and statistics."""
