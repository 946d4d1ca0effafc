"""`DistributedDataParallel`: gradients accumulated, reduced and waited for."""

__all__: list[str] = []
