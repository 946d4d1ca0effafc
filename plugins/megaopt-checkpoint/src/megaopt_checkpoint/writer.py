"""Writing, as torch.distributed.checkpoint asks for it: raw bytes in one file a rank, a manifest, no pickle."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from attrs import frozen
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megaopt_checkpoint.checksums import sum_of
from megaopt_checkpoint.manifest import write_manifest
from megaopt_checkpoint.memory import bytes_of
from megaopt_checkpoint.stored import Manifest, StoredChunk, StoredTensor
from megaopt_core.config import dtype_name
from megaopt_core.errors import CheckpointError

__all__ = ["CheckpointWriter", "rank_file"]

_BLOCK = 2**24

_LONG = 2**20
"""Bytes from which on a thread is worth its while."""


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes.

    Args:
        rank: its rank among those that save.
    """
    return f"rank-{rank:05d}.bin"


@frozen
class _Written:
    """Where one item went."""

    file: str
    position: int
    length: int
    checksum: str


class CheckpointWriter(StorageWriter):
    """Writes a rank's items one after the other, and on the coordinator the manifest.

    A tensor is written from where it is; one that is not on the CPU, or not contiguous, is copied by itself, so that
    saving needs no second copy of the shard.

    Args:
        folder: an existing folder, the same on all ranks.
        rank: this rank among those that save.
        manifest: what the manifest says besides tensors and files; only the coordinator's is written.
        commit: called on the coordinator when everything is on the disk.
    """

    def __init__(self, folder: Path, rank: int, manifest: Manifest, commit: Callable[[], None]) -> None:
        super().__init__()
        self._folder = folder
        self._rank = rank
        self._manifest = manifest
        self._commit = commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer serves one save.

        Args:
            checkpoint_id: not used.
        """

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing.

        Args:
            is_coordinator: not used.
            *args: not used.
            **kwargs: not used.
        """

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Args:
            plan: this rank's plan.
        """
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are.

        Args:
            plans: every rank's plan.
        """
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items and return when they are on the disk.

        Args:
            plan: what this rank writes.
            planner: hands out the tensors.
        """
        results = []
        if plan.items:
            name = rank_file(self._rank)
            with (self._folder / name).open("xb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
                position = 0
                for item in plan.items:
                    length, checksum = _write(file, planner, item, beside)
                    where = _Written(name, position, length, checksum)
                    results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=where))
                    position += length
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that every rank's file is there, write the manifest and put the checkpoint in place.

        Args:
            metadata: shape and dtype of every tensor.
            results: what each rank wrote.

        Raises:
            CheckpointError: a rank's file cannot be seen from here.
        """
        chunks: dict[str, list[StoredChunk]] = {}
        sizes: dict[str, int] = {}
        volumes = _volumes(metadata)
        for result in (result for of_rank in results for result in of_rank):
            where: _Written = result.storage_data
            offsets = tuple(result.index.offset or ())
            box = StoredChunk(
                offsets,
                volumes[result.index.fqn, offsets],
                where.file,
                where.position,
                where.length,
                where.checksum,
            )
            chunks.setdefault(result.index.fqn, []).append(box)
            sizes[where.file] = max(sizes.get(where.file, 0), where.position + where.length)
        self._require_visible(sizes)
        self._manifest.files = dict(sorted(sizes.items()))
        self._manifest.tensors = {
            key: StoredTensor(dtype_name(entry.properties.dtype), tuple(entry.size), tuple(chunks[key]))
            for key, entry in sorted(metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        write_manifest(self._folder, self._manifest)
        self._commit()

    def _require_visible(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            file = self._folder / name
            if not file.exists() or file.stat().st_size != size:
                raise CheckpointError(
                    f"{name} was written by its rank but cannot be seen from rank {self._rank}: a checkpoint must be "
                    "on a file system that all ranks share",
                    path=str(file),
                )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a writer is made by :func:`save_checkpoint`, not guessed from a path.

        Args:
            checkpoint_id: not used.
        """
        return False

    def storage_meta(self) -> StorageMeta | None:
        """Return None."""
        return None


def _volumes(metadata: Metadata) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    return {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }


def _write(
    file: BinaryIO | Any, planner: SavePlanner, item: WriteItem, beside: ThreadPoolExecutor
) -> tuple[int, str]:
    """Write a tensor, and return its length and sum; that of a long one is computed by a thread meanwhile."""
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO or not isinstance(data, torch.Tensor):
        raise CheckpointError(f"{item.index.fqn} is no tensor; only tensors are stored in rank files")
    tensor = data.detach().resolve_conj().resolve_neg().cpu().contiguous()
    memory = bytes_of(tensor)
    checksum = _sum_meanwhile(memory, beside)
    rest = memory
    while rest:
        rest = rest[file.write(rest[:_BLOCK]) :]
    return len(memory), checksum.result()


def _sum_meanwhile(memory: memoryview, beside: ThreadPoolExecutor) -> futures.Future[str]:
    if len(memory) >= _LONG:
        try:
            return beside.submit(sum_of, memory)
        except RuntimeError:  # the interpreter waits for a save in the background, and begins no more threads
            pass
    found: futures.Future[str] = futures.Future()
    found.set_result(sum_of(memory))
    return found
