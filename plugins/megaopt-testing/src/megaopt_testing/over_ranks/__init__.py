"""Checks of optimizers over several ranks: each starts processes that talk over gloo."""
