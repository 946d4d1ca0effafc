"""What the parameters of any model are, seen in its modules and one forward, as a megaopt plugin."""

__all__: list[str] = []
