"""Reading, as torch.distributed.checkpoint asks for it: shapes from the manifest, bytes from the rank files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megaopt_checkpoint.checksums import BoxSum
from megaopt_checkpoint.folder import HeldFile, HeldFolder
from megaopt_checkpoint.manifest import manifest_in
from megaopt_checkpoint.memory import bytes_of
from megaopt_checkpoint.stored import Manifest, StoredChunk, StoredTensor
from megaopt_checkpoint.values.encoding import dtype_named
from megaopt_checkpoint.verify import damaged
from megaopt_core.errors import CheckpointCorruptError

__all__ = ["CheckpointReader", "metadata_of"]


_BLOCK = 2**18


class CheckpointReader(StorageReader):
    """Reads a checkpoint, for `torch.distributed.checkpoint.load(..., storage_reader=CheckpointReader(path))`.

    Args:
        path: the checkpoint's folder, or one that is held; it is held until the reader is gone.
        manifest: its manifest, when it has been read already.
        verify: check the checksum of every box that is read whole, before it is anywhere else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | HeldFolder,
        manifest: Manifest | None = None,
        *,
        verify: bool = True,
    ) -> None:
        super().__init__()
        self._folder = path if isinstance(path, HeldFolder) else HeldFolder(path)
        self._manifest = manifest_in(self._folder) if manifest is None else manifest
        self._verify = verify

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turn to another checkpoint, if one is given, or if another one is at the path by now.

        Args:
            checkpoint_id: its folder.
        """
        if checkpoint_id is None:
            return
        if Path(checkpoint_id).absolute() != self._folder.path or not self._folder.is_current:
            self._folder = HeldFolder(checkpoint_id)
            self._manifest = manifest_in(self._folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return shapes, dtypes and boxes of all tensors, from the manifest.

        Args:
            *args: not used.
            **kwargs: not used.
        """
        return metadata_of(self._manifest)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing.

        Args:
            metadata: not used.
            is_coordinator: not used.
            *args: not used.
            **kwargs: not used.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is.

        Args:
            plan: this rank's plan.
        """
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are.

        Args:
            plans: every rank's plan.
        """
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item into its place, each stored box once.

        Args:
            plan: what this rank reads.
            planner: hands out the places.
        """
        per_box: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                per_box.setdefault(item.storage_index, []).append(item)
        stored = {
            (key, chunk.offsets): (tensor, chunk)
            for key, tensor in self._manifest.tensors.items()
            for chunk in tensor.chunks
        }
        boxes = [(*stored[index.fqn, tuple(index.offset or ())], items) for index, items in per_box.items()]
        boxes.sort(key=lambda box: (box[1].file, box[1].position))
        for tensor, chunk, of_box in boxes:
            for item in of_box:
                self._read(tensor, chunk, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, tensor: StoredTensor, chunk: StoredChunk, item: ReadItem, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(item).detach()
        dtype = dtype_named(tensor.dtype)
        sizes, offsets, lengths = chunk.sizes, tuple(item.storage_offsets), tuple(item.lengths)
        # Leading rows of a box are contiguous in the file; only what is needed of them is read.
        first, rows = (offsets[0], lengths[0]) if sizes else (0, 1)
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        direct = (
            target.device.type == "cpu"
            and target.dtype == dtype
            and target.is_contiguous()
            and lengths[1:] == tuple(sizes[1:])
        )
        place = target if direct else torch.empty((rows, *sizes[1:]) if sizes else (), dtype=dtype)
        box = BoxSum() if self._verify and rows == (sizes[0] if sizes else 1) else None
        _read_exactly(self._folder.open(chunk.file), chunk.position + first * row_bytes, bytes_of(place), box)
        if box is not None and box.text() != chunk.checksum:
            file = self._folder.path / chunk.file
            raise CheckpointCorruptError(damaged(file, item.storage_index.fqn, chunk), path=str(file))
        if not direct:
            for dim in range(1, len(sizes)):
                place = place.narrow(dim, offsets[dim], lengths[dim])
            target.copy_(place)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a reader is made by hand, not guessed from a path.

        Args:
            checkpoint_id: not used.
        """
        return False


def _read_exactly(file: HeldFile, position: int, memory: memoryview, box: BoxSum | None) -> None:
    """Fill memory, and add what was read to the sum of a box."""
    for start in range(0, len(memory), _BLOCK):
        block = memory[start : start + _BLOCK]
        if file.read_into(position + start, block) < len(block):
            raise CheckpointCorruptError(f"{file.path} ends too early", path=str(file.path))
        if box is not None:
            box.update(block)


def metadata_of(manifest: Manifest) -> Metadata:
    """Return what torch.distributed.checkpoint plans a load with.

    Args:
        manifest: the checkpoint's manifest.
    """
    entries: dict[str, Any] = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=dtype_named(tensor.dtype)),
            torch.Size(tensor.shape),
            [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in tensor.chunks
            ],
        )
        for key, tensor in manifest.tensors.items()
    }
    return Metadata(state_dict_metadata=entries)
