"""What is done to gradients before a step: scaled, measured, counted, clipped once."""
