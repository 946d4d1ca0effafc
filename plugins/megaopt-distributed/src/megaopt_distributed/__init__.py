"""The distributed optimizer (ZeRO-1) as a megaopt plugin."""

__all__: list[str] = []
