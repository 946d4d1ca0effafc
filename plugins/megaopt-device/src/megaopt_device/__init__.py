"""What optimizers do with a device: their states in CPU memory, steps as CUDA graphs; a megaopt plugin."""

__all__: list[str] = []
