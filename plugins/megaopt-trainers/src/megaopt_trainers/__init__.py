"""Adapters of trainers, one module each: a trainer is imported when its own adapter is used."""

__all__: list[str] = []
