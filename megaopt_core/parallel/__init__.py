"""Process groups, and reductions over them."""

from megaopt_core.parallel._agreement import (
    Comparison,
    Rows,
    agree_over_ranks,
    described,
    differences_over_ranks,
    fingerprint,
)
from megaopt_core.parallel._digest import digest_of_tensors
from megaopt_core.parallel._groups import (
    ProcessGroupCollection,
    communicates,
    is_distributed,
    rank_in,
    size_of,
)
from megaopt_core.parallel._meeting import DATA_PARALLEL, takes_part
from megaopt_core.parallel._reduction import all_reduce, gather_objects, needs_all_ranks, new_group
from megaopt_core.parallel._timeouts import timeout_of

__all__ = [
    "DATA_PARALLEL",
    "Comparison",
    "ProcessGroupCollection",
    "Rows",
    "agree_over_ranks",
    "all_reduce",
    "communicates",
    "described",
    "differences_over_ranks",
    "digest_of_tensors",
    "fingerprint",
    "gather_objects",
    "is_distributed",
    "needs_all_ranks",
    "new_group",
    "rank_in",
    "size_of",
    "takes_part",
    "timeout_of",
]
