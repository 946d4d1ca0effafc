"""Adam, AdamW and SGD as a megaopt plugin."""

__all__: list[str] = []
