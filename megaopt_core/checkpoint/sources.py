"""Where state is loaded from: a checkpoint's files, or tensors in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from attrs import frozen
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megaopt_core.checkpoint.manifest import Manifest, StoredTensor, read_manifest
from megaopt_core.checkpoint.reader import CheckpointReader
from megaopt_core.checkpoint.sliced import SlicedTensor
from megaopt_core.checkpoint.staging import recover
from megaopt_core.checkpoint.values import decode, dtype_named, name_of_dtype
from megaopt_core.errors import CheckpointCorruptError

__all__ = ["FileSource", "MemorySource", "Source", "read_values"]

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
class FileSource:
    """A checkpoint on the disk.

    Args:
        folder: its folder.
        manifest: its manifest.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read the manifest of a checkpoint.

        Args:
            path: its folder.

        Raises:
            CheckpointError: there is none, it is too new, or it is damaged.
        """
        folder = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link that is refused
        recover(folder)
        return cls(folder, read_manifest(folder))

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.folder)

    def stored(self, key: str) -> StoredTensor:
        """Return shape, dtype and boxes of a tensor.

        Args:
            key: its key.

        Raises:
            CheckpointCorruptError: the manifest refers to a tensor that it does not have.
        """
        found = self.manifest.tensors.get(key)
        if found is None:
            raise CheckpointCorruptError(
                f"{self.folder} refers to {key!r} but does not hold it", path=str(self.folder)
            )
        return found

    def read(self, requests: Iterable[Request]) -> None:
        """Read tensors into their places.

        Args:
            requests: `(key, place)` pairs; a key may come more than once.
        """
        rounds: list[dict[str, Any]] = []
        for key, place in requests:
            free = next((places for places in rounds if key not in places), None)
            if free is None:
                free = {}
                rounds.append(free)
            free[key] = place
        for places in rounds:
            reader = CheckpointReader(self.folder, self.manifest)
            plans = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            plans.set_up_planner(places, reader.read_metadata(), is_coordinator=True)
            reader.read_data(plans.finish_plan(plans.create_local_plan()), plans).wait()


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
