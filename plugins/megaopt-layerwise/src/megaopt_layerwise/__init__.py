"""Whole matrices stepped by their owners, as a megaopt plugin."""
