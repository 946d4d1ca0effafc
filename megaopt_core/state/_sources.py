"""Where state is loaded from: anything that holds named tensors, and tensors in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from attrs import frozen

from megaopt_core.state._manifest import Manifest, StoredTensor
from megaopt_core.state._values.encoding import decode, dtype_named, name_of_dtype
from megaopt_core.state._values.sliced import SlicedTensor

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
    """Whole tensors in memory.

    Args:
        name: what errors call it.
        manifest: what there is, without files.
        tensors: key to whole tensor.
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
        return StoredTensor(name_of_dtype(tensor.dtype), tuple(tensor.shape), ())

    def read(self, requests: Iterable[Request]) -> None:
        """Copy tensors into their places.

        Args:
            requests: `(key, place)` pairs.
        """
        for key, place in requests:
            whole = self.tensors[key].detach()
            if not isinstance(place, SlicedTensor):
                place.copy_(whole)
                continue
            for index, chunk in enumerate(place.chunks):
                box = whole
                for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    box = box.narrow(dim, offset, size)
                place.local(index).copy_(box)


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
