"""Plugins that a test makes up, installed into a folder of its own."""

from megaopt_testing.fake_plugins import plugins

__all__ = ["plugins"]
