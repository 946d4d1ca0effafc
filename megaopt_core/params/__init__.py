"""Parameters: keys that match them, overrides for them, what they are, and which group gets them."""
