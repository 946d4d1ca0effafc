"""Checking that a checkpoint's files are what was written."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from megaopt_core.checkpoint.manifest import Manifest, StoredChunk, read_manifest
from megaopt_core.errors import CheckpointCorruptError

__all__ = ["check_files", "verify_checkpoint"]

_BLOCK = 2**22


def verify_checkpoint(path: str | os.PathLike[str]) -> Manifest:
    """Check every byte of a checkpoint.

    Args:
        path: its folder.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: there is none, it is too new, or it is damaged; the message names the file.
    """
    manifest = read_manifest(path)
    check_files(Path(path), manifest)
    return manifest


def check_files(folder: Path, manifest: Manifest, *, part: int = 0, parts: int = 1) -> None:
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
    for name, size in manifest.files.items():
        _check_size(folder / name, size, manifest, boxes[name])
    share = 0
    for name in manifest.files:
        with (folder / name).open("rb", buffering=0) as file:
            for key, chunk in sorted(boxes[name], key=lambda box: box[1].position):
                mine = share % parts == part
                share += 1
                if mine and _crc32(file, chunk) != chunk.crc32:
                    raise CheckpointCorruptError(
                        f"{folder / name} is damaged: {key} (bytes {chunk.position} to "
                        f"{chunk.position + chunk.length}) does not have the checksum that it was written with",
                        path=str(folder / name),
                    )


def _check_size(file: Path, size: int, manifest: Manifest, boxes: list[tuple[str, StoredChunk]]) -> None:
    rank = file.stem.rpartition("-")[2].lstrip("0") or "0"
    if file.is_symlink():
        raise CheckpointCorruptError(
            f"{file} is a symbolic link, not the file that rank {rank} wrote", path=str(file)
        )
    if not file.is_file():
        raise CheckpointCorruptError(
            f"{file} is missing: rank {rank} of {manifest.world_size} wrote {size} bytes into it",
            path=str(file),
        )
    found = file.stat().st_size
    covered = sum(chunk.length for _, chunk in boxes)
    if found != size or covered != size:
        raise CheckpointCorruptError(f"{file} has {found} bytes, it was written with {size}", path=str(file))


def _crc32(file: Any, chunk: StoredChunk) -> int:
    file.seek(chunk.position)
    left, crc32 = chunk.length, 0
    while left:
        block = file.read(min(left, _BLOCK))
        if not block:
            return -1
        crc32 = zlib.crc32(block, crc32)
        left -= len(block)
    return crc32
