"""Sharding: the protocol, layouts as pure data, and the built-in replicated strategy."""
