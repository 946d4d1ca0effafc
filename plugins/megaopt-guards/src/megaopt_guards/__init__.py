"""Guards of megaopt: step observers that compare ranks, find foreign writes, and notice double clipping."""

from megaopt_guards.double_clipping import DoubleClipping
from megaopt_guards.foreign_writes import ForeignWrites
from megaopt_guards.ranks_compared import RanksCompared

__all__ = ["DoubleClipping", "ForeignWrites", "RanksCompared"]
