"""State dicts in torch's schema."""
