"""The commands `megaopt train` and `megaopt compare` as a megaopt plugin."""

__all__: list[str] = []
