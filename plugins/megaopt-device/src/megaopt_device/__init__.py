"""What optimizers do with a device: their states in CPU memory; a megaopt plugin."""

__all__: list[str] = []
