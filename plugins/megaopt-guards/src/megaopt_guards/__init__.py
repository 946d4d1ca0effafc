"""Guards of megaopt: step observers that compare ranks, find foreign writes, and watch wrappers and clipping."""

from megaopt_guards.double_clipping import DoubleClipping
from megaopt_guards.foreign_writes import ForeignWrites
from megaopt_guards.ranks_compared import RanksCompared
from megaopt_guards.wrappers import WrappersWatched

__all__ = ["DoubleClipping", "ForeignWrites", "RanksCompared", "WrappersWatched"]
