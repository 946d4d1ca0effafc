"""Matrices whose rows or columns lie on several ranks."""
