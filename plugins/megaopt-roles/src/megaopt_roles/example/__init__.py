"""What one forward with an example shows: run on the meta device, so that nothing is computed or changed."""
