"""Products of matrices, symmetric ones above all, their precision and their memory."""
