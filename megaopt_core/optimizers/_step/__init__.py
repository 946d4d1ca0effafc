"""One step of an optimizer: its order, the votes by which ranks meet, and the numbers that it measures."""
