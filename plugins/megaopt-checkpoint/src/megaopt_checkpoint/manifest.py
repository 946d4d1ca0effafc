"""The manifest: everything about a checkpoint except the bytes of its tensors, as JSON with a checksum."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from attrs import asdict

from megaopt_checkpoint.files import write_durably
from megaopt_checkpoint.folder import HeldFolder
from megaopt_checkpoint.parsing import parse_manifest
from megaopt_checkpoint.stored import Manifest
from megaopt_checkpoint.strict_json import read_json
from megaopt_core.errors import CheckpointCorruptError, CheckpointError

__all__ = ["MANIFEST", "manifest_in", "parse_manifest", "read_manifest", "write_manifest"]

MANIFEST = "manifest.json"
_CHECKSUM = "manifest.sha256"
_FORMAT = "megaopt-checkpoint"

_LONGEST = 2**31
"""Bytes of a manifest: a hundred times those of 70,000 parameters from 1,024 ranks."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest and its checksum, durably.

    Args:
        folder: an existing folder.
        manifest: what to write.
    """
    body = json.dumps({"format": _FORMAT, **asdict(manifest)}, separators=(",", ":"), allow_nan=False)
    data = body.encode() + b"\n"
    write_durably(folder / MANIFEST, data)
    write_durably(folder / _CHECKSUM, _checksum_line(data))


def _checksum_line(data: bytes) -> bytes:
    """Return the line that `sha256sum --check` understands."""
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: there is no checkpoint at this path, or it is a symbolic link.
        CheckpointVersionError: it has another format than the one that is read.
        CheckpointCorruptError: the manifest is not what was written.
    """
    with HeldFolder(path) as folder:
        return manifest_in(folder)


def manifest_in(folder: HeldFolder) -> Manifest:
    """Read and check the manifest in a folder that is held.

    Args:
        folder: the checkpoint's.

    Raises:
        CheckpointError: as :func:`read_manifest`.
    """
    data, checksum = folder.read(MANIFEST, _LONGEST), folder.read(_CHECKSUM, len(_checksum_line(b"")))
    if data is None or checksum is None:
        raise _no_manifest(folder, MANIFEST if data is None else _CHECKSUM)
    path = folder.path / MANIFEST
    if checksum != _checksum_line(data):
        raise CheckpointCorruptError(
            f"{path} was changed after the save: its SHA-256 differs from that in {_CHECKSUM}", path=str(path)
        )
    values = read_json(data, path)
    if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
        raise CheckpointError(f"{path} is not a megaopt checkpoint's", path=str(folder.path))
    return parse_manifest(path, values)


def _no_manifest(folder: HeldFolder, missing: str) -> CheckpointError:
    names, path = folder.names(), folder.path
    if missing == MANIFEST and ".metadata" in names:
        return CheckpointError(
            f"{path} was written by torch.distributed.checkpoint itself, not by save_checkpoint: load it with "
            "torch.distributed.checkpoint.load and optimizer.checkpoint_state()",
            path=str(path),
        )
    if names & {MANIFEST, _CHECKSUM}:
        return CheckpointCorruptError(f"{path / missing} is missing", path=str(path / missing))
    return CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}", path=str(path))
