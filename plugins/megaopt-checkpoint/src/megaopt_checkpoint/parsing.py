"""A manifest from JSON: every field checked before anything is done with it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch

from megaopt_checkpoint.checksums import DIGITS
from megaopt_checkpoint.coverage import tiles
from megaopt_checkpoint.parsed_states import References, check_model, check_optimizer
from megaopt_checkpoint.schema import Schema
from megaopt_checkpoint.stored import CHECKSUMS, Manifest, StoredChunk, StoredTensor, require_format
from megaopt_checkpoint.strict_json import without_collection

__all__ = ["parse_manifest"]

_FIELDS = {
    *("version", "world_size", "files", "tensors", "model", "optimizer", "scheduler", "extra"),
    *("configuration", "plugins", "written", "checksums"),
}
_CHUNK = {"offsets", "sizes", "file", "position", "length", "checksum"}
_NONE: frozenset[str] = frozenset()


def parse_manifest(path: Path, values: Any, *, in_one_file: bool = False) -> Manifest:
    """Return the manifest that a JSON document holds.

    Args:
        path: where it comes from.
        values: the document.
        in_one_file: its tensors are in a consolidated file, one box each, not in files of ranks.

    Raises:
        CheckpointVersionError: it has another format than the one that is read.
        CheckpointCorruptError: a field is not what the format says, a tensor has holes, or a file is outside of the
            folder.
    """
    schema = Schema(path)
    _require_version(path if in_one_file else path.parent, schema.mapping(values, "the document"))
    schema.fields(values, "the document", _FIELDS, _NONE)
    if values["checksums"] != CHECKSUMS:
        raise schema.fault("checksums", values["checksums"], repr(CHECKSUMS))
    with without_collection():
        return _parsed(schema, values, in_one_file)


def _parsed(schema: Schema, values: Mapping[str, Any], in_one_file: bool) -> Manifest:
    files = {
        schema.file(name, "files"): schema.count(size, f"files.{name}")
        for name, size in schema.mapping(values["files"], "files").items()
    }
    names = {*files, ""} if in_one_file else {*files}
    tensors = {
        key: _tensor(schema, f"tensors.{key}", entry, names)
        for key, entry in schema.mapping(values["tensors"], "tensors").items()
    }
    _require_files(schema, files, tensors)
    references = References(schema, tensors, set())
    configuration = values["configuration"]
    if configuration is not None:
        schema.mapping(configuration, "configuration")
    return Manifest(
        world_size=schema.count(values["world_size"], "world_size", 1),
        files=files,
        tensors=tensors,
        model=check_model(schema, values["model"], references),
        optimizer=check_optimizer(schema, values["optimizer"], references),
        scheduler=references.check(values["scheduler"], "scheduler"),
        extra=references.check(values["extra"], "extra"),
        configuration=configuration,
        plugins=schema.texts(values["plugins"], "plugins"),
        written=schema.texts(values["written"], "written"),
    )


def _require_version(path: Path, values: Mapping[str, Any]) -> None:
    version, written = values.get("version"), values.get("written")
    by = written.get("megaopt-core") if isinstance(written, dict) else None
    require_format(str(path), version, by)


def _tensor(schema: Schema, where: str, entry: Any, names: AbstractSet[str]) -> StoredTensor:
    schema.fields(entry, where, {"dtype", "shape", "chunks"}, _NONE)
    dtype = schema.dtype(entry["dtype"], where)
    shape = schema.sizes(entry["shape"], where)
    chunks = [
        _chunk(schema, where, chunk, shape, dtype, names) for chunk in schema.sequence(entry["chunks"], where)
    ]
    # A rank that has nothing of a DTensor saves an empty box.
    boxes_of = [(chunk.offsets, chunk.sizes) for chunk in chunks if math.prod(chunk.sizes) or 0 in shape]
    if not tiles(shape, boxes_of):
        boxes = [[*chunk.offsets, *chunk.sizes] for chunk in chunks]
        raise schema.fault(where, boxes, f"every element of the shape {shape} exactly once")
    return StoredTensor(entry["dtype"], shape, tuple(chunks))


def _chunk(
    schema: Schema,
    where: str,
    chunk: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    names: AbstractSet[str],
) -> StoredChunk:
    schema.fields(chunk, where, _CHUNK, _NONE)
    offsets, sizes = schema.box(chunk["offsets"], chunk["sizes"], where, shape)
    file, length = schema.text(chunk["file"], where), chunk["length"]
    if file not in names:
        raise schema.fault(where, file, "one of the manifest's files")
    if type(length) is not int or length != math.prod(sizes) * dtype.itemsize:
        raise schema.fault(where, length, f"the bytes of {sizes} elements of {dtype}")
    position, checksum = (
        schema.count(chunk["position"], where),
        schema.digits(chunk["checksum"], where, DIGITS),
    )
    return StoredChunk(offsets, sizes, file, position, length, checksum)


def _require_files(schema: Schema, files: Mapping[str, int], tensors: Mapping[str, StoredTensor]) -> None:
    """Every byte of every file belongs to one box: what is read into memory is no larger than the files are."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            ranges[chunk.file].append((chunk.position, chunk.length))
    for name, size in files.items():
        end = 0
        for position, length in sorted(ranges[name]):
            if position != end:
                raise schema.fault(f"files.{name}", position, f"where its next box begins, which is {end}")
            end += length
        if end != size:
            raise schema.fault(f"files.{name}", size, f"the sum of its boxes, which is {end}")
