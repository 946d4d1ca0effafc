"""Where state is loaded from: anything that holds named tensors, and tensors in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from attrs import frozen

from megaopt_checkpoint.stored import Manifest, StoredTensor
from megaopt_checkpoint.values.chunks import Chunk
from megaopt_checkpoint.values.encoding import decode, dtype_named
from megaopt_checkpoint.values.sliced import SlicedTensor
from megaopt_core.config import dtype_name

__all__ = ["MemorySource", "Request", "Source", "read_values"]


type Request = tuple[str, torch.Tensor]


"""A stored tensor's key and where it goes."""


class Source(Protocol):
    """Something that a load reads."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def manifest(self) -> Manifest:
        """What it says about itself."""

    def stored(self, key: str) -> StoredTensor:
        """Return shape and dtype of a tensor.

        Args:
            key: its key.
        """

    def read(self, requests: Iterable[Request]) -> None:
        """Read tensors into their places.

        Args:
            requests: `(key, place)` pairs.
        """


@frozen(eq=False)
class MemorySource:
    """Tensors in memory: whole ones, or the parts of them that this rank steps.

    Args:
        name: what errors call it.
        manifest: what there is, without files.
        tensors: key to tensor.
    """

    name: str
    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]

    def stored(self, key: str) -> StoredTensor:
        """Return shape and dtype of a tensor.

        Args:
            key: its key.
        """
        tensor = self.tensors[key]
        return StoredTensor(dtype_name(tensor.dtype), tuple(tensor.shape), ())

    def require_boxes(self, requests: Iterable[Request]) -> None:
        """Raise unless every place can be filled.

        Args:
            requests: `(key, place)` pairs.

        Raises:
            LookupError: parts of a tensor are held that are cut otherwise than its place.
        """
        for key, place in requests:
            for chunk in place.chunks if isinstance(place, SlicedTensor) else ():
                _box(self.tensors[key].detach(), chunk)

    def read(self, requests: Iterable[Request]) -> None:
        """Copy tensors into their places.

        Args:
            requests: `(key, place)` pairs.
        """
        for key, place in requests:
            held = self.tensors[key].detach()
            if not isinstance(place, SlicedTensor):
                place.copy_(held)
                continue
            for index, chunk in enumerate(place.chunks):
                target, box = place.local(index), _box(held, chunk)
                if target.data_ptr() != box.data_ptr():  # torch may have read straight into its place
                    target.copy_(box)


def _box(held: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    if isinstance(held, SlicedTensor):
        return held.box(chunk.offsets, chunk.sizes)
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        held = held.narrow(dim, offset, size)
    return held


def read_values(source: Source, encoded: Any) -> Any:
    """Return an encoded value of the manifest with its tensors, on the CPU.

    Args:
        source: where its tensors are.
        encoded: the value.
    """
    requests: list[Request] = []

    def place(key: str) -> torch.Tensor:
        stored = source.stored(key)
        tensor = torch.empty(stored.shape, dtype=dtype_named(stored.dtype))
        requests.append((key, tensor))
        return tensor

    value = decode(encoded, place)
    source.read(requests)
    return value
