"""Objects of Python that forwards handle beside activations and weights: what is read of them, and what they call."""
