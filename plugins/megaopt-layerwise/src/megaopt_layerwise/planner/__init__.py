"""Who owns which matrix: pure functions from shapes, costs, groups and world to owners."""
