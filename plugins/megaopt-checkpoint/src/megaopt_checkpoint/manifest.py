"""The manifest: everything about a checkpoint except the bytes of its tensors, as JSON with a checksum."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from attrs import asdict

from megaopt_checkpoint.files import write_durably
from megaopt_checkpoint.folder import HeldFolder
from megaopt_core.errors import CheckpointCorruptError, CheckpointError, CheckpointVersionError
from megaopt_core.state import Manifest, StoredChunk, StoredTensor, with_named_codes
from megaopt_core.state._manifest import FORMAT_VERSION

__all__ = ["MANIFEST", "manifest_in", "parse_manifest", "read_manifest", "write_manifest"]


MANIFEST = "manifest.json"
_CHECKSUM = "manifest.sha256"
_FORMAT = "megaopt-checkpoint"


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
        CheckpointVersionError: a newer version of megaopt wrote it.
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
    data, checksum = folder.read(MANIFEST), folder.read(_CHECKSUM)
    if data is None or checksum is None:
        raise _no_manifest(folder, MANIFEST if data is None else _CHECKSUM)
    path = folder.path / MANIFEST
    if checksum != _checksum_line(data):
        raise CheckpointCorruptError(
            f"{path} is not what was written: its SHA-256 differs from that in {_CHECKSUM}", path=str(path)
        )
    values = json.loads(data)
    if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
        raise CheckpointError(f"{path} is not a megaopt checkpoint's", path=str(folder.path))
    return parse_manifest(folder.path, values)


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


def parse_manifest(folder: Path, values: Any) -> Manifest:
    """Return the manifest that a JSON document holds.

    Args:
        folder: where it comes from.
        values: the document.

    Raises:
        CheckpointVersionError: a newer version of megaopt wrote it.
        CheckpointCorruptError: it names a file outside of its folder.
    """
    version = values.get("version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        by = values.get("written", {}).get("megaopt-core", "a newer version")
        raise CheckpointVersionError(
            f"{folder} has format version {version}, written by megaopt-core {by}; this one reads up to version "
            f"{FORMAT_VERSION}: pip install --upgrade megaopt-core",
            path=str(folder),
        )
    tensors = {
        key: StoredTensor(
            tensor["dtype"],
            tuple(tensor["shape"]),
            tuple(
                StoredChunk(**{**chunk, "offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])})
                for chunk in tensor["chunks"]
            ),
        )
        for key, tensor in values.pop("tensors").items()
    }
    for name in values["files"]:
        if Path(name).name != name or name.startswith("."):
            raise CheckpointCorruptError(
                f"{folder / MANIFEST} names a file outside its folder: {name!r}", path=str(folder)
            )
    if version == 1 and values.get("optimizer"):
        optimizer = values["optimizer"]
        values["optimizer"] = {**optimizer, "parameters": with_named_codes(optimizer["parameters"])}
    return Manifest(tensors=tensors, **{**values, "version": FORMAT_VERSION})
