"""A manifest from JSON: every field checked before anything is done with it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from megaopt_checkpoint.algorithms import ALGORITHMS, OLDEST
from megaopt_checkpoint.coverage import tiles
from megaopt_checkpoint.parsed_states import References, check_model, check_optimizer
from megaopt_checkpoint.schema import Schema
from megaopt_checkpoint.strict_json import without_collection
from megaopt_core.errors import CheckpointVersionError
from megaopt_core.state import FORMAT_VERSION, Manifest, StoredChunk, StoredTensor, with_named_codes

__all__ = ["parse_manifest"]

_FIELDS = {
    *("version", "world_size", "files", "tensors", "model", "optimizer", "scheduler", "extra"),
    *("configuration", "plugins", "written"),
}
_CHUNK = {"offsets", "sizes", "file", "position", "length"}
_NAMED_SUMS = 4  # the format that says how they are computed; those before have CRC-32 as numbers
_NONE: frozenset[str] = frozenset()


def parse_manifest(path: Path, values: Any, *, in_one_file: bool = False) -> Manifest:
    """Return the manifest that a JSON document holds.

    Args:
        path: where it comes from.
        values: the document.
        in_one_file: its tensors are in a consolidated file, one box each, not in files of ranks.

    Raises:
        CheckpointVersionError: a newer version of megaopt wrote it.
        CheckpointCorruptError: a field is not what the format says, a tensor has holes, or a file is outside of the
            folder.
    """
    schema = Schema(path)
    _require_version(path, schema.mapping(values, "the document"))
    names_sums = values["version"] >= _NAMED_SUMS
    schema.fields(values, "the document", _FIELDS | ({"checksums"} if names_sums else set()), _NONE)
    with without_collection():
        manifest = _parsed(schema, values, in_one_file)
    return _upgraded(manifest) if manifest.version < FORMAT_VERSION else manifest


def _upgraded(manifest: Manifest) -> Manifest:
    """Return a manifest of an older format as one of today's; in format 1 codes of states have no names."""
    optimizer = manifest.optimizer
    if optimizer is not None and manifest.version == 1:
        optimizer = {**optimizer, "parameters": with_named_codes(optimizer["parameters"])}
    return evolve(manifest, optimizer=optimizer, version=FORMAT_VERSION)


def _parsed(schema: Schema, values: Mapping[str, Any], in_one_file: bool) -> Manifest:
    sums = _sums(schema, values)
    files = {
        schema.file(name, "files"): schema.count(size, f"files.{name}")
        for name, size in schema.mapping(values["files"], "files").items()
    }
    names = {*files, ""} if in_one_file else {*files}
    tensors = {
        key: _tensor(schema, f"tensors.{key}", entry, names, sums)
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
        version=values["version"],
        checksums=sums.algorithm,
    )


def _require_version(path: Path, values: Mapping[str, Any]) -> None:
    version, written = values.get("version"), values.get("written")
    if type(version) is int and 1 <= version <= FORMAT_VERSION:
        return
    by = written.get("megaopt-core") if isinstance(written, dict) else None
    raise CheckpointVersionError(
        f"{path.parent} has format version {version!r}, written by megaopt-core {by or 'a newer version'}; this one "
        f"reads up to version {FORMAT_VERSION}: pip install --upgrade megaopt-core",
        path=str(path.parent),
    )


@frozen
class _Sums:
    """How a manifest has the sum of a box: under which name, and as how many hexadecimal digits, or as a number."""

    algorithm: str
    field: str
    digits: int | None

    def read(self, schema: Schema, chunk: Mapping[str, Any], where: str) -> str:
        """Return the digits of a box's sum."""
        if self.digits is None:
            return f"{schema.count(chunk[self.field], where, below=2**32):08x}"
        return schema.digits(chunk[self.field], where, self.digits)


def _sums(schema: Schema, values: Mapping[str, Any]) -> _Sums:
    if values["version"] < _NAMED_SUMS:
        return _Sums(OLDEST, "crc32", None)
    name = values["checksums"]
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise schema.fault("checksums", name, f"one of {sorted(ALGORITHMS)}")
    return _Sums(name, "checksum", ALGORITHMS[name].digits)


def _tensor(schema: Schema, where: str, entry: Any, names: AbstractSet[str], sums: _Sums) -> StoredTensor:
    schema.fields(entry, where, {"dtype", "shape", "chunks"}, _NONE)
    dtype = schema.dtype(entry["dtype"], where)
    shape = schema.sizes(entry["shape"], where)
    chunks = [
        _chunk(schema, where, chunk, shape, dtype, names, sums)
        for chunk in schema.sequence(entry["chunks"], where)
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
    sums: _Sums,
) -> StoredChunk:
    schema.fields(chunk, where, _CHUNK | {sums.field}, _NONE)
    offsets, sizes = schema.box(chunk["offsets"], chunk["sizes"], where, shape)
    file, length = schema.text(chunk["file"], where), chunk["length"]
    if file not in names:
        raise schema.fault(where, file, "one of the manifest's files")
    if type(length) is not int or length != math.prod(sizes) * dtype.itemsize:
        raise schema.fault(where, length, f"the bytes of {sizes} elements of {dtype}")
    position, checksum = schema.count(chunk["position"], where), sums.read(schema, chunk, where)
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
