"""Mistakes of plugin authors: what they are, and what to write instead."""
