"""Any optimizer on FSDP2: whole tensors are transformed by their owners, as a megaopt plugin."""

__all__: list[str] = []
