"""The checks, one file a subject."""
