"""Process groups, and reductions over them."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.parallel._groups import (
        ProcessGroupCollection,
        communicates,
        is_distributed,
        rank_in,
        size_of,
    )
    from megaopt_core.parallel._reduction import all_reduce, stopped
    from megaopt_core.parallel._timeouts import timeout_of
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "ProcessGroupCollection": "_groups",
            "all_reduce": "_reduction",
            "communicates": "_groups",
            "is_distributed": "_groups",
            "rank_in": "_groups",
            "size_of": "_groups",
            "stopped": "_reduction",
            "timeout_of": "_timeouts",
        },
    )

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
