"""States in state dicts of torch's schema: DTensors, which torch's functions gather, send and cut."""
