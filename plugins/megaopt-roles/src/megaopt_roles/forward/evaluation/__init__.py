"""Evaluating forwards: expressions, calls and statements, each kind in a class that the next one inherits."""
