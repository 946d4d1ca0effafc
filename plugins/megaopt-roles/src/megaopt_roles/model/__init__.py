"""What the forwards of a whole model say, taken together."""
