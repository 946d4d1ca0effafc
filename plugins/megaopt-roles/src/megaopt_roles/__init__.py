"""The roles of the parameters of any model, seen in its modules and one forward, as a megaopt plugin."""

__all__: list[str] = []
