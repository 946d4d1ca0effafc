"""From a routing to what steps: what may be asked for, and each optimizer with its pieces."""
