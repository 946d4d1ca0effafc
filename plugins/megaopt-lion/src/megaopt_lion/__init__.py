"""Lion as a megaopt plugin."""

__all__: list[str] = []
