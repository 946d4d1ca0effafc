"""Contiguous buffers, their buckets, and the collectives that move them."""

__all__: list[str] = []
