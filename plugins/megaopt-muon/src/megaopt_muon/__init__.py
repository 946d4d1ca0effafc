"""Muon and adaptive Muon as a megaopt plugin."""

__all__: list[str] = []
