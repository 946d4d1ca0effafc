"""What the ranks that reduce gradients together must have alike: the buffers that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megaopt_core.parallel._agreement import Comparison, Rows, fingerprint
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates
from megaopt_core.sharding._layout import BufferKey, PerBufferParamLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["buffers_alike"]

type _Buffers = Mapping[BufferKey, PerBufferParamLayout]


def buffers_alike(buffers: _Buffers | None, pgs: ProcessGroupCollection) -> list[Comparison]:
    """Return what data-parallel ranks must have alike of buffers: dense ones over their group, experts' over theirs.

    Args:
        buffers: the buffers of this rank; None where the model has none.
        pgs: the process groups.
    """
    kinds = (("the buffers", pgs.dense_dp, False), ("the buffers of experts", pgs.expt_dp, True))
    return [
        _alike(what, buffers, group, is_expert=is_expert)
        for what, group, is_expert in kinds
        if communicates(group)
    ]


def _alike(what: str, buffers: _Buffers | None, group: ProcessGroup | None, *, is_expert: bool) -> Comparison:
    some = {key: buffer for key, buffer in (buffers or {}).items() if key.is_expert is is_expert}
    data = [
        (
            _words(key),
            dict(buffer.param_ranges),
            buffer.bucket_ends,
            dict(buffer.bucket_of),
            buffer.share_ends,
        )
        for key, buffer in some.items()
    ]
    return Comparison(what, fingerprint((buffers is None, data)), lambda: _rows(some), group)


def _words(key: BufferKey) -> str:
    dtypes = f"{key.param_dtype} with gradients in {key.grad_dtype}".replace("torch.", "")
    marks = ", layer-wise" if key.is_managed_by_layer_wise else ""
    return f"buffer of {dtypes}{marks}, chunk {key.chunk}"


def _rows(buffers: _Buffers) -> Rows:
    rows = []
    for key, buffer in buffers.items():
        name = _words(key)
        ends = {"bucket ends": str(buffer.bucket_ends), "shares": str(buffer.share_ends or "equal")}
        rows.append((name, ends))
        for param, (start, stop) in buffer.param_ranges.items():
            where = {"place": f"[{start}, {stop})", "bucket": str(buffer.bucket_of.get(param))}
            rows.append((f"parameter {param!r} in {name}", where))
    return rows
