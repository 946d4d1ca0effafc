"""Checkpoints: one form, keyed by parameter names, that every world size, strategy and precision can load."""
