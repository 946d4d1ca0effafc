"""Do stored tensors fit the places that they go to."""

from __future__ import annotations

from collections.abc import Iterable

from megaopt_checkpoint.restore.source import MemorySource, Request, Source
from megaopt_checkpoint.values.encoding import dtype_named
from megaopt_core.state import mismatch, number_kind

__all__ = ["require_tensors"]


def require_tensors(source: Source, requests: Iterable[Request]) -> None:
    """Require that stored tensors have the shape and the kind of elements of the places that they go to.

    Args:
        source: the checkpoint.
        requests: `(key, place)` pairs.

    Raises:
        CheckpointMismatchError: one has not.
        LookupError: tensors in memory are cut otherwise than their places.
    """
    requests = list(requests)
    for key, place in requests:
        stored = source.stored(key)
        there, here = number_kind(dtype_named(stored.dtype)), number_kind(place.dtype)
        if tuple(place.shape) != stored.shape:
            what = f"has shape {stored.shape} there and {tuple(place.shape)} here"
        elif there != here:
            what = f"holds {there} ({stored.dtype}) there and {here} ({place.dtype}) here"
        else:
            continue
        raise mismatch(source.name, f"does not fit: {key} {what}", [key])
    if isinstance(source, MemorySource):
        source.require_boxes(requests)
