"""Data parallelism: contiguous buffers, buckets, and collectives that overlap with computation."""
