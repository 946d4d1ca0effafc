"""The matrices that parameters consist of: found, put together and orthogonalized."""
