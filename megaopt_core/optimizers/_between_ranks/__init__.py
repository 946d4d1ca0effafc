"""What ranks hold alike, and whether it still is."""
