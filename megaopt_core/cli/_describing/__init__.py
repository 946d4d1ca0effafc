"""What `megaopt describe` can tell about beside optimizers, schedules and the settings of the core."""
