"""The core's own commands, each in a module of its name."""
