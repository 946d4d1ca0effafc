"""Process groups, and reductions over them."""

from megaopt_core.parallel._groups import (
    ProcessGroupCollection,
    communicates,
    is_distributed,
    rank_in,
    size_of,
)
from megaopt_core.parallel._reduction import all_reduce, stopped
from megaopt_core.parallel._timeouts import timeout_of

__all__ = [
    "ProcessGroupCollection",
    "all_reduce",
    "communicates",
    "is_distributed",
    "rank_in",
    "size_of",
    "stopped",
    "timeout_of",
]
