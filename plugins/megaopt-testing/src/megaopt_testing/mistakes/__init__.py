"""Mistakes of plugin authors that the core does not see, or tells in Python's words: what to write instead."""
