"""What data-parallel ranks must have alike when they wrap a module, compared before anything as large as a bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megaopt_core.config import dtype_name
from megaopt_core.parallel import (
    DATA_PARALLEL,
    Comparison,
    ProcessGroupCollection,
    agree_over_ranks,
    communicates,
    fingerprint,
)
from megaopt_core.params import NamedParam, is_marked_expert
from megaopt_core.sharding import FullParamLayout, buffers_alike
from megaopt_distributed import DistributedDataParallelConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["require_alike"]

_WHAT = "wrapping the model in DistributedDataParallel"
_ADVICE = (
    "Wrap the same model with the same DistributedDataParallelConfig on all data-parallel ranks. Ranks that hold "
    "models of their own say so with pg_collection; ProcessGroupCollection() is that of a model on one rank alone"
)


def require_alike(
    params: Sequence[NamedParam],
    ddp_config: DistributedDataParallelConfig,
    pgs: ProcessGroupCollection,
    layout: FullParamLayout | None,
) -> None:
    """Raise on all data-parallel ranks unless they wrap the same trainable parameters in the same way.

    Args:
        params: the trainable parameters, in the order of the module.
        ddp_config: how gradients are kept and reduced.
        pgs: the caller's process groups.
        layout: what the caller gives; None: it will be planned, from what is compared here.

    Raises:
        RankMismatchError: ranks differ.
        MissingRanksError: a rank has not come before the group's timeout was over.
    """
    settings = {name: repr(value) for name, value in ddp_config.to_dict().items()}
    config = Comparison(
        "the DistributedDataParallelConfig",
        fingerprint(settings),
        lambda: [(name, {"": value}) for name, value in settings.items()],
    )
    kinds = (
        ("the trainable parameters", pgs.dense_dp, False),
        ("the trainable parameters of experts", pgs.expt_dp, True),
    )
    alike = [config, *buffers_alike(None if layout is None else layout.buffers, pgs)]
    for what, group, is_expert in kinds:
        if communicates(group):
            some = [entry for entry in params if is_marked_expert(entry.param) is is_expert]
            alike.append(_params_alike(what, some, group))
    agree_over_ranks(None, pgs, _WHAT, alike=alike, names=DATA_PARALLEL, advice=_ADVICE)


def _params_alike(what: str, params: Sequence[NamedParam], group: ProcessGroup | None) -> Comparison:
    digest = fingerprint(
        [
            (
                entry.name,
                tuple(entry.param.shape),
                str(entry.param.dtype),
                bool(getattr(entry.param, "shared_embedding", False)),
            )
            for entry in params
        ]
    )
    return Comparison(what, digest, lambda: [_row(entry) for entry in params], group)


def _row(entry: NamedParam) -> tuple[str, Mapping[str, str]]:
    said = {
        "shape": str(tuple(entry.param.shape)),
        "dtype": dtype_name(entry.param.dtype),
        "shared_embedding": repr(bool(getattr(entry.param, "shared_embedding", False))),
    }
    return f"parameter {entry.name!r}", said
