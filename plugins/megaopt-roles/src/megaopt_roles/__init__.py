"""What the parameters of any model are, read from its modules and their forwards, as a megaopt plugin."""

__all__: list[str] = []
