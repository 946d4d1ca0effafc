"""The commands that look at plugins, optimizers, settings and models: each in a module of its name."""
