"""Overrides of groups: the standard ones, muP, and what a parameter matches."""
