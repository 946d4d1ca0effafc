"""Real models as test data: what they hold, what is expected of it, and stand-ins in plain torch."""
