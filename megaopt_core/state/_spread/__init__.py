"""States that lie with owners, over all ranks that share what they belong to."""

__all__: list[str] = []
