"""How values are stored: slices of tensors, numbers by range, plain Python as JSON."""
