"""Two sharding strategies for tests, written by public names: slices of rows, and owners of whole tensors."""

from megaopt_testing.strategies.layouts import OwnerLayout, RowLayout
from megaopt_testing.strategies.strategies import Owners, Rows

__all__ = ["OwnerLayout", "Owners", "RowLayout", "Rows"]
