"""Checking that a checkpoint's files are what was written."""

from __future__ import annotations

import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megaopt_checkpoint.checksums import sums, threads
from megaopt_checkpoint.folder import HeldFile, HeldFolder
from megaopt_checkpoint.manifest import manifest_in
from megaopt_checkpoint.stored import Manifest, StoredChunk
from megaopt_core.errors import CheckpointCorruptError

__all__ = ["check_files", "damaged", "require_files", "verify_checkpoint"]


def verify_checkpoint(path: str | os.PathLike[str]) -> Manifest:
    """Check every byte of a checkpoint.

    Args:
        path: its folder.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: there is none, it is too new, or it is damaged; the message names the file.
    """
    with HeldFolder(path) as folder:
        manifest = manifest_in(folder)
        check_files(folder, manifest)
    return manifest


def check_files(folder: HeldFolder, manifest: Manifest, *, part: int = 0, parts: int = 1) -> None:
    """Check that every file is there and complete, and the checksums of some of the stored tensors, or of all.

    Args:
        folder: the checkpoint's folder.
        manifest: its manifest.
        part: which part of the checksums to check.
        parts: into how many parts they are divided.

    Raises:
        CheckpointCorruptError: a file is missing, a link, of another size, or has other contents.
    """
    boxes: dict[str, list[tuple[str, StoredChunk]]] = defaultdict(list)
    for key, chunk in manifest.chunks():
        boxes[chunk.file].append((key, chunk))
    require_files(folder, manifest)
    share = 0
    with threads() as pool:
        for name in manifest.files:
            mine = []
            for key, chunk in sorted(boxes[name], key=lambda box: box[1].position):
                if share % parts == part:
                    mine.append((key, chunk))
                share += 1
            if mine:
                _check_boxes(folder.open(name), mine, pool)


def _check_boxes(file: HeldFile, boxes: list[tuple[str, StoredChunk]], pool: ThreadPoolExecutor) -> None:
    """Check boxes of one file, which stays open meanwhile."""
    found = sums(file, [(chunk.position, chunk.length) for _, chunk in boxes], pool)
    for (key, chunk), value in zip(boxes, found, strict=True):
        if value != chunk.checksum:
            raise CheckpointCorruptError(damaged(file.path, key, chunk), path=str(file.path))


def damaged(file: Path, key: str, chunk: StoredChunk) -> str:
    """Return what is said of a box whose checksum is wrong.

    Args:
        file: where it lies.
        key: of its tensor.
        chunk: the box.
    """
    return (
        f"{file} is damaged: {key} (bytes {chunk.position} to {chunk.position + chunk.length}) does not have the "
        "checksum that it was written with"
    )


def require_files(folder: HeldFolder, manifest: Manifest) -> None:
    """Require that every file is there and has its size; a folder keeps a number of them open.

    Args:
        folder: the checkpoint's folder.
        manifest: its manifest.

    Raises:
        CheckpointCorruptError: a file is missing, a link, or of another size.
    """
    for name, size in manifest.files.items():
        file, found = folder.path / name, folder.find(name)
        if found is None:
            rank = file.stem.rpartition("-")[2].lstrip("0") or "0"
            raise CheckpointCorruptError(
                f"{file} is missing: rank {rank} of {manifest.world_size} wrote {size} bytes into it",
                path=str(file),
            )
        if found.size != size:
            raise CheckpointCorruptError(
                f"{file} has {found.size} bytes, it was written with {size}", path=str(file)
            )
