"""SOAP as a megaopt plugin."""

__all__: list[str] = []
