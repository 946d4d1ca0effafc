"""Bringing stored state back: matched by name, planned whole, then written."""
