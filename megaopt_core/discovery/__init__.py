"""How plugins are found, chosen and loaded, whose settings are whose, and what is said of a missing one."""
